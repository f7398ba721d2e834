"""What suites compare is the same work: references in pieces, layers and models from equal weights, gates that see."""

import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import SAGEConv

import qgnn
from house import ROOT

sys.path.append(str(ROOT))  # bench is not installed; last, so that an installed qgnn is found first
activation = importlib.import_module("bench.suites.activation")
accuracy = importlib.import_module("bench.suites.accuracy")
pyg_models = importlib.import_module("bench.suites.pyg_models")
distribution = importlib.import_module("bench.suites.distribution")
harness = importlib.import_module("bench.harness")
inputs = importlib.import_module("bench.suites.inputs")
layer = importlib.import_module("bench.suites.layer")
live = importlib.import_module("bench.live")
main = importlib.import_module("bench.__main__")
optimizer = importlib.import_module("bench.suites.optimizer")
pieces = importlib.import_module("bench.suites.pieces")
provenance = importlib.import_module("qgnn.cli.provenance")
records = importlib.import_module("bench.records")
step = importlib.import_module("bench.suites.step")
update = importlib.import_module("bench.suites.update")

QUICK = inputs.Setting(torch.device("cpu"), quick=True)


def test_pieces_hold_every_edge_once_with_all_edges_of_a_target(monkeypatch: pytest.MonkeyPatch) -> None:
    edge_index = torch.tensor([[0, 1, 2, 3, 4, 0, 2], [1, 1, 4, 0, 1, 4, 3]])
    monkeypatch.setattr(pieces, "PIECE_VALUES", 4 * 2)
    found = list(pieces.pieces(edge_index, 5, width=4))
    assert len(found) == 4
    assert [node for targets, _ in found for node in range(5)[targets]] == list(range(5))
    for targets, edges in found:
        assert set(edges[1].tolist()) <= set(range(5)[targets])
    together = torch.cat([edges for _, edges in found], dim=1)
    assert sorted(together.t().tolist()) == sorted(edge_index.t().tolist())


@pytest.mark.parametrize("kind", layer.ATTENTION)
def test_a_reference_in_pieces_is_that_of_all_edges(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = layer.Problem(kind, "cora", QUICK)
    problem.edge_index = torch.randint(problem.num_nodes, (2, 60))
    conv = problem.loaded(problem.on_matrix()()).double()
    x = problem.x.double().requires_grad_()
    out = conv(x, problem.edges())
    out.backward(problem.grad.double())
    whole = [out.detach(), *step.gradients_of(conv, x, layer.WITHOUT)]
    monkeypatch.setattr(pieces, "PIECE_VALUES", 20 * problem.channels)
    for a, b in zip(problem.exact(), whole, strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-12 * float(b.norm()))


@pytest.mark.parametrize("kind", layer.LAYERS)
def test_a_layer_starts_from_what_its_peers_start_from(kind: str) -> None:
    """The gate would not tell a wrong weight from rounding where it is small."""
    problem = layer.Problem(kind, "cora", QUICK)
    ours = getattr(qgnn.nn, f"Q{layer.LAYERS[kind].__name__}")
    for make in (ours, layer.PREPARED.get(kind, layer.LAYERS[kind])):
        options = {"config": inputs.INT8} if make is ours else {}
        state = problem.loaded(problem.layer(make, **options)).state_dict()
        assert state.keys() == problem.state.keys()
        assert all(torch.equal(state[name], value) for name, value in problem.state.items())


def test_a_mean_that_bf16_cannot_count_is_not_measured() -> None:
    problem = layer.Problem("sage", "cora", QUICK)
    problem.edge_index = torch.zeros(2, layer.BF16_COUNTS + 1, dtype=torch.int64)
    with pytest.raises(harness.UnavailableError, match="PyG counts the rows of a mean in bf16"):
        problem.bf16(problem.coo)
    ones = torch.ones(layer.BF16_COUNTS + 1, dtype=torch.bfloat16)
    counted = torch.zeros(1, dtype=torch.bfloat16).scatter_add_(0, torch.zeros_like(ones, dtype=torch.int64), ones)
    assert int(counted) == layer.BF16_COUNTS


@pytest.mark.parametrize("kind", pyg_models.MODELS)
def test_a_converted_model_starts_where_the_other_does(kind: str) -> None:
    """Equal weights, and a gate that sees others, and a gradient that is off."""
    problem = pyg_models.Problem("cora", kind, 3, QUICK)
    plain, converted = problem.model(), qgnn.quantize_(problem.model(), inputs.INT8)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), converted.parameters(), strict=True))
    exact, others = problem.exact(), pyg_models.Problem("cora", kind, 4, QUICK).exact()
    for precision, model in {"fp32": plain, "int8": converted}.items():
        out, grad = problem.untrained(model, problem.edges(precision))
        assert harness.relative_error([out, grad], exact) <= step.TOLERANCE[precision]
        assert harness.relative_error([out], others[:1]) > 0.2
        assert harness.relative_error([out, 0.8 * grad], exact) > step.TOLERANCE["int8"]


