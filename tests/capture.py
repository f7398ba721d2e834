"""Steps recorded once and run again without Python: CUDA graphs on a GPU; on a CPU, where there are none, graphs traced
from tensors without values. Neither can be made of a step that waits for a value of a tensor."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

Step = Callable[..., tuple[Tensor, ...]]


def record(step: Step, inputs: tuple[Tensor, ...]) -> Callable[[], list[Tensor]]:
    """What runs ``step`` again on whatever ``inputs`` hold by then."""
    if not inputs[0].is_cuda:
        step(*inputs)  # builds what is kept of a graph
        recorded = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
        read = torch.ops.aten._local_scalar_dense.default
        assert not [node for node in recorded.graph.nodes if node.target == read], "the step reads a value of a tensor"
        return lambda: list(recorded(*inputs))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(*inputs)  # compiles the kernels too
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step(*inputs)

    def replay() -> list[Tensor]:
        graph.replay()
        return [output.clone() for output in outputs]

    return replay
