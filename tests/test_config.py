"""QConfig: fields, equality, and every message."""

import copy
import inspect
import json
import pickle
from dataclasses import FrozenInstanceError, asdict, dataclass, replace

import pytest

from qgnn import QConfig
from qgnn.config import COMPONENTS, OPERANDS, RESULTS, check_config, check_product_config
from qgnn.formats import MSFP, MXFP4, MXFP8, Blocks, FixedPoint, Int


def test_defaults() -> None:
    config = QConfig()
    assert (config.bits, config.granularity, config.rounding, config.fmt) == (8, "row", "stochastic", None)
    assert (config.save, config.keep_fp32) == ("int8", ())
    assert config.stochastic
    assert not QConfig(rounding="nearest").stochastic


def test_positional_order_is_fixed() -> None:
    positional = [
        name
        for name, parameter in inspect.signature(QConfig).parameters.items()
        if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    ]
    assert positional == ["bits", "granularity", "rounding", "fmt", "save", "keep_fp32"]


def test_config_is_a_frozen_value() -> None:
    assert QConfig(bits=4) == QConfig(4)
    assert QConfig(bits=4) != QConfig(bits=5)
    assert len({QConfig(), QConfig(8, "row"), QConfig(4), QConfig(keep_fp32=["head"])}) == 3
    with pytest.raises(FrozenInstanceError):
        QConfig().bits = 4
    with pytest.raises(ValueError, match="'bits' from 2 to 8"):
        replace(QConfig(), bits=1)


def test_config_survives_copies() -> None:
    config = QConfig(4, "tensor", "nearest", save="fp32", keep_fp32=("a",))
    assert copy.deepcopy(config) == config
    assert pickle.loads(pickle.dumps(config)) == config
    assert eval(repr(config), {"QConfig": QConfig}) == config
    mixed = QConfig(fmt=Int(8), components={**dict.fromkeys(OPERANDS, Int(4)), "attention": None})
    assert (mixed.bits, mixed.fmt) == (4, Int(4)), "'fmt' is that of nothing, and fused kernels read the width"
    assert eval(repr(mixed), {"QConfig": QConfig, "Int": Int}) == mixed == replace(mixed, save="int8")


def test_blocks_are_kept_by_a_config_as_by_value() -> None:
    config = QConfig(save=Blocks(2, 64, projection=8))
    assert config == QConfig(save=Blocks(2, 64, projection=8))
    assert len({config, QConfig(save=Blocks(2, 64, projection=8)), QConfig(save=Blocks(2, 64)), QConfig()}) == 3
    assert copy.deepcopy(config) == pickle.loads(pickle.dumps(config)) == config
    assert "save=Blocks(bits=2, block_size=64, projection=8" in repr(config)
    assert config.keeps_codes
    assert QConfig().keeps_codes
    assert not QConfig(save="fp32").keeps_codes


def test_keep_fp32_becomes_a_tuple() -> None:
    assert QConfig(keep_fp32=["conv1", "head"]).keep_fp32 == ("conv1", "head")
    assert hash(QConfig(keep_fp32=["conv1"])) == hash(QConfig(keep_fp32=("conv1",)))


@pytest.mark.parametrize("bits", range(2, 9))
def test_a_format_gives_its_width(bits: int) -> None:
    assert QConfig(fmt=Int(bits)).bits == bits
    assert QConfig(bits=bits, fmt=Int(bits)).bits == bits
    assert QConfig(bits=bits).bits == bits


def test_formats_have_names() -> None:
    """They are parsed once: the config holds formats, and equals that of the formats themselves."""
    config = QConfig(fmt="MSFP12", components={"weights": "int4", "messages": None, "attention": Int(8)})
    assert config == QConfig(fmt=MSFP(3), components={"weights": Int(4), "messages": None, "attention": Int(8)})
    assert (config.fmt, config.bits) == (MSFP(3), 4)
    assert config.components == {"weights": Int(4), "messages": None, "attention": Int(8)}
    assert QConfig.only(weights="int4") == QConfig.only(weights=Int(4))
    assert replace(config, fmt="mxfp8-e5m2").format_of("features") == MXFP8("e5m2")


