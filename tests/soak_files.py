"""Damaged storage and files for ``tests/soak.py``: refused with a clear error, or what was written.

Never a crash, an error of another library, other values than were written, or memory that the file is not worth.
"""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qgnn import CompressedTensor, QConfig, QTensor, functional
from qgnn.cli.checkpoint import Checkpoint, read_checkpoint
from qgnn.cli.errors import UsageError
from qgnn.cli.sweep.journal import DONE, FAILED, RUN, START, Journal, recorded_in
from qgnn.cli.sweep.runner import check_device, missing
from qgnn.cli.sweep.spec import read_spec
from qgnn.cli.sweep.table import panels, summary, write_table
from qgnn.data import FeatureFileError, QuantizedFeatureStore, StoredFeatures, write_features
from qgnn.distributed import save_partitions
from qgnn.distributed.shards import load_shard
from qgnn.formats import parse
from soak_cases import is_house_error
from soak_draw import WIDTHS, Draw, draw_blocks, draw_edges
from soak_oracle import assert_same
from sweep_fakes import HEADER, runs_of

VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, 1, 7, 2**31, 2**63, 2**64, 10**30, 1.5, float("nan"), float("inf"), "", "x", "cpu", "done"),
    *([], [1], [[]], {}, {"a": 1}, "\0", "a\nb", [0] * 70),
)


def damaged(draw: random.Random, content: bytes) -> bytes:
    """The content with one to three changes, of bytes or of stretches."""
    data = bytearray(content)
    for _ in range(draw.randint(1, 3)):
        start = draw.randrange(len(data) + 1)
        stop = min(len(data), start + draw.choice((1, 1, 2, 8, 100)))
        change = draw.choice(("flip", "flip", "bit", "cut", "insert", "repeat", "zero", "swap", "drop", "nest"))
        if change == "flip" and start < len(data):
            data[start] = draw.randrange(256)
        elif change == "bit" and start < len(data):
            data[start] ^= 1 << draw.randrange(8)
        elif change == "cut":
            del data[start:]
        elif change == "insert":
            data[start:start] = draw.randbytes(draw.choice((1, 4, 64)))
        elif change == "repeat":
            data[start:start] = data[start:stop]
        elif change == "zero":
            data[start:stop] = bytes(stop - start)
        elif change == "swap":
            data[start:stop] = data[start:stop][::-1]
        elif change == "drop":
            del data[start:stop]
        elif change == "nest":
            data[start:start] = b"[" * draw.choice((2, 100_000))
    return bytes(data)


def mutated(draw: random.Random, value: Any) -> Any:
    """JSON with one value of another kind, or without one of its keys, or with one more."""
    if isinstance(value, dict) and value and draw.random() < 0.8:
        key = draw.choice(sorted(value))
        change = draw.random()
        if change < 0.15:
            return {k: v for k, v in value.items() if k != key}
        if change < 0.25:
            return value | {"foreign": 1}
        return value | {key: mutated(draw, value[key])}
    if isinstance(value, list) and value and draw.random() < 0.5:
        i = draw.randrange(len(value))
        return [*value[:i], mutated(draw, value[i]), *value[i + 1 :]]
    return draw.choice(VALUES)


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="qgnn-soak-") as name:
        yield Path(name)


@contextlib.contextmanager
def refusing(*errors: type[Exception]) -> Iterator[None]:
    """Errors of these types that are one line, and one line alone, are what is wanted."""
    said = "nothing"
    try:
        yield
    except errors as error:
        said = str(error)
    assert said.count("\n") == 0 < len(said), f"an error is one line (got {said!r})"


# --- storage


def storage(draw: Draw) -> None:
    """A compressed or quantized tensor with a field that is not its own."""
    record, use = draw.choice((_compressed, _quantized))(draw)
    name = draw.choice([name for name in vars(record) if name not in ("origin", "columns", "name")])
    value = _foreign(draw, getattr(record, name))
    spoiled = replace(record, **{name: value})
    try:
        out = use(spoiled)
    except Exception as error:
        if not is_house_error(error):
            shown = f"{list(value.shape)} {value.dtype}" if isinstance(value, Tensor) else repr(value)[:80]
            raise AssertionError(
                f"{type(record).__name__} with {name}={shown} raises {type(error).__name__}: {error}"
            ) from error
    else:
        assert isinstance(out, Tensor)