def test_the_gate_of_accuracy_sees_widths_and_the_last_layer() -> None:
    problem = accuracy.Problem("cora", "gcn", 3, {**accuracy.rules(), **accuracy.precisions()}, QUICK)
    exact = problem.exact()
    error = {name: harness.relative_error(problem.untrained(scheme), exact) for name, scheme in problem.schemes.items()}
    for name, scheme in problem.schemes.items():
        assert error[name] <= problem.tolerance(name, scheme)
    for rounding, scale in (("stochastic", "row"), ("nearest", "tensor")):  # to nearest before training
        some, every = (error[f"qgnn {rounding} {scale} {last} int4"] for last in ("fp32-last", "all"))
        assert error["pyg fp32"] < 1e-6 < error[f"qgnn {rounding} {scale} fp32-last int8"] < some / 5 < every / 5
    assert error["qgnn int4"] == error["qgnn stochastic row fp32-last int4"]
    others = accuracy.Problem("cora", "gcn", 4, {}, QUICK).exact()
    assert harness.relative_error(problem.untrained(accuracy.tasks.FP32), others) > 0.2


def test_schemes_of_accuracy_train_from_equal_weights_to_other_scores() -> None:
    problem = accuracy.Problem("cora", "sage", 0, accuracy.precisions(), QUICK)
    found = {name: problem.train(scheme) for name, scheme in problem.schemes.items() if not scheme.bf16}
    losses = [run.metrics["final_loss"] for run in found.values()]
    assert len(set(losses)) == len(losses) == 5  # each of its own noise
    assert max(losses) - min(losses) < 0.05
    assert all(0 < run.test_acc < 1 and run.metrics["best_epoch"] in (2, 3) for run in found.values())


