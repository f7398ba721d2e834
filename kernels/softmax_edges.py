"""Device helpers of the softmax over edges and its gradients: tiles [ROWS, BLOCK_E, BLOCK_H] of scores, which have a
value an edge and head.

Numerics: fp32. The score of an edge is the sum of its nodes' scores, in this order of operations everywhere.

Oracle: qgnn.reference.attention_scores
"""

import triton
import triton.language as tl
from qgnn.kernels.memory import head_offsets


@triton.jit
def load_node_scores(score_ptr, offs_n, mask_n, offs_h, H: tl.constexpr, FROM_NODES: tl.constexpr):
    """Scores of the rows ``offs_n`` ([R]), fp32 [R, 1, BLOCK_H]; nothing where edges have scores of their own."""
    if FROM_NODES:
        offs, mask = head_offsets(offs_n[:, None], mask_n[:, None], offs_h, H)
        return tl.load(score_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    else:
        return 0.0


@triton.jit
def node_scores(offs_e, mask_e, offs_h, target, index_ptr, score_source_ptr, H: tl.constexpr):
    """Scores of edges before the leaky ReLU, fp32 [R, E, BLOCK_H], from their targets' [R, 1, BLOCK_H]."""
    source_row = tl.load(index_ptr + offs_e, mask=mask_e, other=0)
    offs, mask = head_offsets(source_row, mask_e, offs_h, H)
    return target + tl.load(score_source_ptr + offs, mask=mask, other=0.0).to(tl.float32)
