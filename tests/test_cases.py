"""Inputs that broke other libraries of this field, with the answer that is right. Origins are repository#number.

==== ============================== ===============================================================================
  6  EdgeIndex, seen in PyG 2.8     test_edge_index_object_in_any_float_type
  8  pyg#1129                       test_a_graph_without_edges_gives_zeros
  9  dgl#1245, pyg#6915             test_a_graph_without_edges_has_zero_gradients;
                                    test_cases_runtime.py: test_no_kernel_gets_an_empty_grid
 10  pyg#579                        test_an_empty_float_edge_index_is_named
 11  dgl#2719                       test_an_isolated_node_aggregates_exactly_zero
 12  pyg#10815                      test_trailing_nodes_are_kept
 13  degree 0, seen in PyG 2.8      test_a_weighted_degree_of_zero_has_a_finite_gradient;
                                    nn/test_cheb_conv.py: test_cheb_conv_has_a_finite_gradient_at_degree_zero
 14  pyg#1833                       test_missing_weights_are_ones
 15  pyg#3338                       test_a_column_of_edge_weights
 18  pyg#795                        test_negative_weights_poison_only_the_rows_they_reach
 21  pyg#3762                       test_a_cached_layer_notices_another_graph; nn/test_sg_conv.py:
                                    test_sg_conv_remembers_the_aggregated_rows_of_this_graph_and_these_rows
 22  cached=True, seen in PyG 2.8   test_a_cached_layer_with_learnable_weights_goes_backward_twice;
                                    nn/test_sg_conv.py:
                                    test_sg_conv_gives_what_is_learned_its_gradient_in_every_step
 24  scatter#456, triton#6748,      test_cases_runtime.py: test_offsets_beyond_32_bits
     Liger#803
 26  ao#4713                        test_zero_rows_stay_zero
 27  bnb#1744                       test_zero_blocks_stay_zero
 28  bnb#1690                       test_strided_views_equal_their_copies
 29  flashinfer#2440                test_tiny_values_stay_finite
 30  ao#1662                        test_scales_of_half_types_are_fp32
 31  ao#2376                        test_few_rows
 33  oneDNN#2903                    test_stochastic_rounding_keeps_what_is_far_below_a_step
 36  Liger#272, triton#4004         test_cases_runtime.py: test_nothing_is_changed_in_place
 38  pytorch#155240                 test_cases_runtime.py: test_every_operator_has_a_fake
 40  triton#2441                    test_cases_runtime.py: test_kernels_run_under_the_device_guard_of_their_tensors
 42  pyg#941                        nn/test_gcn_conv_module.py: test_gcn_conv_survives_copy_and_pickle_after_a_pass
 44  pyg#2801                       nn/test_gcn_conv_int8.py: test_two_runs_with_one_seed_are_bit_equal
==== ============================== ===============================================================================
"""

from collections.abc import Iterator

import pytest
import torch
from torch_geometric import EdgeIndex
from torch_geometric.nn import GCNConv

from graphs import GRAPHS
from layer_cases import assert_equal_pass, assert_same_pass, passes
from qgnn import QConfig, functional
from qgnn.nn import QGCNConv, QLinear

NEAREST = QConfig(rounding="nearest")
BOTH = pytest.mark.parametrize("config", [None, NEAREST], ids=["fp32", "int8"])
K, M = 12, 5


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Tensors here are tiny: a second thread only waits for the first."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# --- graphs ---


@BOTH
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_edge_index_object_in_any_float_type(dtype: torch.dtype, config: QConfig | None) -> None:
    edge_index, num_nodes = GRAPHS["power_law"]
    typed = EdgeIndex(edge_index, sparse_size=(num_nodes, num_nodes)).sort_by("col")[0]
    conv = QGCNConv(K, M, config=config).to(dtype)
    x = torch.randn(num_nodes, K, dtype=dtype)
    actual, expected = passes(conv, x, typed), passes(conv, x, typed.as_tensor())
    assert_equal_pass(actual, expected)
    assert actual["out"].dtype == dtype


