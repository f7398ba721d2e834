"""Schemes: their names, what is quantized where, and widths that change during a run."""

import pytest
import torch
from torch_geometric.data import Data

from qgnn import QConfig
from qgnn.cli.args import build_parser
from qgnn.cli.compression import parse_compression
from qgnn.cli.model import make_model
from qgnn.cli.recipe import Recipe
from qgnn.cli.run import train_run
from qgnn.cli.scheme import Scheme, parse_scheme
from qgnn.cli.task import make_task
from qgnn.formats import MSFP, Blocks, FixedPoint, Int

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("fp32", Scheme("fp32")),
        (" BF16", Scheme("bf16", bf16=True)),
        ("int08", Scheme("int8", QConfig(fmt=Int(8)))),
        ("msfp12", Scheme("msfp12", QConfig(fmt=MSFP(3)))),
        ("int4:all", Scheme("int4", QConfig(fmt=Int(4)))),
        ("fixed6: weights", Scheme("fixed6:weights", QConfig.only(weights=FixedPoint(6)))),
        ("int8:ADQ[2, 8]", Scheme("int8:adq[2,8]", QConfig(fmt=Int(8)), schedule="adq[2,8]")),
        ("int4:sdq[8,8]:weights", Scheme("int4:weights:sdq[8,8]", QConfig.only(weights=Int(4)), schedule="sdq[8,8]")),
        ("fp32:plateau[1,4]", Scheme("fp32:plateau[1,4]", schedule="plateau[1,4]")),
    ],
)
def test_a_name_is_a_scheme(text: str, expected: Scheme) -> None:
    assert parse_scheme(text) == expected
    assert parse_scheme(expected.name) == expected


def test_parts_are_those_of_the_name() -> None:
    assert Scheme.from_parts() == parse_scheme("fp32")
    scheme = Scheme.from_parts("msfp12", "messages", "sdq[4,5]", compress="int2-g64")
    assert scheme.name == "msfp12:messages:sdq[4,5]"
    assert scheme.compression.blocks == Blocks(2, 64)
    assert scheme.config == QConfig.only(messages=MSFP(3))
    with pytest.raises(ValueError, match="expects codes whose width it can change; put a format such as int8 in place"):
        Scheme.from_parts("bf16", schedule="sdq[2,4]")
    assert Scheme.from_parts("fp32", schedule="sdq[2,4]", compress="int1").schedule == "sdq[2,4]"


def test_commas_in_brackets_belong_to_a_name() -> None:
    options = build_parser().parse_args(["train", "--precision", "fp32,int8:sdq[2,4,8],int8:weights:adq[2,8],fp32"])
    assert [scheme.name for scheme in options.precision] == ["fp32", "int8:sdq[2,4,8]", "int8:weights:adq[2,8]"]


def test_layers_get_the_config_and_the_last_one_none() -> None:
    scheme = Scheme.from_parts("msfp12", "weights", compress="int2")
    model = make_model("gcn", 16, 4, Recipe(hidden=16, layers=3), scheme)
    assert [conv.config for conv in model.convs] == [scheme.config, scheme.config, None]


def test_a_schedule_sets_the_widths_of_the_layers(tiny: Data) -> None:
    task, recipe = make_task(tiny, CPU), Recipe(hidden=8, epochs=6)
    run = train_run(task, recipe, parse_scheme("int8:sdq[2,4,8]"), 0, CPU)
    assert run.widths == (2, 2, 4, 4, 8, 8)
    assert run.mean_bits == pytest.approx(28 / 6)
    # The same width throughout is the run without a schedule, but for features that are quantized once there.
    dropping = Recipe(hidden=8, epochs=4, input_dropout=True)
    constant, plain, other = (
        train_run(task, dropping, parse_scheme(name), 0, CPU, measure=False)
        for name in ("int8:sdq[3]", "int3", "int8:sdq[3,4]")
    )
    assert constant.final_loss == plain.final_loss != other.final_loss
    assert (plain.widths, plain.mean_bits) == ((), None)


def test_an_active_schedule_sees_the_loss(tiny: Data) -> None:
    """A rate this small leaves the loss where it is: a bit more for the 11th epoch, and for each fifth from there."""
    recipe = Recipe(hidden=8, epochs=17, lr=1e-12, dropout=0.0)
    run = train_run(make_task(tiny, CPU), recipe, parse_scheme("int8:adq[7,8]"), 0, CPU, measure=False)
    assert run.widths == (7,) * 10 + (8,) * 7


def test_a_schedule_sets_the_width_of_the_compressor(tiny: Data) -> None:
    task, recipe = make_task(tiny, CPU), Recipe(hidden=16, epochs=4, dropout=0.0)
    scheduled = train_run(task, recipe, Scheme.from_parts(schedule="sdq[1,8]", compress="int2"), 0, CPU)
    narrow, wide = (train_run(task, recipe, Scheme.from_parts(compress=name), 0, CPU) for name in ("int1", "int8"))
    assert scheduled.widths == (1, 1, 8, 8)
    assert scheduled.saved_mib == wide.saved_mib
    assert len({scheduled.final_loss, narrow.final_loss, wide.final_loss}) == 3
    assert parse_compression("none").with_bits(4) == parse_compression("none")


def test_an_unmeasured_run_is_the_same_run(tiny: Data) -> None:
    task, recipe, scheme = make_task(tiny, CPU), Recipe(hidden=8, epochs=3), parse_scheme("int8")
    measured, quick = (train_run(task, recipe, scheme, 0, CPU, measure=measure) for measure in (True, False))
    assert (quick.test_acc, quick.final_loss) == (measured.test_acc, measured.final_loss)
    assert quick.saved_mib is quick.original_mib is quick.features_mib is quick.peak_mib is None
    assert quick.ops == {}
    assert measured.ops
