"""What the instructions of each kernel are divided by."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple


class Work(NamedTuple):
    """What instructions of a kernel are divided by.

    Args:
        unit: What an element is.
        elements: How many of them a program deals with, from the arguments of a launch; in one trip of its longest
            innermost loop if ``in_loop`` and there is one.
        in_loop: Whether the loop's instructions count, and not all.
        trips: Of all instructions, how often the loop's are executed; once if it is not given.
    """

    unit: str
    elements: Callable[[dict[str, Any]], int]
    in_loop: bool = True
    trips: Callable[[dict[str, Any]], int] | None = None


def _tile(*sizes: str) -> Callable[[dict[str, Any]], int]:
    return lambda launch: functools.reduce(lambda product, name: product * launch[name], sizes, 1)


def _values_and_outputs(launch: dict[str, Any]) -> int:
    """Of whole rows of the input and of the output."""
    return launch["BLOCK_N"] * (launch["BLOCK_K"] + _output_tiles(launch) * launch["BLOCK_M"])


def _output_tiles(launch: dict[str, Any]) -> int:
    return -(-launch["M"] // launch["BLOCK_M"])


_GATHERED = Work("gathered value", _tile("ROWS", "BLOCK_E", "BLOCK_F"))
_SCORES = Work("score", _tile("ROWS", "BLOCK_E", "BLOCK_H"))
_SCORES_OF_HUB = Work("score", _tile("BLOCK_E", "BLOCK_H"))

_BY_HEAD = Work("gathered value", _tile("BLOCK_E", "BLOCK_H", "BLOCK_D"))


def _input_tiles(launch: dict[str, Any]) -> int:
    return -(-launch["F"] // launch["BLOCK_K"])


def _values_of_bytes(*sizes: str) -> Callable[[dict[str, Any]], int]:
    return lambda launch: _tile(*sizes)(launch) * 8 // launch["BITS"]


def _groups_of_eight(launch: dict[str, Any]) -> int:
    return 8 * launch["BLOCK_R"] * launch["BLOCK_G"]


WORK: dict[str, Work] = {
    "_blocks_pack_kernel": Work("value", _values_of_bytes("BLOCK_B", "BLOCK_R")),
    "_blocks_project_kernel": Work("value", _tile("BLOCK_N", "F"), in_loop=False, trips=_input_tiles),
    "_blocks_unproject_kernel": Work("output", _tile("BLOCK_N", "BLOCK_F"), in_loop=False),
    "_blocks_unpack_kernel": Work("value", _values_of_bytes("BLOCK_B", "BLOCK_R"), in_loop=False),
    "_codes_pack_kernel": Work("value", _groups_of_eight, in_loop=False),
    "_codes_unpack_kernel": Work("value", _groups_of_eight, in_loop=False),
    "_quantize_kernel": Work("value", _tile("BLOCK_N", "BLOCK_F")),
    "_quantize_grad_kernel": Work("value", _tile("BLOCK_N", "BLOCK_F")),
    "_quantize_grid_kernel": Work("value", _tile("BLOCK_R", "BLOCK_C"), in_loop=False),
    "_activation_kernel": Work("value", _tile("BLOCK_N", "BLOCK_F")),
    "_activation_backward_kernel": Work("value", _tile("BLOCK_N", "BLOCK_F")),
    "_quantize_matmul_kernel": Work("value and output", _values_and_outputs, in_loop=False, trips=_output_tiles),
    "_quantize_matmul_requantize_kernel": Work("value and output", _values_and_outputs, in_loop=False),
    "_matmul_kernel": Work("output", _tile("BLOCK_N", "BLOCK_M"), in_loop=False),
    "_matmul_requantize_kernel": Work("output", _tile("BLOCK_N", "BLOCK_M"), in_loop=False),
    "_matmul_shared_kernel": Work("output of a block", _tile("BLOCK_N", "BLOCK_M")),
    "_matmul_dw_kernel": Work("code", lambda launch: launch["BLOCK_N"] * (launch["BLOCK_M"] + launch["BLOCK_K"])),
    "_add_partials_kernel": Work("partial result", _tile("BLOCK_S", "BLOCK")),
    "_spmm_tile_kernel": Work("gathered value", lambda launch: 2 * launch["BLOCK_E"] * launch["BLOCK_W"]),
    "_spmm_rows_kernel": _GATHERED,
    "_spmm_hubs_kernel": Work("partial sum", _tile("BLOCK_S", "BLOCK_F")),
    "_spmm_extremum_kernel": _GATHERED,
    "_spmm_extremum_hubs_kernel": Work("partial extremum", _tile("BLOCK_S", "BLOCK_F")),
    "_sddmm_dot_kernel": Work("gathered value", _tile("ROWS", "BLOCK_E", "BLOCK_H", "BLOCK_D")),
    "_sddmm_add_kernel": _GATHERED,
    "_softmax_rows_kernel": _SCORES,
    "_softmax_hubs_kernel": _SCORES_OF_HUB,
    "_softmax_backward_rows_kernel": _SCORES,
    "_softmax_backward_hubs_kernel": _SCORES_OF_HUB,
    "_attention_kernel": _BY_HEAD,
    "_attention_target_kernel": _BY_HEAD,
    "_attention_source_kernel": _BY_HEAD,
    "_attention_gatv2_kernel": _BY_HEAD,
    "_attention_gatv2_target_kernel": _BY_HEAD,
    "_attention_gatv2_source_kernel": _BY_HEAD,
    "_attention_dot_kernel": _BY_HEAD,
    "_attention_dot_target_kernel": _BY_HEAD,
    "_attention_dot_source_kernel": _BY_HEAD,
}