@BOTH
def test_a_graph_without_edges_gives_zeros(config: QConfig | None) -> None:
    x, empty = torch.randn(1, 64), torch.empty(2, 0, dtype=torch.int64)
    assert torch.equal(functional.spmm(empty, x, config=config), torch.zeros(1, 64))
    assert torch.equal(functional.graph_linear(empty, x, torch.randn(M, 64), config=config), torch.zeros(1, M))
    conv = QGCNConv(64, M, add_self_loops=False, config=config)
    torch.nn.init.normal_(conv.bias)
    assert torch.equal(conv(x, empty), conv.bias.detach()[None])


@BOTH
@pytest.mark.parametrize("name", ["empty", "one_node", "no_nodes"])
def test_a_graph_without_edges_has_zero_gradients(name: str, config: QConfig | None) -> None:
    edge_index, num_nodes = GRAPHS[name]
    conv = QGCNConv(K, M, add_self_loops=False, config=config)
    weight = torch.empty(0, requires_grad=True)
    result = passes(conv, torch.randn(num_nodes, K), edge_index, weight, extra=(weight,))
    assert result["dextra0"].shape == (0,)
    assert torch.equal(result["dx"], torch.zeros(num_nodes, K))
    assert torch.equal(result["dlin.weight"], torch.zeros(M, K))


@BOTH
def test_an_empty_float_edge_index_is_named(config: QConfig | None) -> None:
    edge_index = torch.tensor([[], []])
    with pytest.raises(ValueError, match=r"'edge_index' expects torch.int64 node indices \(got torch.float32\).*long"):
        QGCNConv(K, M, config=config)(torch.randn(3, K), edge_index)
    with pytest.raises(ValueError, match=r"\(got torch.float32\)"):
        functional.spmm(edge_index, torch.randn(3, K), config=config)


@BOTH
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_an_isolated_node_aggregates_exactly_zero(config: QConfig | None, reduce: str) -> None:
    edge_index, num_nodes = GRAPHS["isolated"]
    alone = torch.ones(num_nodes, dtype=torch.bool)
    alone[edge_index[1]] = False
    x, theta, bias = torch.randn(num_nodes, K) + 3, torch.randn(M, K), torch.randn(M)
    assert functional.spmm(edge_index, x, reduce=reduce, config=config)[alone].count_nonzero() == 0
    out = functional.graph_linear(edge_index, x, theta, bias, reduce=reduce, config=config)
    assert torch.equal(out[alone], bias.expand(int(alone.sum()), M))  # once, and not through the aggregation


@BOTH
def test_trailing_nodes_are_kept(config: QConfig | None) -> None:
    edge_index = torch.tensor([[0, 1], [1, 0]])
    x = torch.randn(6, K)
    conv = QGCNConv(K, M, config=config)
    out = conv(x, edge_index)
    assert out.shape == (6, M)
    expected = x[2:] @ conv.lin.weight.t() + conv.bias  # a self-loop of weight 1 and degree 1
    torch.testing.assert_close(out[2:], expected, rtol=0, atol=1e-5 if config is None else 0.05)
    assert functional.spmm(edge_index, x, config=config).shape == (6, K)


# --- weights and caches ---


@BOTH
def test_a_weighted_degree_of_zero_has_a_finite_gradient(config: QConfig | None) -> None:
    edge_index = torch.tensor([[0, 1, 2, 1], [1, 2, 0, 0]])
    weight = torch.tensor([1.0, 0.0, 1.0, 1.0], requires_grad=True)
    conv = QGCNConv(K, M, add_self_loops=False, config=config)
    result = passes(conv, torch.randn(3, K), edge_index, weight, extra=(weight,))
    assert all(value.isfinite().all() for value in result.values())
    assert torch.equal(result["out"][2], conv.bias.detach())
    assert result["dextra0"].count_nonzero() > 0


@BOTH
def test_missing_weights_are_ones(config: QConfig | None) -> None:
    edge_index, num_nodes = GRAPHS["random"]
    conv = QGCNConv(K, M, normalize=False, config=config)
    x = torch.randn(num_nodes, K)
    assert_same_pass(passes(conv, x, edge_index), passes(conv, x, edge_index, torch.ones(edge_index.shape[1])))


