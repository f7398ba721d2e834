"""summary: what became of each module of a model."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from qgnn.convert.layers import is_listed, mark_of, unwrapped, walk, why_left
from qgnn.nn._layer import Quantized
from qgnn.nn.epilogue import Epilogue
from qgnn.tables import as_text


@dataclass(frozen=True)
class Row:
    """One module of a :class:`Summary`.

    Args:
        name: Its name, as in ``named_modules()``.
        layer: Its class.
        what: ``"int8"``, ``"int4"``, ...: the codes of its operands; ``"fp32"`` for a converted layer in full
            precision; ``None`` for a module that was left alone.
        epilogue: What the layer applies to its result.
        reason: Why it is in full precision, or was left alone.
        note: What the layer has to say about itself.
    """

    name: str
    layer: str
    what: str | None
    epilogue: str | None = None
    reason: str | None = None
    note: str | None = None


class Summary:
    """What became of the modules of a model: its layers, and all others that have parameters.

    Args:
        rows: One for each module.
    """

    def __init__(self, rows: list[Row]) -> None:
        self.rows = rows

    @property
    def converted(self) -> list[str]:
        """Names of the layers with quantized operands."""
        return [row.name for row in self.rows if row.what not in (None, "fp32")]

    @property
    def kept(self) -> list[str]:
        """Names of the converted layers that stay in full precision."""
        return [row.name for row in self.rows if row.what == "fp32"]

    @property
    def left(self) -> list[str]:
        """Names of the modules that are what they were."""
        return [row.name for row in self.rows if row.what is None]

    def __getitem__(self, name: str) -> Row:
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(f"{name!r} is none of {[row.name for row in self.rows]}")

    def __str__(self) -> str:
        from rich.table import Table

        table = Table("module", "class", "operands", "behind it", "why", title="qgnn summary")
        for row in self.rows:
            why = "; ".join(filter(None, (row.reason, row.note)))
            table.add_row(row.name or "(the model)", row.layer, row.what or "left alone", row.epilogue or "", why)
        return as_text(table, width=120)

    def __repr__(self) -> str:
        return f"Summary({len(self.converted)} quantized, {len(self.kept)} in full precision, {len(self.left)} left)"


def summary(model: nn.Module) -> Summary:
    """What became of each module in :func:`quantize_`, and why.

    Args:
        model: A model or a layer, converted or not.

    Returns:
        A :class:`qgnn.convert.Summary`; read ``.rows``, ``.converted``, ``.kept``, ``.left``, or print it as a table.

    Raises:
        TypeError: If ``model`` is no module.

    Example:
        >>> print(qgnn.summary(qgnn.quantize_(model, qgnn.QConfig())))
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"'summary' expects 'model' to be a torch.nn.Module (got {type(model).__name__})")
    rows = []
    for name, module in walk(unwrapped(model)):
        if isinstance(module, Quantized):
            rows.append(_row(name, module))
        elif is_listed(module):
            rows.append(Row(name, type(module).__name__, None, reason=why_left(module)))
    return Summary(rows)


def _row(name: str, layer: Quantized) -> Row:
    assert isinstance(layer, nn.Module)
    mark = mark_of(layer)
    reason = "config is None" if layer.config is None else None
    if reason is not None and mark is not None and mark.reason is not None:
        reason = mark.reason
    return Row(name, layer._get_name(), layer.operands, _told(layer.applied), reason, layer.note)


def _told(epilogue: Epilogue | None) -> str | None:
    if epilogue is None:
        return None
    parts = [epilogue.activation, f"dropout {epilogue.dropout:g}" if epilogue.dropout else None]
    return ", ".join(filter(None, parts)) or None
