"""The most instructions that each kernel's machine code may take, with the reasons."""

from typing import NamedTuple


class Budget(NamedTuple):
    """The most instructions of each kind that a thread executes for an element, in code for any architecture.

    An element is what WORK in bench/sass/work.py says. ``conversions`` are I2F and F2I, a quarter as fast as others;
    ``on_sm_80`` is what that architecture, which has no fast conversion of integers (I2FP), needs on top.
    """

    total: float
    imul: float
    conversions: float
    on_sm_80: float = 0.0


# The first line whose pattern is found in "kernel case" counts. Totals leave a tenth to the differences between
# compilers: what was counted with Triton 3.6 and 3.9 is in brackets.
BUDGETS: dict[str, Budget] = {
    # A hash serves two values and multiplies three times, its first step being shared by rows and columns in part:
    # 1 to 1.5 a value, the rest are addresses (1.06 to 1.62). F2I: the rounding. Total: 3 for the absmax, 3 for scaling
    # and packing, 10 for random bits (15.1 to 17.2).
    r"_quantize_kernel .*fp32/F(16|100|128|256|1433)(/block|/tensor|/two_passes)?/sm": Budget(19, 1.75, 1),
    r"_quantize_kernel .*nearest": Budget(14, 1.25, 1),  # no hash; bf16 widens by a multiplication (12.0 to 12.5)
    r"_quantize_kernel .*column_major": Budget(29, 2.1, 1),  # an address and a load of 4 bytes a value (26 to 26.6)
    # Loads and stores of single bytes, for which a thread has offsets and masks: with words of 32 bits 11.8 to 20.3 to
    # pack, 8.3 to 12.9 to unpack, with two of 64 for codes of more than 8 bits 25.7 to 27.9 and 18.7 to 19.6. I2F
    # and F2I: the division of a program's number.
    r"_codes_pack_kernel .*/int(3|4)/": Budget(16.6, 2.1, 0.1),
    r"_codes_pack_kernel .*/int7/": Budget(22.4, 2.1, 0.1),
    r"_codes_pack_kernel .*/int11/": Budget(30.5, 2.4, 0.1),
    r"_codes_unpack_kernel .*/int(3|4)/": Budget(11, 1.25, 0.1),
    r"_codes_unpack_kernel .*/int7/": Budget(14.2, 1.95, 0.1),
    r"_codes_unpack_kernel .*/int11/": Budget(21.5, 2.1, 0.1),
    # Absmax: 3; exact products by powers of two in two steps, there and back: 4; rounding by a sum, and a sign: 4; the
    # clamp: 4; addresses, masks, what a block shares (15.6 to 27.9; two extrema: 30.6 to 33.2; random bits: 32.3 to
    # 35.3). bf16 widens by a multiplication. Codes save the way back (15.8 to 19.2). Rows lie apart by an argument, not
    # a constant: each vector's 64-bit address takes multiplications, half of one a value.
    r"_quantize_grid_kernel .*stochastic": Budget(38.5, 3.6, 1),
    r"_quantize_grid_kernel .*affine8": Budget(36, 1.25, 0),
    r"_quantize_grid_kernel .*shared": Budget(20.5, 1.6, 1),
    r"_quantize_grid_kernel .*bf16": Budget(30.5, 2.95, 0),
    r"_quantize_grid_kernel": Budget(30.5, 1.7, 0),
    # Scaling and storing an output take 2, the product's operands and addresses the rest (9.4 to 12.4; 18.2 on sm_80).
    # With an epilogue: the hash of dropout and the mask's bits (25 to 28.4).
    r"_matmul_kernel .*/activation": Budget(31, 2.1, 0, on_sm_80=1),
    r"_matmul_kernel .*K(128|256)": Budget(13.5, 0.5, 0, on_sm_80=6.5),
    r"_matmul_kernel .*M47": Budget(22.5, 2.5, 0, on_sm_80=1),  # rows of 47 floats: stored one by one (15.6 to 20.6)
    # Rounding on top of the product, as in quantize (13.6 to 19.7 to nearest, 18.4 to 25.8; 31.6 on sm_80).
    r"_matmul_requantize_kernel .*nearest": Budget(20.5, 0.25, 1, on_sm_80=1.5),
    r"_matmul_requantize_kernel .*M256": Budget(27.5, 1.75, 1, on_sm_80=7.5),
    r"_matmul_requantize_kernel .*M64": Budget(31, 2, 1, on_sm_80=8.5),  # half the tile, the same scales
    # An output takes two factors (FMUL) and a sum a block; a thread of 32 outputs has 16 codes to cut in two, their way
    # through shared memory to the tensor cores, and the factors of its rows and columns (9.6 to 10.8; on sm_100, whose
    # products come by way of a memory of their own, 13.9 to 15.2). sm_80 converts the int32 sums slowly.
    r"_matmul_shared_kernel .*G16": Budget(16.7, 0.1, 0),
    r"_matmul_shared_kernel .*G32": Budget(16.4, 0.4, 0, on_sm_80=1),
    # The hash of dropout comes to that of rounding: 1.5 more a value, and 4 for the mask's bits (22.7 to 31.3).
    r"_quantize_matmul_kernel .*/activation": Budget(33, 2.4, 1.1),
    # Rounding of the values, half of them here, and scaling of the outputs (10.6 to 14.7); of M47 the outputs are few
    # and stored one by one (17.3 to 20.4).
    r"_quantize_matmul_kernel .*M256": Budget(16, 0.7, 1.1),
    r"_quantize_matmul_kernel .*M47": Budget(22.5, 1.75, 1.1),
    # Every value and every output is rounded: 15 to 17, and the product's operands and addresses (17.1 to 30.3).
    r"_quantize_matmul_requantize_kernel .*K512": Budget(33, 3.4, 1, on_sm_80=1),
    r"_quantize_matmul_requantize_kernel": Budget(29.5, 1.8, 1, on_sm_80=1),
    # The quantizer, a sum (FADD), and with a mask a bit and a choice (15.8 to 17.2, 19 to 22.2); bf16 widens by a
    # multiplication.
    r"_quantize_grad_kernel .*unmasked": Budget(19, 1.35, 1),
    r"_quantize_grad_kernel .*fp32": Budget(23, 1.35, 1),
    r"_quantize_grad_kernel .*bf16": Budget(24.5, 2.4, 1),
    # Addresses, bias and residual: 8; dropout's hash, a bit, two choices (23.9 to 24.6). ELU's exponential in
    # operations that are not fused: 30, and a second hash where its derivative is rounded (44 to 67.1). bf16 widens by
    # a multiplication.
    r"_activation_kernel .*/elu/codes": Budget(74, 3.3, 1),
    r"_activation_kernel .*/elu": Budget(64, 3.9, 0),
    r"_activation_kernel": Budget(27.5, 4.3, 0),
    # A bit or a derivative, a product and a choice, a sum (6.3 to 10.3), and the hash where dropout is drawn again
    # (16.4).
    r"_activation_backward_kernel .*leaky_relu": Budget(18.5, 2.7, 0),
    r"_activation_backward_kernel .*codes": Budget(11.5, 0.1, 0, on_sm_80=1),
    r"_activation_backward_kernel": Budget(10.5, 1.9, 0),
    # Codes become fp16 by bits: a PRMT, half a LOP3 and half an HADD2 (4.5 to 4.9). sm_80 transposes in registers.
    r"_matmul_dw_kernel": Budget(5.4, 0.25, 0, on_sm_80=2.9),
    # Memory-bound whatever it does: an address and an addition a result; few outputs share less (3.7 to 4.2; 50).
    r"_add_partials_kernel .*M256": Budget(4.6, 0.85, 0),
    r"_add_partials_kernel .*(quantize_grad/(fp32/F128|bf16)|activation_backward)": Budget(4.6, 0.85, 0),
    r"_add_partials_kernel": Budget(55, 14.5, 0),
    # Two codes are split by one PRMT and half an HADD2 each; the tile of weights, its exponent and 64-bit addresses are
    # shared by the columns, so narrow slices cost more (2.6 to 2.9; 3.2 to 3.4; 4.3 to 4.5). No conversions at all.
    r"_spmm_tile_kernel .*(F64|/H4)/sm": Budget(5, 0.1, 0),
    r"_spmm_tile_kernel .*F(100|128|602)": Budget(3.8, 0.1, 0),
    r"_spmm_tile_kernel": Budget(3.2, 0.02, 0),
    # Widening by a multiplication, then FFMA (3.9 to 4.4); of fp32, addresses and masks of loads twice as many (2.9 to
    # 5; behind the softmax with 3.6, 5.8), and an address and a load of each head's weight (5.3 to 8.7).
    r"_spmm_rows_kernel .*bf16": Budget(4.9, 1.4, 0),
    r"_spmm_rows_kernel .*fp32/F128/H4": Budget(9.6, 0.05, 0),
    r"_spmm_rows_kernel .*fp32": Budget(6.3, 0.55, 0),
    # A byte is split off (PRMT), converted (I2FP), freed of its bias (FADD) and added (FFMA); the rest are addresses,
    # masks and the edge's factor, shared by 16 columns only (5.5 to 7.1).
    r"_spmm_rows_kernel .*int8": Budget(7.9, 0.15, 0, on_sm_80=1),
    r"_spmm_hubs_kernel": Budget(4.1, 0.3, 0),  # a load, an addition and their share of a mask (2.6 to 3.7)
    # A product, two comparisons (NaN), two choices, and the edge (10.6 to 12.5).
    r"_spmm_extremum_kernel": Budget(13.8, 0.55, 0, on_sm_80=1),
    r"_spmm_extremum_hubs_kernel": Budget(12, 0.05, 0),  # two loads in place of one (10.4 to 10.9)
    # Both bytes are split off (PRMT) and multiplied in int32, products added in a tree (3.6 to 4.9); scales of heads of
    # 8 codes are shared by few (4.4 to 4.7).
    r"_sddmm_dot_kernel .*int8": Budget(5.5, 1.15, 0.15),
    r"_sddmm_dot_kernel .*fp32": Budget(8.6, 0.05, 0),  # eight shuffles an edge of 128 values (6.2 to 7.8)
    # Two loads, an addition and a store with their addresses (5.3 to 6.1); of codes, a conversion without its bias, and
    # the address and load of each value's scale (12.5). With 3.6 one of the two codes is converted the slow way.
    r"_sddmm_add_kernel .*fp32": Budget(6.7, 0.05, 0),
    r"_sddmm_add_kernel .*int8": Budget(14.5, 0.4, 1, on_sm_80=1),
    # Two exponentials a score, each with its scaling of denormals, a maximum and the distances to it (19.6 to 27.5); of
    # hubs the loop with most instructions is that of the results, with one (11.5 to 21.4: scores of one head are loaded
    # one by one). bf16 widens by a multiplication with 3.6.
    r"_softmax_rows_kernel": Budget(31, 1.1, 0),  # bf16 widens by a multiplication
    r"_softmax_hubs_kernel .*H1/": Budget(23.5, 0.6, 0),
    r"_softmax_hubs_kernel .*bf16": Budget(17.5, 1.1, 0),
    r"_softmax_hubs_kernel": Budget(17.5, 0.6, 0),
    # Two loads, a difference, a product and a store; for attention also the source's score, whose gather and comparison
    # are as much again (7.1 to 7.4; 13.3 to 17).
    r"_softmax_backward_(rows|hubs)_kernel softmax": Budget(8.2, 0.6, 0),
    r"_softmax_backward_(rows|hubs)_kernel attention": Budget(19, 0.6, 0),
    # Attention, per gathered column of an edge; what a score or a weight takes is shared by a head's columns, so that
    # heads of 8 cost more. A code is split off, converted and freed of its bias as above. Then it is added: forward
    # once (FFMA; 5.6 to 7.8, heads of 8: 7.9 to 9.6), at the target to one of two sums (7.5 to 10.3, 11.3), at the
    # source after a dot product (FMUL, FADD; 9 to 11.1, 12.2).
    r"_attention_kernel .*D8/": Budget(9.7, 0.6, 0, on_sm_80=1),
    r"_attention_kernel .*int8": Budget(8.5, 0.6, 0, on_sm_80=1),
    r"_attention_kernel .*fp32": Budget(7.1, 0.4, 0),  # a load of four, addresses and masks (3.8 to 4.6; 6.4 with 3.6)
    r"_attention_target_kernel .*D8/": Budget(12.5, 0.3, 0, on_sm_80=1),
    r"_attention_target_kernel .*int8": Budget(11.4, 0.7, 0, on_sm_80=1),
    r"_attention_target_kernel .*fp32": Budget(10.3, 0.6, 0),  # (8.7 to 9.3)
    r"_attention_source_kernel .*D8/": Budget(13.1, 0.3, 0, on_sm_80=1),
    r"_attention_source_kernel .*int8": Budget(12.3, 0.6, 0, on_sm_80=1),
    # The gathered tile does not stay in registers (11 to 12.5).
    r"_attention_source_kernel .*fp32": Budget(13.8, 0.3, 0),
    # GATv2's score: a scale, a sum, a choice of two vectors, a dot product; the online softmax rescales a sum (12.7 to
    # 16.4). The target has two dot products and two sums (14 to 18.3), the source gathers two rows, and has three sums
    # (19.7 to 27.6).
    r"_attention_gatv2_kernel": Budget(18, 0.6, 0.3, on_sm_80=1),
    r"_attention_gatv2_target_kernel": Budget(20.2, 0.4, 0, on_sm_80=1),
    r"_attention_gatv2_source_kernel": Budget(30.4, 0.5, 1, on_sm_80=1),
    # Scaled dot products: two rows are gathered in all passes. A dot product and a rescaled sum (11.6 to 18.7), then
    # two of each (12.6 to 20.6, 14.6 to 20.6). The codes of one of the rows are converted the slow way at times.
    r"_attention_dot_kernel": Budget(20.6, 0.6, 1.3, on_sm_80=1),
    r"_attention_dot_target_kernel": Budget(22.6, 0.4, 1, on_sm_80=1),
    r"_attention_dot_source_kernel": Budget(22.6, 0.5, 1, on_sm_80=1),
    # The quantizer with two extrema, as integers: 4; an offset: 1; a code is shifted and added into its byte: 2. Offset
    # and step of a block are made by each of its threads, which few values share where blocks are short or bytes wide:
    # 3 of 20.6 to 22; of 4 bits 26.8 to 29; of 16 values 18.5 to 19.9. bf16 widens by a multiplication (17.5 to 20.7).
    r"_blocks_pack_kernel .*(int2/G128|projection24/G128)/sm": Budget(23.5, 2.4, 1),
    r"_blocks_pack_kernel .*int1/G256": Budget(20.5, 2.3, 1),
    r"_blocks_pack_kernel .*int4/G64": Budget(31.5, 1.9, 1),
    r"_blocks_pack_kernel .*int8/G16": Budget(22, 1.45, 1),
    r"_blocks_pack_kernel .*nearest": Budget(17.8, 0.25, 1),  # no hash (14.8 to 16.6)
    r"_blocks_pack_kernel .*two_passes": Budget(13.3, 1.15, 1),  # the second, longer pass: without extrema (11 to 12)
    # A bin takes a multiplication (IMAD.HI), a difference, a shift and an addition: 4 times 3 and 4 times 15 more; the
    # conversions are those of the edges, once a thread (30.9 to 34.8; 85.4 to 98.9).
    r"_blocks_pack_kernel .*int2/G128/edges": Budget(38.5, 6, 1.15),
    r"_blocks_pack_kernel .*int4/G128/edges": Budget(108, 19.5, 2),
    # A shift and a mask, three operations in fp32, its store; then addresses (8.8 to 9; 5.9 to 7.4 of bf16; bytes that
    # cross to the threads that store their values, 10.4 to 11.9). Given edges: a load from the first-level cache
    # (11.1; 16.5 with 3.6).
    r"_blocks_unpack_kernel .*edges": Budget(18.2, 0.2, 0),
    r"_blocks_unpack_kernel .*int8": Budget(13.2, 0.45, 0),
    r"_blocks_unpack_kernel": Budget(10, 0.1, 0),
    # Of each value of the matrix: cut in two (2), through shared memory to the tensor cores (2 to 3), its share of the
    # signs of all rows (3 for 64 rows of 16 columns: 0.75; of 64 columns: 3), its row's own sign (a 32nd of a hash, a
    # shift, two logical operations, and again through shared memory: 3 to 6, of which up to 1 multiplies), and of the
    # packing of an eighth as many values (18.6 to 25.5; of 64 columns between edges 31.0 to 38.2).
    r"_blocks_project_kernel .*projection64": Budget(36, 4.5, 0.2, on_sm_80=5),
    r"_blocks_project_kernel .*projection24": Budget(27.5, 2.7, 0),
    r"_blocks_project_kernel .*projection16": Budget(26, 2.7, 0.2),
    # Of each output: its share of the signs and of the codes of its row, its own sign, its store (13.6 to 15.0; of 64
    # columns 16.1 to 19.1). On sm_80 a thread has two values of a word in each of its rows: a sign is half a hash, with
    # 1.4 multiplications (19.0 to 26.2).
    r"_blocks_unproject_kernel .*projection64": Budget(21, 2.5, 0, on_sm_80=7.5),
    r"_blocks_unproject_kernel": Budget(16, 2.7, 0, on_sm_80=7.5),
}