def test_a_replaced_width_or_format_brings_the_other_along() -> None:
    assert replace(QConfig(fmt=Int(4)), fmt=Int(6)) == QConfig(fmt=Int(6))
    assert replace(QConfig(4), fmt=MSFP(6)) == QConfig(fmt=MSFP(6))
    assert replace(QConfig(fmt=MSFP(3)), bits=6) == QConfig(fmt=MSFP(5))
    assert replace(replace(QConfig(fmt=FixedPoint(4)), bits=12), fmt=Int(3)) == QConfig(fmt=Int(3))
    assert replace(QConfig(fmt=FixedPoint(12)), fmt=None) == QConfig(8)
    assert replace(QConfig(fmt=FixedPoint(12)), bits=4, fmt=None) == replace(QConfig(4), fmt=None) == QConfig(4)
    assert replace(QConfig(fmt=Int(4)), fmt=None, bits=4) == replace(QConfig(fmt=Int(4)), fmt=None) == QConfig(4)
    assert replace(QConfig(6), rounding="nearest") == QConfig(6, rounding="nearest")
    assert replace(QConfig(fmt=Int(4)), bits=6, fmt=MSFP(5)) == QConfig(fmt=MSFP(5))
    assert replace(copy.deepcopy(QConfig(fmt=Int(4))), fmt=Int(6)).bits == 6
    with pytest.raises(ValueError, match=r"got bits=5 and fmt=MSFP\(.*\), of 6 bits; give one of them"):
        replace(QConfig(fmt=Int(4)), bits=5, fmt=MSFP(5))
    with pytest.raises(ValueError, match="'mxfp4' has codes of 4 bits only"):
        replace(QConfig(fmt=MXFP4()), bits=6)


def test_operands_that_are_not_named_have_the_format_of_the_config() -> None:
    config = QConfig(bits=4, components={"weights": MSFP(3), "messages": None})
    formats = {name: config.format_of(name) for name in COMPONENTS}
    assert formats["weights"] == MSFP(3)
    assert formats["messages"] is None
    assert {formats[name] for name in OPERANDS if name not in ("weights", "messages")} == {Int(4)}
    assert {formats[name] for name in RESULTS} == {None}
    with pytest.raises(ValueError, match=r"has the components .* \(got 'weight'\)"):
        config.format_of("weight")


def test_only_leaves_all_others_in_full_precision() -> None:
    config = QConfig.only(attention=MXFP4(), rounding="nearest")
    assert [name for name in COMPONENTS if config.format_of(name) is not None] == ["attention"]
    assert config.rounding == "nearest"
    assert config.name == "attention=mxfp4"
    assert QConfig.only().name == "fp32"
    fields = {"granularity": "block", "save": "fp32", "keep_fp32": ("head",), "block_size": 64}
    config = QConfig.only(weights=Int(4), **fields)
    assert {name: getattr(config, name) for name in fields} == fields
    assert config.format_of("features") is None
    with pytest.raises(ValueError, match=r"'components' among \('features', .* \(got 'weight'\)"):
        QConfig.only(weight="int4")


def test_components_are_part_of_a_value_whatever_their_order() -> None:
    formats = {"messages": None, "features": Int(4)}
    config, other = QConfig(components=formats), QConfig(components=dict(reversed(formats.items())))
    assert config == other
    assert hash(config) == hash(other)
    assert config != QConfig()
    assert replace(config, rounding="nearest").components == config.components == formats
    assert list(config.components) == ["features", "messages"]
    with pytest.raises(TypeError, match="cannot be changed; make another one"):
        config.components["weights"] = None
    formats["features"] = Int(8)
    assert config.format_of("features") == Int(4), "a dict that changes later does not change a config"
    names = {"QConfig": QConfig, "Int": Int}
    assert eval(repr(config), names) == config == pickle.loads(pickle.dumps(config))


