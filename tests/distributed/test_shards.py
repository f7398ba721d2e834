"""Parts of a graph hold all of it, once; their lists fit together; files bring them back."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import qgnn
import soak_files
from graphs import GRAPHS
from qgnn.distributed import save_partitions
from qgnn.distributed.shards import Cutter, Shard, load_shard
from soak_draw import Draw


def cut(edge_index: Tensor, parts: Tensor, num_parts: int, weight: Tensor | None = None) -> list[Shard]:
    cutter = Cutter(edge_index, parts, num_parts, weight)
    return [cutter.shard(rank) for rank in range(num_parts)]


def check(edge_index: Tensor, parts: Tensor, num_parts: int) -> None:
    weight = torch.arange(edge_index.shape[1], dtype=torch.float32)
    shards = cut(edge_index, parts, num_parts, weight)
    edges = []
    for shard in shards:
        nodes, rank = shard.nodes, shard.rank
        assert torch.equal(nodes, (parts == rank).nonzero().squeeze(1))
        inner = torch.stack([nodes[shard.inner[0]], nodes[shard.inner[1]]])
        halo = torch.stack([shard.halo_nodes[shard.halo[0]], nodes[shard.halo[1]]])
        assert (parts[inner] == rank).all()
        assert (parts[halo[0]] != rank).all()
        edges += [*zip(*inner.tolist(), shard.inner_weight.tolist(), strict=True)]
        edges += [*zip(*halo.tolist(), shard.halo_weight.tolist(), strict=True)]
        assert shard.inner_weight.diff().ge(0).all(), "edges keep their order"
        ordered = sorted(set(halo[0].tolist()), key=lambda node: (int(parts[node]), node))
        assert shard.halo_nodes.tolist() == ordered
        assert torch.equal(shard.received, torch.bincount(parts[shard.halo_nodes], minlength=num_parts))
        by_sender = shard.halo_nodes.split(shard.received.tolist())
        for sender, expected in zip(shards, by_sender, strict=True):
            sent = sender.nodes[sender.boundary].split(sender.sent.tolist())[rank]
            assert torch.equal(sent, expected)
    assert sorted(edges) == sorted(zip(*edge_index.tolist(), weight.tolist(), strict=True))
    assert len({shard.fingerprint for shard in shards}) == 1


@pytest.mark.parametrize("name", GRAPHS)
def test_parts_hold_the_graph(name: str) -> None:
    edge_index, num_nodes = GRAPHS[name]
    generator = torch.Generator().manual_seed(num_nodes)
    check(edge_index, torch.randint(4, (num_nodes,), generator=generator), 4)
    check(edge_index, torch.zeros(num_nodes, dtype=torch.int32), 2)


@settings(max_examples=40, derandomize=True, deadline=None)
@given(st.integers(1, 30), st.integers(0, 80), st.integers(1, 5), st.integers(0, 10**6))
def test_any_parts_hold_the_graph(num_nodes: int, num_edges: int, num_parts: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    edge_index = torch.randint(num_nodes, (2, num_edges), generator=generator)
    check(edge_index, torch.randint(num_parts, (num_nodes,), generator=generator), num_parts)


def test_fingerprints_differ_by_everything() -> None:
    edge_index, num_nodes = GRAPHS["random"]
    parts, weight = torch.arange(num_nodes) % 2, torch.rand(edge_index.shape[1])
    other_weight, other_parts = weight.clone(), parts.clone()
    other_weight[3] += 1
    other_parts[3] = 1 - other_parts[3]
    cases = [
        *((edge_index, parts, None), (edge_index, parts, weight), (edge_index, parts, other_weight)),
        *((edge_index, other_parts, weight), (edge_index.flip(0), parts, weight), (edge_index.flip(1), parts, weight)),
    ]
    found = {Cutter(edges, nodes, 2, weights).fingerprint for edges, nodes, weights in cases}
    assert len(found) == len(cases)
    same = Cutter(edge_index.int(), parts.int(), 2, weight[:, None])
    assert same.fingerprint == Cutter(edge_index, parts, 2, weight).fingerprint


def test_graphs_and_matrices_are_taken() -> None:
    edge_index, num_nodes = GRAPHS["random"]
    weight, parts = torch.rand(edge_index.shape[1]), torch.arange(num_nodes) % 2
    graph = qgnn.Graph.from_edge_index(edge_index, num_nodes, weight)
    for one, two in zip(cut(graph, parts, 2), cut(edge_index, parts, 2, weight), strict=True):
        order = [torch.argsort(t, stable=True) for t in (one.inner[1], two.inner[1])]
        assert torch.equal(one.inner[:, order[0]], two.inner[:, order[1]])
        assert torch.equal(one.inner_weight[order[0]], two.inner_weight[order[1]])


@pytest.mark.parametrize("weighted", [False, True])
def test_files_bring_parts_back(tmp_path: Path, weighted: bool) -> None:
    edge_index, num_nodes = GRAPHS["power_law"]
    parts = torch.arange(num_nodes) % 3
    weight = torch.rand(edge_index.shape[1]) if weighted else None
    save_partitions(tmp_path / "parts", edge_index, parts, weight)
    assert sorted(path.name for path in (tmp_path / "parts").iterdir()) == [f"part-{r}-of-3.pt" for r in range(3)]
    for rank, expected in enumerate(cut(edge_index, parts, 3, weight)):
        found = load_shard(tmp_path / "parts", rank, 3)
        assert vars(found).keys() == vars(expected).keys()
        for name, value in vars(expected).items():
            other = getattr(found, name)
            assert not isinstance(other, Tensor) or other.untyped_storage().nbytes() == other.nbytes, "of others too"
            assert torch.equal(value, other) if isinstance(value, Tensor) else value == other, name
    save_partitions(tmp_path / "parts", edge_index, parts, weight, num_parts=4)
    assert len(load_shard(tmp_path / "parts", 3, 4).nodes) == 0
    with pytest.raises(FileNotFoundError, match=r"part-0-of-2.pt, of a graph cut for 2 .* has part-0-of-3.pt, part-0-"):
        load_shard(tmp_path / "parts", 0, 2)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    """Torch checks no sums: another number of an edge would be another graph."""
    edge_index, num_nodes = GRAPHS["random"]
    save_partitions(tmp_path, edge_index, torch.arange(num_nodes) % 2)
    path = tmp_path / "part-0-of-2.pt"
    content = path.read_bytes()
    place = content.index(load_shard(tmp_path, 0, 2).inner.numpy().tobytes()) + 8
    for spoiled in (content[:-9], b"", content[:place] + b"\x01" + content[place + 1 :]):
        path.write_bytes(spoiled)
        with pytest.raises(ValueError, match=r"expects a whole file \(got .*; write it anew with 'save_partitions'"):
            load_shard(tmp_path, 0, 2)
    path.write_bytes((tmp_path / "part-1-of-2.pt").read_bytes())
    with pytest.raises(ValueError, match=r"expects part 0 of 2 \(got .*, which holds something else\)"):
        load_shard(tmp_path, 0, 2)
    torch.save({"weight": torch.zeros(3)}, path)
    with pytest.raises(ValueError, match=r"expects a part of a graph \(got .*, another file\)"):
        load_shard(tmp_path, 0, 2)


def test_parts_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    edge_index, num_nodes = GRAPHS["random"]
    save_partitions(tmp_path, edge_index, torch.arange(num_nodes) % 2, torch.rand(edge_index.shape[1]))
    part = vars(load_shard(tmp_path, 0, 2))
    for name, value in {
        "nodes": part["nodes"][:3],
        "halo_nodes": part["halo_nodes"].float(),
        "received": part["received"] + 1,
        "boundary": part["boundary"] + num_nodes,
        "sent": part["sent"][:1],
        "inner": part["inner"] - 1,
        "inner_weight": None,
        "halo": part["halo"][:1],
        "halo_weight": part["halo_weight"][1:],
        "fingerprint": None,
    }.items():
        torch.save(part | {name: value}, tmp_path / "part-0-of-2.pt")
        with pytest.raises(ValueError, match="expects part 0 of 2"):
            load_shard(tmp_path, 0, 2)


@settings(max_examples=30)
@given(st.integers(0, 2**63))
def test_whatever_is_damaged_is_refused_or_what_was_written(seed: int) -> None:
    soak_files.parts(Draw(seed))


def test_bad_arguments() -> None:
    edge_index, num_nodes = GRAPHS["random"]
    parts = torch.zeros(num_nodes, dtype=torch.long)
    for bad in (parts.float(), parts.bool(), [0] * num_nodes):
        with pytest.raises(TypeError, match="'parts' expects a tensor of integers"):
            Cutter(edge_index, bad, 2)
    with pytest.raises(ValueError, match=r"'parts' expects the shape \[N\] \(got \[50, 1\]\)"):
        Cutter(edge_index, parts[:, None], 2)
    for number in (-1, 2):
        with pytest.raises(ValueError, match=r"from 0 to 1, one for each process \(got"):
            Cutter(edge_index, parts.index_fill(0, torch.tensor([3]), number), 2)
    with pytest.raises(ValueError, match="source indices from 0 to 48"):
        Cutter(edge_index, parts[1:], 2)
    with pytest.raises(ValueError, match=r"one value an edge, \[200\] \(got \[7\]\)"):
        Cutter(edge_index, parts, 2, torch.ones(7))
    with pytest.raises(ValueError, match=r"'parts' expects numbers from 0 on \(got -1"):
        save_partitions("never", edge_index, parts - 1)