def _compressed(draw: Draw) -> tuple[CompressedTensor, Callable[[Any], Any]]:
    blocks = draw_blocks(draw)
    x = torch.randn(draw.size(40), draw.any_of(WIDTHS))
    options = {name: getattr(blocks, name) for name in ("bits", "block_size", "bins", "projection", "metadata_dtype")}
    rows = draw.choice((None, slice(0, 3), slice(1, 2)))
    return functional.compress(x, **options, seed=1), lambda c: functional.decompress(c, rows)


def _quantized(draw: Draw) -> tuple[QTensor, Callable[[Any], Any]]:
    x, weight = torch.randn(draw.size(40), draw.any_of(WIDTHS)), torch.randn(5, 1)
    fmt = draw.choice((QConfig(), QConfig(granularity="tensor"), *map(parse, ("int4", "msfp12", "mxfp4", "fixed8"))))
    q = functional.quantize(x, fmt)
    edges = draw_edges(draw, x.shape[0], x.shape[0])
    config = draw.choice((None, QConfig()))
    use = (
        lambda q: q.dequantize(),
        lambda q: functional.linear(q, weight.expand(5, x.shape[1]), config=config),
        lambda q: functional.spmm(edges, q, config=config),
    )
    return q, draw.choice(use)


def _foreign(draw: Draw, value: Any) -> Any:
    """Of a tensor one of another size, type, layout, device or with other values; else anything."""
    if not isinstance(value, Tensor):
        kept = [value] if value is None or isinstance(value, torch.dtype) else []
        return draw.choice((*kept, torch.Size([3]), torch.Size([]), torch.int64, torch.float16, *VALUES))
    poison = draw.choice((float("nan"), float("inf"), -float("inf"), 1e38, 0.0, 127.0))
    return draw.choice(
        (
            lambda t: t[:-1],
            lambda t: torch.cat([t, t]),
            lambda t: t[:0],
            lambda t: t[..., :-1],
            lambda t: t.flatten(),
            lambda t: t.unsqueeze(0),
            lambda t: t.repeat_interleave(2, dim=-1)[..., ::2] if t.dim() else t,
            lambda t: t.to("meta"),
            lambda t: t.view(torch.uint8),
            lambda t: t.to(torch.int64) if t.dtype.itemsize > 1 or not t.is_floating_point() else t,
            lambda t: torch.zeros(t.shape, dtype=torch.complex64),
            lambda t: torch.full(t.shape, poison).to(t.dtype),
            lambda t: None,
            lambda t: 3,
        )
    )(value)


# --- files


def features(draw: Draw) -> None:
    """A folder of features with a file that is damaged, missing, another one or more than there should be."""
    x = torch.randn(draw.randint(1, 30), draw.any_of(WIDTHS[:8]))
    with folder() as root:
        expected = write_features(root / "features", x, chunk_rows=draw.choice((None, 1, 7))).rows
        expected = expected.with_tensors(*(t if t is None else t.clone() for t in expected.tensors))
        files = sorted((root / "features").iterdir())
        path, other = draw.sample(files, 2)
        change = draw.choice(("damage", "damage", "damage", "describe", "header", "swap", "missing", "folder", "extra"))
        if change == "damage":
            path.write_bytes(damaged(draw, path.read_bytes()))
        elif change == "describe":
            described = root / "features/features.json"
            meta = json.loads(described.read_text())
            other_meta = mutated(draw, meta)
            if isinstance(other_meta, dict) and other_meta.get("dtype") in ("float64", "float16", "bfloat16"):
                return  # nothing tells it from what was written
            described.write_text(json.dumps(other_meta))
        elif change == "header":
            _write_header(draw, root / "features", x.shape)
        elif change == "swap":
            content = path.read_bytes()
            path.write_bytes(other.read_bytes())
            other.write_bytes(content)
        elif change == "missing":
            path.unlink()
        elif change == "folder":
            path.unlink()
            path.mkdir()
        else:
            (root / "features" / draw.choice(("more.npy", "codes.npy.part", "features.json.new"))).write_bytes(b"?")
        with refusing(FeatureFileError):
            stored = StoredFeatures(root / "features")
            stored.verify()
            store = QuantizedFeatureStore()
            store[None, "x", None] = stored
            assert stored.rows.dtype == expected.dtype
            for actual, wanted in zip(stored.rows.tensors[:2], expected.tensors[:2], strict=True):
                assert_same(actual, wanted)
            assert_same(store[None, "x", None].dequantize(), expected.dequantize())