def test_only_one_symmetric_integer_for_all_operands_is_for_fused_kernels() -> None:
    fused = [QConfig(), QConfig(4), QConfig(fmt=Int(4)), QConfig(4, components={"weights": Int(4), "attention": None})]
    assert all(config.is_integer for config in fused)
    named = QConfig(components=dict.fromkeys(OPERANDS, Int(4)))
    assert named.is_integer
    assert named.bits == 4, "fused kernels read the width"
    assert QConfig.only(**dict.fromkeys(OPERANDS, Int(8))).with_bits(4).is_integer
    others = [
        QConfig(fmt=Int(8, symmetric=False)),
        QConfig(fmt=FixedPoint(8)),
        QConfig(components={"weights": Int(4)}),
        QConfig(components={"weights": None}),
        QConfig(components={"aggregation": Int(8)}),
        QConfig.only(),
    ]
    assert not any(config.is_integer for config in others)


def test_name_says_what_is_quantized() -> None:
    assert QConfig(4).name == "int4"
    assert QConfig(fmt=MSFP(3)).name == "msfp12"
    assert QConfig(components=dict.fromkeys(OPERANDS, MSFP(3))).name == "msfp12"
    assert QConfig.only(weights=Int(4), attention=Int(8)).name == "weights=int4,attention=int8"


