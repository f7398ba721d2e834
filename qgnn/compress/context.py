"""``compress_activations``: what autograd keeps of any eager model, as codes of a few bits."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator
from contextlib import ContextDecorator, ExitStack
from types import MethodWrapperType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from qgnn.compress.budget import Budget, Key, with_bits
from qgnn.compress.choice import Excluded, Formats
from qgnn.compress.functions import DROPOUTS, REPLACEMENTS, redrawn_dropout
from qgnn.compress.modules import RunningModules
from qgnn.compress.policy import argument
from qgnn.compress.recorder import Recorder
from qgnn.compress.report import Report
from qgnn.formats import Blocks
from qgnn.rng import splitmix64
from qgnn.rounding import BLOCK_BITS

_here = threading.local()


def _open_recorders() -> list[Recorder]:
    """The recorders of this thread, the innermost last."""
    if not hasattr(_here, "recorders"):
        _here.recorders = []
    recorders: list[Recorder] = _here.recorders
    return recorders


@torch.compiler.disable(reason="'compress_activations' is entered outside of compiled functions")
def _refuse() -> None:
    raise RuntimeError(
        "'compress_activations' expects to be entered outside of functions that torch.compile has compiled, which "
        "decide themselves what they keep; open the block around the call, or use QConfig(save=...) within"
    )


class _Mode(TorchFunctionMode):
    """Tells a recorder which function runs, and replaces some."""

    def __init__(self, recorder: Recorder, redraw_dropout: bool, budget: Budget | None) -> None:
        super().__init__()
        self._recorder, self._redraw_dropout, self._budget = recorder, redraw_dropout, budget

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():  # traced: what a compiled function saves is its own
            return func(*args, **kwargs)
        if type(func) is MethodWrapperType:  # an attribute, of which layers read many
            value = func(*args, **kwargs)
            if not isinstance(value, torch.Tensor):
                return value
        # Under torch.func, arguments stand for others, which are what is saved.
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return func(*args, **kwargs)
        if func is Tensor.backward and self._budget is not None and self._budget.measures:
            gradient = argument(args, kwargs, 1, "gradient")
            self._budget.measure(self._recorder.seed, args[0], gradient)
        if not self._recorder.is_in_charge():
            return func(*args, **kwargs)
        if torch.is_grad_enabled():
            replacement = redrawn_dropout if self._redraw_dropout and func in DROPOUTS else REPLACEMENTS.get(func)
            result = None if replacement is None else replacement(self._recorder, func, args, kwargs)
            if result is not None:
                return result
        return self._recorder.run(func, args, kwargs)


class compress_activations(ContextDecorator):  # noqa: N801, a context manager, as torch.no_grad
    r"""Compress what autograd saves inside a block for the backward pass of an eager model.

    The forward pass is computed as without it, bit for bit; what its functions save is coded as
    :func:`qgnn.functional.compress` does, each tensor with a rounding at random of its own, and decoded when the
    backward pass asks for it. Gradients are unbiased, since only that is coded in which a gradient is linear:

    - operands of dense products, whose columns may be projected besides, and of products of elements;
    - of functions of single elements (ELU, GELU, SiLU, sigmoid, tanh, ...) the derivative, in place of the argument;
    - of losses with one result the gradient, in 8 bits (not of a loss in fp16, whose gradient would underflow before a
      scaler multiplies it); of softmax two roundings of its result;
    - of ReLU, leaky ReLU, hardtanh and dropout a bit an element, which is exact, as are narrower integers of indices.

    Of batch, layer, group and instance norm the input is coded, which leaves a bias: the rounding's variance over the
    number of values that a mean is of. Whatever else is saved (by extrema, functions of other packages, those that
    torch composes in Python, as of multi-head attention, or layers of ours, whose codes are small) is kept as it is,
    and so are parameters, constants from outside of the block, sparse tensors and vectors. The report lists it.

    After EXACT (Liu et al., ICLR 2022, ``block_rows`` = 1), its `block-wise successor
    <https://arxiv.org/abs/2309.11856>`_ (longer blocks, ``bins="optimal"``) and `GACT <https://arxiv.org/abs/2206.11357>`_.

    Blocks may be nested, in which case the innermost one holds, entered again and again, and used in several threads,
    one object in one thread at a time. The backward pass may run inside or outside of the block, more than once.
    What is saved stays as it is in functions that :func:`torch.compile` has compiled, which open no block either, under
    :func:`torch.vmap`, under :func:`torch.utils.checkpoint.checkpoint`, and under saved-tensor hooks that are set
    within the block. Layers of :mod:`qgnn.nn` compress there, too, with ``QConfig(save=...)``. A gradient of a gradient
    is refused where it would go through codes. A write that autograd does not see, through ``.data``, between two uses
    of a tensor goes unnoticed: both get the codes of the first.

    Args:
        bits: Width of a code: 1, 2, 4 or 8.
        block_size: Values that share an offset and a step; ``None`` chooses a length for the width, and ``"measured"``
            one for each tensor, by the variance of rounding that its first values have (not of those that are
            projected, which are as good as normal).
        projection: Ratio of a random projection of the columns of operands of dense products, or ``None``.
        bins: ``"uniform"``, or ``"optimal"``: bins that minimize the variance of normal values, for what is projected
            and for inputs of norms. Other values are rounded more coarsely by them, and keep uniform ones.
        block_rows: Rows that share an offset and a step, in place of ``block_size``: of what is coded, projected (the
            papers' G / R') or not. EXACT has one.
        seed: Seed of all rounding; a new object with the same one gives the same codes in the same order of functions,
            and goes on from there when it is entered again. ``None`` takes one from torch's generator, which is moved
            on at the end of the block: masks of the block's dropout stay what they would be without it.
        metadata_dtype: Type of offsets and steps (of losses bf16 in place of fp16).
        min_size: Tensors of fewer values are kept as they are.
        exclude: What torch keeps as it is: names of functions or modules (patterns with ``*``, as the report shows
            them), modules, predicates of the ``op``, ``module``, ``shape`` and ``dtype`` of a
            :class:`qgnn.compress.SavedTensor`, or several of these.
        redraw_dropout: Whether :func:`torch.nn.functional.dropout` draws its masks from a hash, and again in the
            backward pass, so that only a seed is kept. The masks are then others than torch's.
        budget_mib: MiB to keep for the backward passes of a block: widths are chosen tensor by tensor, 1, 2, 4 or 8
            bits, losses included, so that the variance of the gradient is least. In the first block, and every
            ``reestimate_every`` blocks, each ``backward()`` of a tensor inside the block runs once more and once for
            each coded tensor, to measure what its rounding does to the gradients of all leaves; these blocks keep 8
            bits a value. After GACT and `ActNN <https://arxiv.org/abs/2104.14129>`_. The budget holds for tensors of
            the sizes that were measured, larger batches take more. ``bits`` is the width of tensors that come up in
            between. Measuring calls :func:`torch.autograd.grad`, which runs the hooks of tensors each time, and which
            checkpoints with ``use_reentrant=True`` do not support.
        reestimate_every: Blocks from one measurement to the next.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a number is outside its range; at the end of a block that measures, if the budget is too small.
        RuntimeError: If a block is opened within a compiled function, or one that measures for a budget ends without
            ``backward()``; in the backward pass, if somebody has written to what was saved, as torch does, or with
            ``create_graph=True``.

    Example:
        >>> with qgnn.compress_activations(bits=2, block_size=1024, projection=8) as report:
        ...     loss = F.cross_entropy(model(x, edge_index)[mask], y[mask])
        ...     loss.backward()
        >>> print(report)
    """

    def __init__(
        self,
        bits: int = 2,
        block_size: int | str | None = None,
        projection: int | None = None,
        bins: str = "uniform",
        seed: int | None = None,
        *,
        block_rows: int | None = None,
        metadata_dtype: torch.dtype = torch.bfloat16,
        min_size: int = 1024,
        exclude: Excluded | Iterable[Excluded] = (),
        redraw_dropout: bool = False,
        budget_mib: float | None = None,
        reestimate_every: int = 200,
    ) -> None:
        counts = {"min_size": min_size, "reestimate_every": reestimate_every}
        optional = {"seed": seed, "block_rows": block_rows}
        for name, value in {**counts, **{k: v for k, v in optional.items() if v is not None}}.items():
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"'compress_activations' expects '{name}' to be an int (got {value!r})")
        if block_rows is not None and (block_size is not None or block_rows < 1):
            raise ValueError(
                f"'compress_activations' expects 'block_rows' of at least 1, and no 'block_size' beside it (got "
                f"{block_rows} and {block_size})"
            )
        self._block_rows = block_rows
        self._block_sizes: dict[tuple[Key, int], int] | None = None
        if isinstance(block_size, str):
            if block_size != "measured":
                raise ValueError(
                    f"'compress_activations' expects 'block_size' to be an int, None or 'measured' (got {block_size!r})"
                )
            block_size, self._block_sizes = None, {}
        self._blocks = self._given = Blocks(bits, block_size, projection, bins, metadata_dtype)
        if budget_mib is not None and (isinstance(budget_mib, bool) or not isinstance(budget_mib, (int, float))):
            raise TypeError(f"'compress_activations' expects 'budget_mib' to be a number or None (got {budget_mib!r})")
        if (budget_mib is not None and not budget_mib > 0) or reestimate_every < 1:
            raise ValueError(
                f"'compress_activations' expects a positive 'budget_mib', and 'reestimate_every' of at least 1 block "
                f"(got {budget_mib} and {reestimate_every})"
            )
        self._budget = None
        if budget_mib is not None:
            for width in BLOCK_BITS:  # a length that is whole bytes in one width may not be in another
                with_bits(self._blocks, width)
            self._budget = Budget(budget_mib, reestimate_every)
        self._seeds = None if seed is None else itertools.count(splitmix64(seed))
        self._min_size, self._redraw_dropout = min_size, redraw_dropout
        if isinstance(exclude, (str, nn.Module)) or callable(exclude) or not isinstance(exclude, Iterable):
            exclude = (exclude,)
        self._exclude = tuple(exclude)
        for rule in self._exclude:
            if isinstance(rule, type) or not (isinstance(rule, (str, nn.Module)) or callable(rule)):
                hint = "; give the modules of that class" if isinstance(rule, type) else ""
                raise TypeError(
                    f"'compress_activations' expects 'exclude' to hold names, modules or predicates (got {rule!r})"
                    f"{hint}"
                )
        self._open: list[ExitStack] = []

    @property
    def bits(self) -> int:
        """Width of a code. A new one holds from the next block on; bins are uniform in widths that have no others, and
        as they were given in those that have.

        Raises:
            TypeError: If it is set to something else than an int.
            ValueError: If it is set to another width than 1, 2, 4 or 8, to one in which a block of the given length
                would not be whole bytes, or where a budget chooses widths.
        """
        return self._blocks.bits

    @bits.setter
    def bits(self, bits: int) -> None:
        if self._budget is not None:
            raise ValueError(
                f"'compress_activations' chooses widths itself where it has a 'budget_mib' (got bits={bits!r}); make "
                f"one without a budget"
            )
        self._blocks = with_bits(self._given, bits)

    def state_dict(self) -> dict[str, int | None]:
        """How far the seeds have come, between two blocks: an object of the same arguments goes on from there with the
        same codes. What was measured for a budget or a length of blocks is not part of it."""
        if self._seeds is None:
            return {"next_seed": None}
        next_seed = next(self._seeds)
        self._seeds = itertools.count(next_seed)
        return {"next_seed": next_seed}

    def load_state_dict(self, state: dict[str, int | None]) -> None:
        """Go on from a :meth:`state_dict`.

        Args:
            state: As :meth:`state_dict` returned it.

        Raises:
            ValueError: If only one of the two has a seed of its own.
        """
        next_seed = state["next_seed"]
        if (next_seed is None) != (self._seeds is None):
            have, got = ("no seed", "with one") if self._seeds is None else ("a seed", "without one")
            raise ValueError(f"'compress_activations' has {have} (got the state of one {got}); give both the same")
        self._seeds = None if next_seed is None else itertools.count(next_seed)

    def __enter__(self) -> Report:
        if torch.compiler.is_compiling():
            _refuse()
        if self._budget is not None and self._open:
            raise RuntimeError(
                "'compress_activations' with a 'budget_mib' expects to be left before it is entered again, since it "
                "measures one block at a time; nest another object"
            )
        recorders, modules = _open_recorders(), RunningModules()
        chosen = (self._block_sizes, self._budget, self._block_rows)
        formats = Formats(self._blocks, self._exclude, modules.__contains__, *chosen)
        recorder = Recorder(formats, self._seeds_of_block(), self._min_size, modules.name)
        if self._budget is not None:
            self._budget.begin(recorder.report)
        with ExitStack() as stack:
            recorders.append(recorder)
            stack.callback(recorders.remove, recorder)
            stack.callback(recorder.end)
            modules.open(recorder.is_in_charge)
            stack.callback(modules.close)
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(recorder.pack, recorder.unpack))
            stack.enter_context(_Mode(recorder, self._redraw_dropout, self._budget))
            self._open.append(stack.pop_all())
        return recorder.report

    def __exit__(self, kind: Any, *exception: Any) -> None:
        self._open.pop().close()
        if self._seeds is None and not _open_recorders():
            torch.empty((), dtype=torch.int64, device="cpu").random_()  # the next block's seed is another one
        if self._budget is not None and kind is None:
            self._budget.end()

    def _seeds_of_block(self) -> Iterator[int]:
        """Seeds from the given one, from those of the block around, or from the number that torch's generator would
        draw next, without drawing it."""
        if self._seeds is not None:
            return self._seeds
        if _open_recorders():
            return itertools.count(splitmix64(next(_open_recorders()[-1].seeds)))
        twin = torch.Generator("cpu")
        twin.set_state(torch.get_rng_state())
        return itertools.count(int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=twin)))
