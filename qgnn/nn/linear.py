"""QLinear: a dense layer on integer operands."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch_geometric.nn.dense.linear import Linear

from qgnn import functional
from qgnn.config import QConfig
from qgnn.nn._common import operand
from qgnn.nn._layer import Quantized
from qgnn.nn.epilogue import Epilogue
from qgnn.qtensor import QTensor


class _Product(Quantized):
    """The product itself, whatever class the dense layer stands in for."""

    weight: Tensor
    bias: Any

    def forward(self, x: Tensor | QTensor) -> Tensor:
        """Multiply ``x`` with the weight.

        Args:
            x: Rows, as above.
        """
        return self.product(x)

    def product(self, x: Tensor | QTensor) -> Tensor:
        """``x`` times the weight, within :meth:`forward`."""
        config = self.active
        out = functional.linear(operand(x, config), self.weight, self.bias, config=config, **self.in_kernel())
        return self.behind_kernel(out)


class QLinear(_Product, Linear):
    r"""The dense layer :math:`y = x W^{\top} + b` with quantized operands, forward and backward.

    A :class:`torch_geometric.nn.Linear` with the same parameters and state dict: weights stay fp32 and are quantized
    anew in each step. After `"Tango: Rethinking Quantization for Graph Neural Network Training on GPUs"
    <https://arxiv.org/abs/2308.00890>`_.

    Args:
        in_channels: Size of each input row, or ``-1`` to take it from the first input.
        out_channels: Size of each output row.
        bias: Whether to learn an additive bias.
        config: How to quantize; ``None`` is full precision.
        epilogue: What to apply to the result, in the product's own pass where it can.
        **kwargs: Further arguments of :class:`torch_geometric.nn.Linear`.

    Shapes:
        - **input:** ``[..., F_in]``, a tensor or a :class:`qgnn.QTensor`
        - **output:** ``[..., F_out]``

    Raises:
        TypeError: If ``config`` is no :class:`qgnn.QConfig`.

    Example:
        >>> layer = qgnn.nn.QLinear(64, 32)
        >>> y = layer(torch.randn(100, 64))
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        bias: bool = True,
        *,
        config: QConfig | None = QConfig(),
        epilogue: Epilogue | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(in_channels, out_channels, bias, **kwargs)
        self.configure(config, epilogue)


class QTorchLinear(_Product, nn.Linear):
    """What a :class:`torch.nn.Linear` becomes by conversion: :class:`QLinear` for code that asks for torch's class."""

    pyg = nn.Linear

    def forward(self, input: Tensor | QTensor) -> Tensor:
        """Multiply ``input`` with the weight.

        Args:
            input: Rows, as above; torch's name of it.
        """
        return self.product(input)

    def _get_name(self) -> str:
        return QLinear.__name__