def test_with_bits_changes_the_width_of_every_format() -> None:
    config = QConfig(rounding="nearest", components={"weights": MSFP(3), "messages": None})
    wider = config.with_bits(6)
    assert wider == QConfig(6, rounding="nearest", components={"weights": MSFP(5), "messages": None})
    assert QConfig(fmt=FixedPoint(4)).with_bits(12).fmt == FixedPoint(12)
    assert QConfig.only(weights=FixedPoint(4)).with_bits(12) == QConfig.only(weights=FixedPoint(12))
    with pytest.raises(ValueError, match="'bits' from 2 to 8"):
        QConfig().with_bits(12)
    with pytest.raises(ValueError, match="mxfp4"):
        QConfig(fmt=MXFP4()).with_bits(6)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"bits": 1}, ValueError, r"'bits' from 2 to 8 \(got 1\)"),
        ({"bits": 16}, ValueError, r"'bits' from 2 to 8 \(got 16\); wider codes do not fit an int8 kernel"),
        ({"bits": 7.5}, TypeError, r"'bits' to be an int \(got float\)"),
        ({"bits": True}, TypeError, r"'bits' to be an int \(got bool\)"),
        ({"fmt": 8}, TypeError, r"'QConfig' expects 'fmt' to be a format of qgnn.formats, its name or None \(got 8\)"),
        ({"fmt": "mspf12"}, ValueError, r"'QConfig' expects 'fmt' to be .*: int2 to .*fp8-e5m2; did you mean 'msfp12'"),
        ({"fmt": Int}, TypeError, r"'fmt' to be a format of qgnn.formats"),
        ({"components": {"weight": Int(4)}}, ValueError, r"'components' among \('features', .* \(got 'weight'\)"),
        ({"components": {"weights": 4}}, TypeError, r"the component 'weights' to be .*, its name or None \(got 4\)"),
        ({"components": {"weights": "int16"}}, ValueError, r"'QConfig' expects the component 'weights' .* int2 to int"),
        ({"components": Int(4)}, TypeError, r"'components' to be a dict of formats by component \(got Int\("),
        ({"fmt": MSFP(3), "save": Blocks()}, ValueError, r"save='int8' or 'fp32' where operands have other formats"),
        *(
            ({"bits": bits, "fmt": Int(6)}, ValueError, rf"'QConfig' got bits={bits} and fmt=Int\(bits=6.*; give one ")
            for bits in (4, 8)
        ),
        ({"granularity": "column"}, ValueError, r"'granularity' to be one of \('row', 'tensor', 'block'\) \(got 'col"),
        ({"granularity": None}, ValueError, r"'granularity' to be one of .*\(got None\)"),
        ({"rounding": "up"}, ValueError, r"'rounding' to be one of \('stochastic', 'nearest'\) \(got 'up'\)"),
        ({"save": "fp16"}, ValueError, r"'save' to be one of \('int8', 'fp32'\) or qgnn.formats.Blocks \(got 'fp16'\)"),
        ({"save": Int(4)}, TypeError, r"'save' to be one of \('int8', 'fp32'\) or qgnn.formats.Blocks \(got Int\("),
        ({"save": Blocks}, TypeError, r"'save' to be one of .* \(got <class 'qgnn.formats.blocks.Blocks'>"),
        ({"save": None}, TypeError, r"'QConfig' expects 'save' to be one of .* \(got None\)"),
        ({"keep_fp32": "conv1"}, TypeError, r"'keep_fp32' to be a tuple of module names \(got 'conv1'\)"),
        ({"keep_fp32": (1, 2)}, TypeError, r"'keep_fp32' to be a tuple of module names \(got \(1, 2\)\)"),
        ({"keep_fp32": 3}, TypeError, r"'keep_fp32' to be a tuple of module names \(got 3\)"),
        ({"keep_fp32": None}, TypeError, r"'keep_fp32' to be a tuple of module names \(got None\)"),
        ({"block_size": 0}, ValueError, r"'block_size' to be a power of two from 2 to 65536 \(got 0\)"),
        ({"block_size": 1}, ValueError, r"\(got 1\)"),
        ({"block_size": -64}, ValueError, r"\(got -64\)"),
        ({"block_size": 100}, ValueError, r"'QConfig' expects 'block_size' to be a power of two .* \(got 100\)"),
        ({"block_size": 2**17}, ValueError, r"\(got 131072\)"),
        ({"block_size": 10**30}, ValueError, r"'block_size' to be a power of two"),
        ({"block_size": 64.0}, TypeError, r"'QConfig' expects 'block_size' to be an int \(got float\)"),
        ({"block_size": True}, TypeError, r"\(got bool\)"),
    ],
    ids=str,
)  # fmt: skip
def test_config_rejects(fields: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        QConfig(**fields)


@pytest.mark.parametrize("block_size", [2, 64, 65536])
def test_block_sizes_that_exist(block_size: int) -> None:
    assert QConfig(block_size=block_size).block_size == block_size


@pytest.mark.parametrize("check", [check_config, check_product_config])
def test_config_of_the_wrong_type(check) -> None:
    for config in (None, QConfig(), QConfig(granularity="tensor")):
        check(config, "QGCNConv")
    for wrong in (8, "int8", {"bits": 8}, QConfig, Int(8)):
        with pytest.raises(TypeError, match=r"'QGCNConv' expects 'config' to be a QConfig or None .*; write config"):
            check(wrong, "QGCNConv")


def test_products_take_no_blocks() -> None:
    check_config(QConfig(granularity="block"), "quantize")
    with pytest.raises(ValueError, match=r"'linear' expects granularity 'row' or 'tensor' \(got 'block'\); scales of"):
        check_product_config(QConfig(granularity="block"), "linear")


def test_a_config_is_a_plain_dataclass() -> None:
    config = QConfig(4, keep_fp32=("lin",))
    assert QConfig(**json.loads(json.dumps(asdict(config)))) == config

    @dataclass(frozen=True)
    class Named(QConfig):
        title: str = ""

    named = Named(components={"weights": "int4"}, title="mine")
    assert named.format_of("weights") == Int(4)
    assert replace(named, rounding="nearest").title == "mine"
    with pytest.raises(ValueError, match="expects 'bits' from 2 to 8"):
        Named(bits=9)
