"""One graph over several processes: what one process computes, up to the rounding of messages, which is unbiased."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import partitioned
import qgnn
from data_parallel import run
from graphs import GRAPHS
from partitioned import NAMES, RANKS, STEPS, UNWEIGHTED, WEIGHTED, parts_of, values
from qgnn.distributed import PartitionedGraph, mean_loss
from qgnn.distributed._messages import RowFormat
from qgnn.distributed.halo_exchange import _Message
from qgnn.rng import make_seed

Found = list[dict[Any, Any]]
BLOCKS = {4: 15, 2: 3, 1: 1}  # steps between the lowest and the highest code


def found_by(function: Any, folder: Path, ranks: int) -> Found:
    run(function, str(folder), ranks)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(ranks)]


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return found_by(partitioned.several, tmp_path_factory.mktemp("several"), RANKS)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return found_by(partitioned.train, tmp_path_factory.mktemp("train"), 2)


def close(found: Tensor, expected: Tensor) -> None:
    """Sums of float64 in another order: of at most 1,000 terms, none of which is more than 1,000 times the result."""
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_layers_compute_what_pyg_does_in_one_process(several: Found, name: str, weighted: bool) -> None:
    edge_index, num_nodes = GRAPHS[name]
    weight = (partitioned.weight_of(name),) if weighted else ()
    for key, layer in (WEIGHTED if weighted else UNWEIGHTED).items():
        conv = partitioned.made(layer, pyg=True)
        assert type(conv).__module__.startswith("torch_geometric")
        nodes = torch.arange(num_nodes)
        rows, gradient, *parameters = partitioned.run_layer(conv, values(num_nodes), edge_index, nodes, *weight)
        parts = [found[name, key, weighted] for found in several]
        for found, part in zip(several, parts, strict=True):
            close(part[0], rows[found[name]])
            close(part[1], gradient[found[name]])
        assert len(parts[0]) == 2 + len(parameters)
        for number, parameter in enumerate(parameters, 2):
            close(sum(part[number] for part in parts), parameter)


def dense(name: str) -> Tensor:
    """The number of edges from each node to each node, ``[target, source]``."""
    edge_index, num_nodes = GRAPHS[name]
    matrix = torch.zeros(num_nodes, num_nodes, dtype=torch.float64)
    return matrix.index_put_((edge_index[1], edge_index[0]), torch.ones((), dtype=torch.float64), accumulate=True)


def step_of(rows: Tensor, bits: int) -> Tensor:
    """The distance of codes of each row. Offsets and steps of blocks have 8 bits in bf16: they are off by ``2**-7``."""
    if bits == 8:
        return rows.abs().amax(1) / 126.9
    low, high = rows.aminmax(dim=1)
    return (high - low + 2.0**-7 * low.abs()) / BLOCKS[bits] * (1 + 2.0**-6)


@pytest.mark.parametrize("bits", [8, 4, 2, 1])
def test_sums_and_gradients_are_unbiased(several: Found, bits: int) -> None:
    """A rounding deviates by half the distance of codes at most, each row's by itself; 5 of a mean's deviations."""
    A, parts = dense("random"), parts_of("random")
    x, g = values(len(A)).float().double(), values(10**3, seed=1)[: len(A)].float().double()
    foreign = parts[:, None] != parts
    variance = (A * foreign).square() @ step_of(x, bits).square()
    expected, expected_gradient = A @ x, A.t() @ g
    variance_of_gradient = torch.zeros(len(A), dtype=torch.float64)
    for part in range(RANKS):
        sent = (A * (parts == part)[:, None]).t() @ g
        variance_of_gradient += torch.where(parts == part, 0.0, step_of(sent, bits).square())
    for found in several:
        nodes = found["nodes"]
        for total, mean, squares in zip(
            found["unbiased", bits], (expected, expected_gradient), (variance, variance_of_gradient), strict=True
        ):
            bound = 5 * 0.5 * (squares[nodes] / STEPS).sqrt()[:, None]
            assert ((total / STEPS - mean[nodes]).abs() <= bound + 1e-5).all()  # fp32 sums of few terms around 1
        once = found["runs", bits][0]
        assert (once[0] - expected[nodes]).abs().max() > 1e-3, "messages are rounded"
        assert (once[1] - expected_gradient[nodes]).abs().max() > 1e-3, "gradients are rounded"


def test_rows_as_they_are_give_the_sums_of_one_process(several: Found) -> None:
    A = dense("random")
    x, g = values(len(A)).float().double(), values(10**3, seed=1)[: len(A)].float().double()
    for found in several:
        total, gradient = found["unbiased", None]
        torch.testing.assert_close(total, (A @ x)[found["nodes"]], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(gradient, (A.t() @ g)[found["nodes"]], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bits", [8, 4, 2, 1])
def test_noise_follows_the_seed(several: Found, bits: int) -> None:
    for found in several:
        first, again, other = found["runs", bits]
        assert all(torch.equal(one, two) for one, two in zip(first, again, strict=True))
        assert all(not torch.equal(one, two) for one, two in zip(first, other, strict=True))


def test_processes_of_one_seed_round_independently(several: Found) -> None:
    """Equal rows at the same places: of two processes, a fraction of codes is equal that chance explains."""
    for found in several:
        rows, sources = found["same rows"]
        parts = parts_of("random")[sources]
        one, two = (rows[parts == part] for part in parts.unique().tolist())
        number = min(len(one), len(two))
        assert 0.3 < (one[:number] == two[:number]).float().mean() < 0.9


def test_without_gradients_rounding_is_to_nearest(several: Found) -> None:
    x = values(GRAPHS["random"][1]).float()
    for found in several:
        halo = found["same rows"][1]
        low, high = x[halo].aminmax(dim=1, keepdim=True)
        error = (found["nearest"] - x[halo]).abs()
        assert (error <= (high - low) / 6 + 2.0**-6 * low.abs().maximum(high.abs())).all()
        assert not found["drew"]


BYTES = {  # of a row, by hand: codes, and a scale, or an offset and a step a block
    **{(None, 128): 512, (None, 256): 1024, (None, 300): 1200},
    **{(8, 128): 128 + 4, (8, 256): 256 + 4, (8, 300): 300 + 4},
    **{(4, 128): 64 + 4, (4, 256): 128 + 4, (4, 300): 150 + 2 * 4},  # 300 values are two blocks of 150
    **{(2, 128): 32 + 4, (2, 256): 64 + 4, (2, 300): 2 * (38 + 4)},  # of 152, which fill their bytes
    **{(1, 128): 16 + 4, (1, 256): 32 + 4, (1, 300): 2 * (19 + 4)},
}


@pytest.mark.parametrize(("bits", "width"), BYTES)
def test_bytes_are_those_of_the_messages(several: Found, bits: int | None, width: int) -> None:
    for found in several:
        out, into = found["rows"]
        sent, full, count, sizes = found["bytes", bits, width]
        assert sizes == [out * BYTES[bits, width], into * BYTES[bits, width]]
        assert (sent, full, count) == (sum(sizes), 4 * width * (out + into), 2)


def test_two_bits_are_a_fourteenth_and_eight_a_quarter(several: Found) -> None:
    for width in (128, 256):
        (two, full, *_), (eight, *_) = (several[0]["bytes", bits, width] for bits in (2, 8))
        assert full / two > 14
        assert full / eight > 3.85


def test_own_rows_are_summed_while_messages_travel(several: Found) -> None:
    for found in several:
        assert [event for event in found["events"] if event in ("post", "wait") or event.startswith("spmm")] == [
            *("post", "spmm.forward", "wait", "spmm.forward"),
            *("spmm.backward", "post", "spmm.backward", "wait", "spmm.forward"),
        ]


def test_a_trace_shows_messages(several: Found) -> None:
    for found in several:
        out, into = found["rows"]
        for stage, rows in (("forward", out), ("backward", into)):
            row = found["trace"][f"halo.{stage}"]
            assert (row["calls"], row["format"], row["backend"]) == (1, "int8", "gloo")
            assert row["bytes"] == rows * (partitioned.F + 4)


def test_int8_rows_are_sent_as_they_are(several: Found) -> None:
    for found in several:
        for name in ("codes", "decoded"):
            rows, expected = found[name]
            assert torch.equal(rows, expected)


@pytest.mark.parametrize(("name", "config"), [("formats", "msfp12"), ("int8", "int8"), ("moved", None)])
def test_rounding_to_nearest_is_that_of_one_process(several: Found, name: str, config: str | None) -> None:
    """Rows have scales of their own, so that it does not matter where they are rounded."""
    edge_index, num_nodes = GRAPHS["random"]
    config = None if config is None else qgnn.QConfig(fmt=config, rounding="nearest")
    expected = qgnn.functional.spmm(edge_index, values(num_nodes).float(), config=config)
    for found in several:
        torch.testing.assert_close(found[name], expected[found["nodes"]], rtol=1e-5, atol=1e-5)


def test_rows_may_have_no_columns(several: Found) -> None:
    for found in several:
        assert found["no columns"].shape == (len(found["nodes"]), 0)


def test_several_sets_of_rows_are_summed(several: Found) -> None:
    A = dense("random") + torch.eye(50, dtype=torch.float64)
    for found in several:
        one, two = found["sets"].double()
        torch.testing.assert_close(one, (A @ values(50))[found["nodes"]], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(two, 2 * one, rtol=1e-5, atol=1e-5)


def test_a_second_backward_pass_has_the_same_gradient(several: Found) -> None:
    for found in several:
        assert torch.equal(*found["again"])


def test_means_do_not_overflow(several: Found) -> None:
    """The hub has 278 edges from rows of 300; their sum is none of fp16."""
    degree = torch.bincount(GRAPHS["hub"][0][1], minlength=140)
    for found in several:
        rows, nodes = found["half"]
        assert rows.dtype == torch.float16
        expected = torch.where(degree[nodes] > 0, 300.0, 0.0)
        torch.testing.assert_close(rows.squeeze(1).float(), expected, rtol=2e-3, atol=0)  # two roundings to fp16


def test_degrees_and_cached_features_are_exchanged_once(several: Found) -> None:
    """By a GCN layer the degrees and each call's rows; by a cached layer of two hops the degrees and two hops."""
    for found in several:
        assert found["exchanges"] == [2, 3, 3, 3]


