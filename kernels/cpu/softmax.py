"""Softmax over the edges of each row of a CSR graph, and the attention weights of GAT in one pass over its edges, in C.

Numerics: fp32; half types are converted first. The exponential is a polynomial, at most 1 ulp away. A row's sum is made
of up to 32 partial sums; gradients are summed in the order of edges. A row is computed by one thread, and the gradient
of a source's scores is summed over the transposed graph: the number of threads changes nothing, and no sum is atomic.

Oracle: qgnn.reference.softmax, softmax_backward, attention_scores, attention_scores_backward
"""

import torch
from qgnn.kernels.cpu.library import empty_floats, launch
from torch import Tensor


def _matrix(x: Tensor) -> Tensor:
    return x.detach().float().contiguous()


def softmax(indptr: Tensor, scores: Tensor) -> Tensor:
    """Softmax of ``scores`` [E, H] over the edges of each row; parameters as of the reference."""
    score = _matrix(scores)
    out = empty_floats(*score.shape)
    if out.numel():
        indptr = indptr.contiguous()
        launch("qgnn_softmax_rows", out, indptr, indptr.dtype == torch.int64, score, len(indptr) - 1, score.shape[1])
    return out.to(scores.dtype)


def softmax_backward(indptr: Tensor, out: Tensor, grad: Tensor) -> Tensor:
    """Gradient of the scores, [E, H]; parameters as of the reference."""
    operands = _matrix(out), _matrix(grad)
    dx = empty_floats(*grad.shape)
    if dx.numel():
        indptr = indptr.contiguous()
        sizes = len(indptr) - 1, grad.shape[1]
        launch("qgnn_softmax_rows_backward", dx, indptr, indptr.dtype == torch.int64, *operands, *sizes)
    return dx.to(grad.dtype)


def attention_scores(
    indptr: Tensor, index: Tensor, score_target: Tensor, score_source: Tensor, *, negative_slope: float = 0.2
) -> Tensor:
    """Attention weights [E, H] in CSR order; parameters as of the reference."""
    N, H = score_target.shape
    out = empty_floats(index.numel(), H)
    if out.numel():
        indptr, index = indptr.contiguous(), index.to(indptr.dtype).contiguous()
        scores = _matrix(score_target), _matrix(score_source)
        operands = (indptr, index, indptr.dtype == torch.int64, *scores, float(negative_slope))
        launch("qgnn_softmax_attention", out, *operands, N, H)
    return out.to(score_target.dtype)


def attention_scores_backward(
    indptr: Tensor,
    index: Tensor,
    indptr_t: Tensor,
    order_t: Tensor,
    score_target: Tensor,
    score_source: Tensor,
    out: Tensor,
    grad: Tensor,
    *,
    negative_slope: float = 0.2,
) -> tuple[Tensor, Tensor]:
    """Gradients [N, H] and [S, H] of both scores; parameters as of the reference."""
    (N, H), S = score_target.shape, score_source.shape[0]
    if index.numel() * H == 0:
        return torch.zeros_like(score_target), torch.zeros_like(score_source)
    edge_grad, d_target, d_source = empty_floats(index.numel(), H), empty_floats(N, H), empty_floats(S, H)
    indptr, indptr_t = indptr.contiguous(), indptr_t.contiguous()
    index, order_t = index.to(indptr.dtype).contiguous(), order_t.to(indptr_t.dtype).contiguous()
    operands = _matrix(out), _matrix(grad), _matrix(score_target), _matrix(score_source)
    graph = indptr, index, indptr.dtype == torch.int64
    launch("qgnn_softmax_attention_backward", edge_grad, d_target, *graph, *operands, float(negative_slope), N, H)
    launch("qgnn_softmax_edge_sums", d_source, indptr_t, order_t, indptr_t.dtype == torch.int64, edge_grad, S, H)
    return d_target.to(score_target.dtype), d_source.to(score_source.dtype)