@pytest.mark.parametrize("model", accuracy.SUM_ROWS)
def test_models_that_sum_rows_train_alike_on_a_matrix(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyG's in fp32; parallel edges, which a matrix would weigh otherwise in a mean, stay edges."""
    problem = accuracy.Problem("cora", model, 0, {}, QUICK)
    fp32 = accuracy.tasks.FP32
    task, recipe = accuracy.tasks.load("cora", model, QUICK)
    by_edges = task.with_own_edges()
    by_edges.data.edge_index = torch.unique(by_edges.data.edge_index, dim=1)
    monkeypatch.setattr(accuracy.tasks, "load", lambda *_: (by_edges, recipe))
    assert problem.load(fp32)[0].data.edge_index.layout == torch.sparse_csr
    assert problem.load(accuracy.precisions()["qgnn int8"])[0] is by_edges
    on_matrix = problem.train(fp32)
    result = problem.exact()[0]
    monkeypatch.setattr(accuracy.tasks, "by_matrix", lambda task, _: task)
    on_edges = problem.train(fp32)
    assert torch.allclose(problem.exact()[0], result, rtol=1e-12, atol=1e-12)
    assert on_matrix.metrics["final_loss"] == pytest.approx(on_edges.metrics["final_loss"], rel=1e-5)
    monkeypatch.undo()
    doubled = by_edges.with_own_edges()
    doubled.data.edge_index = by_edges.data.edge_index.repeat(1, 2)
    assert accuracy.tasks.by_matrix(doubled, torch.float32) is doubled


@pytest.mark.parametrize("aggr", ["mean", "sum"])
def test_gradients_by_the_matrix_of_a_large_graph_are_those_of_edges(aggr: str) -> None:
    """Of more than 46,340 nodes, whose places as a square are beyond int32."""
    edge_index = torch.unique(torch.randint(50_000, (2, 60_000)), dim=1)
    task = SimpleNamespace(data=Data(torch.randn(50_000, 4), edge_index))
    conv, found = SAGEConv(4, 3, aggr=aggr), []
    for edges in (edge_index, accuracy.tasks.by_matrix(task, torch.float32).data.edge_index):
        x = task.data.x.clone().requires_grad_()
        upstream = torch.linspace(-1, 1, 150_000).view(-1, 3)
        found.append(torch.autograd.grad(conv(x, edges), [x, *conv.parameters()], upstream))
    assert edges.layout == torch.sparse_csr
    assert harness.relative_error(found[1], [t.double() for t in found[0]]) < 1e-5


def test_the_accuracy_is_that_of_the_best_validation_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = pyg_models.Problem("cora", "gcn", 0, QUICK)
    monkeypatch.setattr(pyg_models, "QUICK_EPOCHS", 3 * pyg_models.EVAL_EVERY)
    found = iter([(0.2, 0.5), (0.4, 0.3), (0.4, 0.9)])
    monkeypatch.setattr(pyg_models, "evaluate", lambda *_: next(found))
    test_acc, times_ms = problem.train(problem.model(), problem.edges("fp32"))
    assert test_acc == 0.3
    assert len(times_ms) == pyg_models.QUICK_EPOCHS


@pytest.mark.parametrize("kind", distribution.LINEAR)
def test_activations_are_what_layers_keep_in_training(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind ReLU and dropout most are zero; batch norm sees them centered; pieces are whole rows, evenly apart."""
    monkeypatch.setattr(distribution, "NUM_STEPS", 2)
    problem = distribution.Problem("wordnet", kind, QUICK)
    found = problem.activations()
    assert set(found) == {*distribution.LINEAR[kind], *distribution.NORMS}
    for name, x in found.items():
        assert x.shape == (problem.data.num_nodes, 128)
        assert not x.requires_grad
        behind_dropout = name in ("convs.1.lin", "convs.1.lin_r")
        assert (float((x == 0).float().mean()) > 0.6) == behind_dropout
    monkeypatch.setattr(distribution, "PIECE_ROWS", 50)
    for name, x in problem.activations().items():
        apart = (problem.data.num_nodes - 50) // 3
        assert torch.equal(x, torch.cat([found[name][start : start + 50] for start in range(0, 4 * apart, apart)]))


def test_metrics_tell_normal_values_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Optimal bins gain on normal values what is predicted, and lose on those of a ReLU, which are no such values; a
    projection makes normal ones of them."""
    x = torch.randn(2048, 128, generator=torch.Generator().manual_seed(0))
    problem = distribution.Problem("wordnet", "sage", QUICK)
    found = {}
    for name, ratio, values in (("normal", 1, x), ("relu", 1, x.relu()), ("projected", 8, x.relu())):
        monkeypatch.setattr(distribution, "activations", lambda *_, values=values: {"x.module": values})
        blocks = distribution.Blocks(problem, "x.module", ratio, 1024)
        assert blocks.name.endswith(f"/sage/x/{'projected8' if ratio > 1 else 'plain'}/G1024")
        measured = blocks.measure()
        assert harness.relative_error([torch.stack(list(measured.results))], [torch.stack(blocks.exact())]) < 0.02
        found[name] = measured.metrics
    assert found["normal"]["ks"] < 0.02 < 0.3 < found["relu"]["ks"]
    assert found["projected"]["ks"] < 0.05
    for name in ("normal", "projected"):
        assert found[name]["gain"] == pytest.approx(found[name]["predicted_gain"], abs=0.05)
        assert found[name]["optimal_ratio"] == pytest.approx(1, abs=0.05)
    assert found["relu"]["gain"] < 0 < found["relu"]["optimal_ratio"] - found["relu"]["uniform_ratio"]
    assert found["relu"]["q50_off"] < -0.4


def test_updates_of_an_optimizer_are_held_to_those_of_adamw() -> None:
    problem = optimizer.Updates("small", [(30, 20), (20,)], QUICK)
    exact = problem.updates(torch.optim.AdamW, torch.float64)
    assert harness.relative_error(problem.updates(torch.optim.AdamW), exact) <= optimizer.TOLERANCE["fp32"]
    for wrong in (torch.optim.SGD, partial(torch.optim.AdamW, betas=(0.8, 0.999)), partial(torch.optim.AdamW, eps=0.1)):
        assert harness.relative_error(problem.updates(wrong), exact) > optimizer.TOLERANCE["int8"]


def test_the_bytes_of_a_state_are_those_of_distinct_storages() -> None:
    work = optimizer.Updates("small", [(30, 20), (20,)], QUICK).work(lambda: torch.optim.AdamW)
    work.run()
    assert live.storage_mib(work.kept()) == (2 * 620 + 2) * 4 / 2**20  # two moments, and the number of steps
    t = torch.ones(6)
    assert live.storage_mib([t, t[1:], t.view(2, 3)]) == 24 / 2**20


def test_sums_of_gradients_are_those_of_the_loss_of_all_nodes() -> None:
    """The mean over parts of equal size, and the bytes of a quarter and of an eighth."""
    problem = optimizer.Sums("cora", "gcn", 0, QUICK)
    exact = problem.sums(torch.float64)
    work = problem.coded(optimizer.Blocks(8, 64))
    assert harness.relative_error(work.check(), exact) < 0.05
    values = sum(t.numel() for t in exact)
    assert live.storage_mib(work.kept()) < 0.3 * 4 * values / 2**20
    assert harness.relative_error([2 * t for t in exact], exact) > 0.75


@pytest.mark.parametrize("kind", update.KINDS)
def test_changed_graphs_are_those_of_a_sort(kind: str) -> None:
    """... of the edges that a change leaves, and of no other change's."""
    change = update.Change("arxiv", kind, QUICK)
    edge_index, exact = change.changed(change.edge_index), change.exact()
    num_edges, num_nodes = (change.edge_index.shape[1], change.num_before)
    sign = 1 if kind.startswith("add") else -1
    if kind != "remove-nodes":
        assert edge_index.shape[1] == num_edges + sign * round(num_edges / 100)
    assert change.num_nodes == num_nodes + (sign * round(num_nodes / 100) if kind.endswith("nodes") else 0)
    for setup in (change.update, change.rebuild, partial(change.pyg, torch.int64)):
        assert harness.relative_error(setup().run(), exact) == 0
    other = update.Change("arxiv", next(k for k in update.KINDS if k != kind), QUICK)
    assert harness.relative_error(other.update().run(), exact) > 0


def test_data_that_is_not_there_leaves_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def load(name: str, root: Path) -> Tensor:
        raise qgnn.data.DatasetError(f"nothing in {root}")

    monkeypatch.setattr(qgnn.data, "load", load)
    arguments = ["--device", "cpu", "--root", str(tmp_path / "data"), "--results", str(tmp_path / "results")]
    assert main.main(["accuracy", *arguments, "--case", "photo/gin/int8/seed4"]) == 0
    assert not list((tmp_path / "results").glob("*/*"))
    said = capsys.readouterr()
    assert f"not available: nothing in {tmp_path / 'data'}; --root names the folder" in said.err
    assert "no records" in said.out


@pytest.mark.parametrize("suite", ["blocksize", "distribution"])
def test_each_data_set_that_is_there_is_measured_and_each_other_named(
    suite: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Without --root, too: the folder that is searched then has them or not."""
    module = importlib.import_module(f"bench.suites.{suite}")

    def load(name: str, with_normal_rows: bool, setting: object) -> None:
        if name in ("cora", "dblp"):
            raise harness.UnavailableError(f"no {name}; --root names the folder of the data sets")

    monkeypatch.setattr(pyg_models, "load", load)
    found = {case.name.split("/")[0] for case in module.cases(inputs.Setting(torch.device("cpu")))}
    assert found == {"wordnet", "pubmed", "photo"}
    said = capsys.readouterr().err
    assert f"{suite}: cora: not available: no cora; --root names the folder of the data sets\n{suite}: dblp: " in said


@pytest.mark.parametrize(
    ("prefixes", "loaded"),
    [
        (("photo/gcn", "cora"), ["cora", "photo", "cora-ml"]),
        (("cora/gcn/seed1",), ["cora"]),
        (("nothing",), []),
        (("",), ["cora", "photo", "cora-ml"]),
    ],
)
def test_only_data_sets_of_wanted_cases_are_loaded(prefixes: tuple[str, ...], loaded: list[str]) -> None:
    setting = inputs.Setting(torch.device("cpu"), prefixes=prefixes)
    found: list[str] = []
    datasets = ("cora", "photo", "cora-ml")
    assert list(inputs.available("accuracy", datasets, setting, found.append)) == found == loaded


def test_dropout_that_is_timed_is_held_to_what_it_should_be() -> None:
    x = torch.randn(200, 64, requires_grad=True)
    mask = torch.rand_like(x) >= 0.5
    check = lambda out: activation.check_dropout(lambda: out, lambda: x.relu(), x)  # noqa: E731
    check(2 * mask * x.relu())
    with pytest.raises(ValueError, match=r"dropout keeps 1\.0000"):
        check(x.relu())
    with pytest.raises(AssertionError, match="not close"):
        check(mask * x.relu())
    with pytest.raises(ValueError, match="the gradient does not vanish"):
        check(2 * mask * x.relu() + 0 * x + (x - x.detach()))


def test_a_run_goes_on_where_one_of_the_same_commit_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (provenance.Stamp("Some CPU", name * 40, False, {"torch": "2.0"}) for name in "ab")
    found: list[str] = []
    made = {"device", "commit", "dirty", "versions", "utc", "provider", "ok"}
    ok = {"qgnn fp32": True, "torch fp32": True}

    def measure_all(suite: str, cases: Iterator, stamp: object, **_: object) -> Iterator[list[dict]]:
        for case in cases:
            found.append(case.name.rpartition("/")[2])
            values = dict.fromkeys(set(records.FIELDS) - made)
            values |= {"suite": suite, "case": case.name, "pass": case.pass_}
            values |= dict.fromkeys(("median_ms", "p20_ms", "p80_ms"), 1.0)
            yield [records.make_record(stamp, provenance.now(), **values, provider=p, ok=ok[p]) for p in ok]

    def measured(stamp: object, *more: str) -> list[str]:
        monkeypatch.setattr(provenance, "make_stamp", lambda device: stamp)
        found.clear()
        assert main.main(["softmax", "--device", "cpu", "--quick", "--results", str(tmp_path), *more]) == int(
            not all(ok.values())
        )
        return found.copy()

    monkeypatch.setattr(harness, "measure_all", measure_all)
    whole = ["attention_weights"] * 2 + ["edge_softmax"] * 2
    assert measured(first, "--case", "arxiv/synthetic/x0.005/H4/edge") == whole[2:]
    assert measured(first, "--case", "arxiv/synthetic/x0.005/H4/edge", "arxiv/") == whole
    next(tmp_path.glob("*/softmax.jsonl")).unlink()
    assert measured(first, "--case", "cora/", "arxiv/synthetic/x0.005/H4/edge") == whole[2:]
    assert measured(first, "--resume") == whole[:2]
    assert measured(first, "--resume") == []
    assert measured(first) == whole
    assert measured(second, "--resume") == whole
    assert measured(replace(second, dirty=True), "--resume") == whole
    assert measured(replace(second, dirty=None), "--resume") == whole
    assert measured(replace(second, versions={"torch": "2.1"}), "--resume") == whole
    ok["qgnn fp32"] = False
    assert measured(second, "--case", "arxiv/synthetic/x0.005/H4/edge") == whole[2:]
    ok["qgnn fp32"] = True
    assert measured(second, "--resume") == whole[2:]
    assert measured(second, "--resume") == []