@BOTH
@pytest.mark.parametrize("learnable", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
def test_a_column_of_edge_weights(config: QConfig | None, learnable: bool, normalize: bool) -> None:
    edge_index, num_nodes = GRAPHS["random"]
    weight = torch.rand(edge_index.shape[1], 1, requires_grad=learnable)
    conv = QGCNConv(K, M, normalize=normalize, config=config)
    extra = (weight,) if learnable else ()
    x = torch.randn(num_nodes, K)
    actual = passes(conv, x, edge_index, weight, extra=extra)
    expected = passes(conv, x, edge_index, weight.squeeze(1), extra=extra)
    assert_equal_pass(actual, expected)


@BOTH
def test_negative_weights_poison_only_the_rows_they_reach(config: QConfig | None) -> None:
    edge_index = torch.tensor([[0, 1, 2, 3, 0, 4, 5], [1, 0, 3, 2, 2, 5, 4]])
    weight = torch.tensor([-3.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0])  # node 1: degree 1 - 3 = -2
    conv, theirs = QGCNConv(K, M, config=config), GCNConv(K, M)
    theirs.load_state_dict(conv.state_dict())
    x = torch.randn(6, K)
    expected, out = theirs(x, edge_index, weight), conv(x, edge_index, weight)
    assert torch.equal(out.isnan(), expected.isnan())
    assert out.isnan().all(1).tolist() == [True, True, False, False, False, False]
    torch.testing.assert_close(out[2:], expected[2:], rtol=0, atol=1e-5 if config is None else 0.05)
    mixed = torch.tensor([-0.5, 0.25, 1.0, -0.5, 1.0, 1.0, 2.0])  # every degree stays positive
    torch.testing.assert_close(
        conv(x, edge_index, mixed), theirs(x, edge_index, mixed), rtol=0, atol=1e-5 if config is None else 0.05
    )


@BOTH
def test_a_cached_layer_notices_another_graph(config: QConfig | None) -> None:
    conv, fresh = (QGCNConv(K, M, cached=cached, config=config) for cached in (True, False))
    fresh.load_state_dict(conv.state_dict())
    first, num_nodes = GRAPHS["random"]
    x = torch.randn(num_nodes, K)
    shrunk = torch.randn(20, K), torch.randint(20, (2, 40))
    for features, edge_index in ((x, first), (x, first.flip(0)), shrunk, (x, first)):
        assert torch.equal(conv(features, edge_index), fresh(features, edge_index.clone()))


@BOTH
def test_a_cached_layer_with_learnable_weights_goes_backward_twice(config: QConfig | None) -> None:
    edge_index, num_nodes = GRAPHS["random"]
    conv = QGCNConv(K, M, cached=True, config=config)
    weight = torch.rand(edge_index.shape[1], requires_grad=True)
    x = torch.randn(num_nodes, K)
    first, second = (passes(conv, x, edge_index, weight, extra=(weight,)) for _ in range(2))
    assert_equal_pass(first, second)
    with torch.no_grad():
        weight.mul_(torch.linspace(0.5, 2, len(weight)))  # a step of the optimizer reaches the next pass
    assert not torch.equal(passes(conv, x, edge_index, weight)["out"], first["out"])


# --- quantizers ---


@pytest.mark.parametrize("granularity", ["row", "tensor", "block"])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_zero_rows_stay_zero(granularity: str, rounding: str) -> None:
    config = QConfig(granularity=granularity, rounding=rounding, block_size=4)
    x = torch.randn(6, K)
    x[::2] = 0
    for value in (x, torch.zeros(6, K), -torch.zeros(6, K)):
        back = functional.quantize(value, config).dequantize()
        assert back.isfinite().all()
        assert back[::2].count_nonzero() == 0
    if granularity != "block":
        conv = QGCNConv(K, M, config=config)
        result = passes(conv, torch.zeros(50, K), GRAPHS["random"][0])
        assert result["out"].count_nonzero() == result["dlin.weight"].count_nonzero() == 0
        assert result["dx"].isfinite().all()


def test_zero_blocks_stay_zero() -> None:
    x = torch.randn(5, 16)
    x[:, 4:8] = 0
    for rounding in ("nearest", "stochastic"):
        q = functional.quantize(x, QConfig(granularity="block", block_size=4, rounding=rounding))
        back = q.dequantize()
        assert back[:, 4:8].count_nonzero() == 0
        assert (q.scale[:, [0, 2, 3]] > 0).all()
        assert back.isfinite().all()


@pytest.mark.parametrize("granularity", ["row", "tensor"])
def test_strided_views_equal_their_copies(granularity: str) -> None:
    config = QConfig(granularity=granularity, rounding="nearest")
    wide = torch.randn(100, 2 * K)
    edge_index, num_nodes = GRAPHS["random"]
    views = (wide[::2, :K], wide[:50, ::2], torch.randn(K, 50).t(), wide[50:, K:], wide[:1, :K].expand(50, K))
    conv, layer = QGCNConv(K, M, config=config), QLinear(K, M, config=config)
    for view in views:
        assert view.shape == (num_nodes, K)
        same = view.contiguous()
        assert torch.equal(functional.quantize(view, config).codes, functional.quantize(same, config).codes)
        assert torch.equal(layer(view), layer(same))
        assert torch.equal(conv(view, edge_index), conv(same, edge_index))
        assert torch.equal(
            functional.spmm(edge_index, view, config=config), functional.spmm(edge_index, same, config=config)
        )


@pytest.mark.parametrize("size", [1e-36, 1e-38, 1e-45, 3e38])
def test_tiny_values_stay_finite(size: float) -> None:
    x = torch.randn(50, K).clamp(-1, 1) * size
    x[0, 0] = size
    for granularity in ("row", "tensor", "block"):
        back = functional.quantize(x, QConfig(granularity=granularity, block_size=4)).dequantize()
        assert back.isfinite().all()
        assert ((back - x).abs() <= size / 100 + 1e-30).all()
    for value in passes(QGCNConv(K, M), x.clamp(-1e30, 1e30), GRAPHS["random"][0]).values():
        assert value.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scales_of_half_types_are_fp32(dtype: torch.dtype) -> None:
    x = torch.randn(6, 16).to(dtype)
    for granularity in ("row", "tensor", "block"):
        config = QConfig(granularity=granularity, block_size=4, rounding="nearest")
        half, full = functional.quantize(x, config), functional.quantize(x.float(), config)
        assert half.scale.dtype == torch.float32
        assert torch.equal(half.scale, full.scale)
        assert torch.equal(half.codes, full.codes)
    smallest = torch.full((1, 4), 2.0**-24, dtype=torch.float16)  # its scale is below what fp16 holds
    assert functional.quantize(smallest, NEAREST).scale.item() == pytest.approx(2.0**-24 / 127)


@pytest.mark.parametrize("num_rows", range(1, 18))
def test_few_rows(num_rows: int) -> None:
    for width in (1, 7, 16, 33):
        layer, exact = QLinear(width, M, config=NEAREST), QLinear(width, M, config=None)
        exact.load_state_dict(layer.state_dict())
        x = torch.randn(num_rows, width)
        actual, expected = passes(layer, x), passes(exact, x)
        for name, value in expected.items():
            # each operand misses by half a step of 1/127 of its largest value
            bound = (
                2 * width * x.abs().max() * exact.weight.abs().max() / 127 if name == "out" else 0.1 * value.abs().max()
            )
            assert ((actual[name] - value).abs() <= bound + 1e-6).all(), name


def test_stochastic_rounding_keeps_what_is_far_below_a_step() -> None:
    x = torch.zeros(20_000, 2)
    x[:, 0] = 127.0  # one step is 1
    for value in (0.01, 0.5, -0.01, -0.99):
        x[:, 1] = value
        q = functional.quantize(x, QConfig(), seed=3)
        fraction = abs(value) % 1
        error = (q.codes[:, 1].float().mean() - value).abs()
        assert error < 5 * (fraction * (1 - fraction) / 20_000) ** 0.5 + 2**-16
        assert q.codes[:, 1].unique().numel() == 2
        nearest = functional.quantize(x, NEAREST).codes[:, 1]
        assert nearest.unique().numel() == 1  # where rounding to nearest loses it all