def test_constants_are_sent_as_they_are_the_second_time_and_no_more(several: Found) -> None:
    """Features of fp32, then their int8 codes, over a graph of one bit; changed ones are others."""
    num_nodes = GRAPHS["random"][1]
    rows = [torch.empty(num_nodes, partitioned.F) for _ in range(2)]
    for found in several:
        for whole, (_, own) in zip(rows, found["constant"], strict=True):
            whole[found["nodes"]] = own
    for found in several:
        halo, (out, _) = found["same rows"][1], found["rows"]
        for whole, (received, _) in zip(rows, found["constant"], strict=True):
            assert torch.equal(received, whole[halo])
        first, second = found["changed"]
        assert torch.equal(second, rows[0][halo] + 1)
        assert not torch.equal(first, second)
        first, second = found["changed by one"]
        factor = 1 + (parts_of("random")[halo] == 1).float()
        assert torch.equal(second, (rows[0][halo] + 1) * factor[:, None])
        assert not torch.equal(first, second)
        assert torch.equal(found["evaluated"], second)
        one_bit, features, codes = 2 + 4, 4 * partitioned.F, partitioned.F + 4
        sums = torch.tensor([one_bit, features, 0, one_bit, codes, 0]).cumsum(0)
        assert found["sent once"] == (out * sums).tolist()