def _write_header(draw: Draw, path: Path, shape: tuple[int, ...]) -> None:
    """Sizes that no memory holds, said alike by all files, or columns before rows."""
    num_rows = draw.choice((2**40, 2**62, 2**63, 10**30))
    meta = json.loads((path / "features.json").read_text())
    if draw.chance(0.5):
        header = {"descr": "|i1", "fortran_order": True, "shape": tuple(shape)}
    else:
        header = {"descr": "|i1", "fortran_order": False, "shape": (num_rows, shape[1])}
        meta |= {"shape": [num_rows, shape[1]], "chunk_rows": num_rows}
    content = (path / "codes.npy").read_bytes()
    with (path / "codes.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        file.write(content[-max(1, int(np.prod(shape))) :])
    (path / "features.json").write_text(json.dumps(meta))


def journal(draw: Draw) -> None:
    """A journal with lines that are damaged, foreign, twice there, in another order or of another kind of values: what
    reads it, and all that is made of it."""
    runs = runs_of(draw.randint(1, 6))
    with folder() as root, contextlib.ExitStack() as stack:
        path = root / "journal.jsonl"
        with Journal(path) as made:
            made.append(START, **HEADER)
            for run in runs[: draw.randint(0, len(runs))]:
                result = {"test_acc": 0.5, "final_loss": 1.0, "best_epoch": 3, "mean_bits": 5.0, "widths": [2, 8]}
                ended = draw.choice(
                    ({"status": DONE, "result": result}, {"status": FAILED, "error": "no", "trace": ""})
                )
                made.append(RUN, key=run.key, run=run.fields, seconds=1.0, utc="", **ended)
        lines = path.read_bytes().splitlines(keepends=True)
        change, at = (
            draw.choice(("damage", "value", "value", "shuffle", "repeat", "foreign")),
            draw.randrange(len(lines)),
        )
        if change == "value":
            lines[at] = json.dumps(mutated(draw, json.loads(lines[at]))).encode() + b"\n"
        elif change == "shuffle":
            draw.shuffle(lines)
        elif change == "repeat":
            lines.insert(at, lines[draw.randrange(len(lines))])
        elif change == "foreign":
            lines.insert(at, draw.choice((b"{}\n", b"\n", b"null\n", b"\xff\n", b"[" * 100_000 + b"\n", b"1e999\n")))
        content = b"".join(lines)
        path.write_bytes(damaged(draw, content) if change == "damage" else content)
        stack.enter_context(refusing(UsageError))
        recorded_in(path)
        with Journal(path) as opened:
            check_device(opened, "cpu")
            missing(runs, opened.runs, True)
            write_table(root / "table.csv", runs, opened.runs)
            for panel in panels(runs, opened.runs):
                summary(panel)


SPEC = """
[sweep]
name = "fuzzed"
datasets = ["cora", "wordnet"]
models = ["gcn", "sage"]
formats = ["fp32", "int8", "msfp12"]
components = ["all", "weights"]
schedules = ["none", "sdq[2,8]"]
rounding = "nearest"
seeds = [0, 1]
epochs = 3
lr = 0.01
dropout = 0.5

[[grid]]
formats = ["int4"]
seeds = 2
"""


def spec(draw: Draw) -> None:
    """A specification with damaged bytes, words of another, or values of another kind."""
    with folder() as root:
        path = root / "spec.toml"
        lines = SPEC.splitlines()
        if draw.chance(0.5):
            path.write_bytes(damaged(draw, SPEC.encode()))
        else:
            at = draw.randrange(len(lines))
            value = draw.choice(('"x"', "[]", "[[1]]", "0", "-1", "1e400", "nan", "true", "9" * 30, "1979-05-27", "{}"))
            value = draw.choice((value, "9999999999", '"\\u0000"', "[1.5]", '["", 1]', '""', "inf"))
            lines[at] = f"{lines[at].partition('=')[0]}= {value}"
            draw.shuffle(lines) if draw.chance(0.2) else None
            path.write_text("\n".join(lines))
        with refusing(UsageError):
            found = read_spec(path)
            assert all(len(run.key) == 64 for run in found.runs)


def parts(draw: Draw) -> None:
    """A file of a part of a graph that is damaged, of another part, or of something else."""
    N, num_parts = draw.randint(1, 60), draw.randint(1, 3)
    edges = draw_edges(draw, N, N)
    with folder() as root:
        weight = torch.rand(edges.shape[1]) if draw.chance(0.5) else None
        save_partitions(root, edges, torch.arange(N) % num_parts, weight, num_parts=num_parts)
        rank = draw.randrange(num_parts)
        path, expected = root / f"part-{rank}-of-{num_parts}.pt", load_shard(root, rank, num_parts)
        change = draw.choice(("damage", "damage", "damage", "other", "value", "object", "folder"))
        if change == "damage":
            path.write_bytes(damaged(draw, path.read_bytes()))
        elif change == "other":
            other = root / f"part-{(rank + 1) % num_parts}-of-{num_parts}.pt"
            path.write_bytes(other.read_bytes())
        elif change == "folder":
            path.unlink()
            path.mkdir()
        else:
            content = vars(expected) if change == "value" else {"weight": torch.zeros(3)}
            name = draw.choice(sorted(content))
            torch.save(content | {name: _foreign(draw, content[name])} if draw.chance(0.8) else [content], path)
        same = change == "damage" or (change == "other" and num_parts == 1)
        with refusing(ValueError, FileNotFoundError):
            found = load_shard(root, rank, num_parts)
            assert found.rank == rank
            for name, value in vars(expected).items() if same else ():
                other = getattr(found, name)
                assert_same(other, value) if isinstance(value, Tensor) else _equal(other, value)


def _equal(a: Any, b: Any) -> None:
    assert a == b


def checkpoint(draw: Draw) -> None:
    """A checkpoint that is damaged, or holds something else."""
    with folder() as root:
        path = root / "run.pt"
        made = Checkpoint(path, 1, {"model": "gcn", "epochs": 3}, {"utc": "now"})
        made.runs.append({"seed": 0, "test_acc": 0.5})
        made.keep({"seed": 1}, {"model": {"weight": torch.randn(draw.randint(1, 40), 3)}, "epoch": 2})
        expected = read_checkpoint(path)
        change = draw.choice(("damage", "damage", "value", "folder", "missing"))
        if change == "damage":
            path.write_bytes(damaged(draw, path.read_bytes()))
        elif change == "value":
            content = expected | {draw.choice((*expected, "more")): draw.choice(VALUES)}
            torch.save(draw.choice((content, content, [content], {"weight": torch.zeros(2)})), path)
        else:
            path.unlink()
            path.mkdir() if change == "folder" else None
        with refusing(UsageError):
            found = read_checkpoint(path)
            again = Checkpoint(path, 1, {"model": "gcn", "epochs": 3}, {"utc": "later"})
            again.load(found)
            assert isinstance(again.has_ended({"seed": 0}), bool)
            again.state_of({"seed": 1})
            if change == "damage":
                assert again.runs == made.runs
                assert_same(
                    found["current"]["training"]["model"]["weight"], expected["current"]["training"]["model"]["weight"]
                )
    shutil.rmtree(root, ignore_errors=True)


KINDS: dict[str, Callable[[Draw], None]] = {
    "storage": storage,
    "features": features,
    "journal": journal,
    "spec": spec,
    "parts": parts,
    "checkpoint": checkpoint,
}
