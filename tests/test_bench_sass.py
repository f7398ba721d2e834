"""The reader of machine code: classes of instructions, loops, and what a usual run does not come by."""

import importlib
import sys

import pytest

from house import ROOT

sys.path.append(str(ROOT))  # bench is not installed; last, so that an installed qgnn is found first
machine_code = importlib.import_module("bench.sass.machine_code")

# Two nested loops and a longer one that waits; a far jump; what a diverged warp runs, and a subroutine, in the end.
LISTING = """
_a_kernel:
.text._a_kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;
.L_x_2:
        /*0020*/              @!P1 LDGSTS.E.BYPASS.LTC128B.64 [R4], desc[UR4][R2.64] ;
        /*0030*/                   I2FP.F32.U32 R4, R5 ;
        /*0040*/                   BRA.DIV UR4, `(.L_x_5) ;
        /*0050*/                   SHFL.BFLY PT, R4, R5, 0x1, 0x1f ;
.L_x_6:
        /*0060*/                   IMAD R4, R5.reuse, 0x7feb352d, R6 ;
        /*0070*/              @!P0 BRA `(.L_x_2) ;
        /*0080*/                   LOP3.LUT R4, R5, R6, RZ, 0x3c, !PT ;
        /*0090*/                   BRA.U !UP0, `(.L_x_1) ;
.L_x_3:
        /*00a0*/                   IMAD.MOV.U32 R4, RZ, RZ, 0x1 ;
        /*00b0*/                   IMAD.U32 R4, RZ, RZ, UR4 ;
        /*00c0*/                   IMAD.WIDE.U32 R4, P0, R5, R6, R8 ;
        /*00d0*/                   IMAD.SHL.U32 R4, R5, 0x4, RZ ;
        /*00e0*/                   NANOSLEEP 0x64 ;
        /*00f0*/                   NANOSLEEP 0x64 ;
        /*0100*/                   NANOSLEEP 0x64 ;
        /*0110*/              @!P0 BRA `(.L_x_3) ;
        /*0120*/               @P0 CALL.REL.NOINC `($__internal_0_$__cuda_sm3x_div_rn_noftz_f32_slowpath) ;
        /*0130*/              @!P0 CALL.REL.NOINC `(.L_x_4) ;
        /*0140*/                   BRA `(.L_x_3) ;
.L_x_4:
        /*0150*/                   STG.E desc[UR4][R2.64], R4 ;
        /*0160*/                   STG.E.U8 desc[UR4][R2.64], R4 ;
        /*0170*/                   EXIT ;
.L_x_5:
        /*0180*/                   WARPSYNC.COLLECTIVE R4, `(.L_x_6) ;
        /*0190*/                   BRA `(.L_x_6) ;
.L_x_7:
        /*01a0*/                   BRA `(.L_x_7);
"""


def test_only_what_a_usual_run_comes_by_is_counted() -> None:
    counts = machine_code.count(machine_code.parse(LISTING).instructions)
    assert counts.pop("total") == 24
    assert counts == {
        **{"global_load_b128": 1, "global_load_b64": 1, "global_store_b32": 1, "global_store_b8": 1},
        **{"i2fp": 1, "imul": 2, "lop3": 1, "shuffle": 1},
        "other": 24 - 9,
    }


def test_the_hottest_loop_is_an_innermost_one_that_does_not_wait() -> None:
    loop = machine_code.parse(LISTING).hottest()
    assert [instruction.name.split(".")[0] for instruction in loop] == ["LDGSTS", "I2FP", "BRA", "SHFL", "IMAD", "BRA"]
    straight = machine_code.parse("/*0000*/ LDG.E R1, [R2] ;\n/*0010*/ EXIT ;\n")
    assert straight.hottest() is None


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("LDG.E.S8 R1, [R2.64]", "global_load_b8"),
        ("LDG.E.U16.CONSTANT R1, [R2.64]", "global_load_b16"),
        ("LDGSTS.E.BYPASS.LTC128B.128 [R1], [R2.64]", "global_load_b128"),
        ("STG.E.64 [R2.64], R4", "global_store_b64"),
        ("LDS.128 R1, [R2]", "shared_load"),
        ("STSM.16.MT88.4 [R1], R2", "shared_store"),
        ("LDSM.16.M88.4 R1, [R2]", "ldmatrix"),
        ("IMMA.16832.S8.S8.SAT R1, R2.ROW, R3.COL, R4", "mma_int8"),
        ("IGMMA.64x128x32.S8.S8 R24, gdesc[UR4], R24", "mma_int8"),
        ("UTCIMMA gdesc[UR4], gdesc[UR6], tmem[UR8], UP0", "mma_int8"),
        ("HMMA.16816.F32 R1, R2, R3, R4", "mma_fp16"),
        ("HMMA.1688.F32.TF32 R1, R2, R3, R4", "mma_tf32"),
        ("I2F.S8 R1, R2", "i2f"),
        ("F2I.TRUNC.NTZ R1, R2", "f2i"),
        ("IMAD.IADD R1, R2, 0x1, R3", "other"),
        ("IMAD.X R1, RZ, RZ, R3, P0", "other"),
        ("IMAD.HI.U32 R1, R2, R3, R4", "imul"),
        ("HADD2 R1, R2, -1152, -1152", "half2"),
        ("FFMA2 R1, R2, R3, R4", "ffma"),
        ("STL.64 [R1], R2", "local"),
        ("BAR.SYNC.DEFER_BLOCKING 0x0", "barrier"),
        ("ISETP.GE.AND P0, PT, R1, R2, PT", "other"),
    ],
)
def test_an_instruction_has_a_class(line: str, kind: str) -> None:
    code = machine_code.parse(f"/*0000*/  @P0 {line} ;\n/*0010*/ EXIT ;\n")
    assert code.instructions[0].kind == kind


def test_control_flow_that_ends_nowhere_is_refused() -> None:
    with pytest.raises(ValueError, match="no path leads to the end"):
        machine_code.parse(".L_x_0:\n/*0000*/ BRA `(.L_x_0) ;\n/*0010*/ EXIT ;\n")