def test_a_loaded_part_is_that_of_the_whole_graph(several: Found) -> None:
    for found in several:
        assert all(torch.equal(one, two) for one, two in zip(found["loaded"], found["whole"], strict=True))


ERRORS = {
    **dict.fromkeys(("edges", "parts", "weights"), r"ValueError: .*\(got other edges, weights or parts in process"),
    **dict.fromkeys(("bits", "block_size"), r"ValueError: .*\(got other 'bits' or 'block_size' in process 2"),
    "missing": r"FileNotFoundError: 'PartitionedGraph.load' expects .*part-\d-of-3.pt.* has none\); write it with",
    "bad bits": r"ValueError: 'PartitionedGraph' expects 'bits' to be one of .* \(got 3\)",
    "bad block_size": r"ValueError: 'PartitionedGraph' expects 'block_size' to be a multiple of 8 .* \(got 12\)",
    "learned": r"ValueError: 'edge_weight' expects constants .*detach",
    "adjacency": "NotImplementedError: 'from_adjacency' makes a graph of one process; use PartitionedGraph.from_edge",
    "attention": r"NotImplementedError: 'PartitionedGraph' serves sums and means over neighbors, .*QGCNConv.*'csr'",
    "maximum": r"ValueError: 'spmm' expects 'reduce' to be one of \('sum', 'mean'\) on PartitionedGraph",
    "edge_weight": r"ValueError: .* expects the weights of PartitionedGraph.* within it",
    "edge_weight of sum": r"ValueError: 'spmm' expects the weights of PartitionedGraph.* within it",
    "dropped edges": r"NotImplementedError: .* QAPPNP without dropout of edges",
    "flow": r"ValueError: .* flow='source_to_target' .*got no 'edge_weight' and flow='target_to_source'",
    "rows": r"ValueError: 'graph' has \d+ source and \d+ target nodes \(expected 50",
}


@pytest.mark.parametrize("name", ERRORS)
def test_bad_input(several: Found, name: str) -> None:
    for found in several:
        assert re.match(ERRORS[name], found["errors"][name]), found["errors"][name]


def test_a_number_of_bits_that_is_none_stops_all(several: Found) -> None:
    for rank, found in enumerate(several):
        expected = r"ValueError: .*'bits' to be one of .*got '8'" if rank == 2 else r"RuntimeError: .* none in \[2\]"
        assert re.match(expected, found["errors"]["bits as text"]), found["errors"]["bits as text"]


def test_a_process_without_its_part_stops_all(several: Found) -> None:
    for rank, found in enumerate(several):
        expected = (
            "ValueError: 'parts' expects numbers from 0 to 2" if rank == 1 else "RuntimeError: .* none in \\[1\\]"
        )
        assert re.match(expected, found["errors"]["failed"]), found["errors"]["failed"]


def one_process(name: str) -> tuple[Tensor, Tensor]:
    edge_index, num_nodes = GRAPHS["power_law"]
    config = qgnn.QConfig() if name.endswith("gradients") else None
    return partitioned.curve(edge_index, torch.arange(num_nodes), config, lambda net: net)


@pytest.mark.parametrize("name", ["fp32", "int8", "int8 layers and gradients"])
def test_models_train_as_in_one_process(trained: Found, name: str) -> None:
    losses, weights = one_process("fp32")
    for found in trained:
        assert torch.equal(found[name][0], trained[0][name][0])
        assert torch.equal(found[name][1], trained[0][name][1])
        if name == "fp32":
            torch.testing.assert_close(found[name][0], losses, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(found[name][1], weights, rtol=1e-3, atol=1e-4)  # Adam's root of small sums
        else:
            assert (found[name][0] - losses).abs().max() < 0.02 * losses[0]
            assert losses[-1] < 0.75 * losses[0]


def test_the_mean_loss_has_the_value_and_gradient_of_one_process(trained: Found) -> None:
    """All nodes are in one of two processes, whose gradients are averaged over both."""
    loss, gradient = trained[0]["mean_loss"]
    assert loss == trained[1]["mean_loss"][0] == 1
    torch.testing.assert_close(gradient, torch.full_like(gradient, 2 / len(gradient)))
    assert trained[1]["mean_loss"][1].shape == (0,)
    assert trained[0]["uneven"] == trained[1]["uneven"]
    assert trained[0]["half"] == 0.25


def test_the_example_of_readme_runs(trained: Found) -> None:
    pattern = r"loss \d\.\d{3}, test accuracy 0\.\d{3}\nsent 0\.\d MiB, \d\.\d in fp32\n"
    assert re.fullmatch(pattern, trained[0]["example"]), trained[0]["example"]
    assert trained[1]["example"] == ""


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_one_process_has_the_whole_graph() -> None:
    edge_index, num_nodes = GRAPHS["power_law"]
    graph = PartitionedGraph.from_edge_index(edge_index, torch.zeros(num_nodes, dtype=torch.long))
    assert repr(graph) == f"PartitionedGraph({num_nodes} nodes, 0 in the halo, {edge_index.shape[1]} edges)"
    x = values(num_nodes)
    close(qgnn.functional.spmm(graph, x), qgnn.functional.spmm(edge_index, x))
    assert (graph.sent_bytes, graph.num_exchanges) == (0, 1)


@pytest.mark.usefixtures("alone")
def test_both_directions_round_independently() -> None:
    graph = PartitionedGraph.from_edge_index(GRAPHS["random"][0], torch.zeros(50, dtype=torch.long))
    message = _Message(graph._exchange, RowFormat(2, 256), 256, torch.float32, make_seed(1))
    x = torch.linspace(-1, 1, 256).repeat(20, 1)
    forward, backward = (RowFormat(2, 256).decode(message.encoded(x, way), 256, torch.float32) for way in (0, 1))
    assert 0.3 < (forward == backward).float().mean() < 0.9, "by chance two thirds"
    assert torch.equal(message.encoded(x, 1), message.encoded(x, 1))


@pytest.mark.usefixtures("alone")
def test_the_mean_loss_of_one_process_is_the_mean() -> None:
    x = torch.randn(7, requires_grad=True)
    loss = mean_loss(x.square())
    loss.backward()
    torch.testing.assert_close(loss, x.square().mean())
    torch.testing.assert_close(x.grad, 2 * x.detach() / 7)


def test_a_process_group_is_needed() -> None:
    with pytest.raises(RuntimeError, match=r"expects a process group .*init_process_group"):
        PartitionedGraph.from_edge_index(torch.zeros(2, 0, dtype=torch.long), torch.zeros(1, dtype=torch.long))
