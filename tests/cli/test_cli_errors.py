"""What the user can put right ends in one line on standard error and exit code 2, before anything is trained."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from qgnn.cli import main
from qgnn.cli import train as train_module
from qgnn.cli.measure import PeakMemory
from qgnn.data import DatasetError

Train = Callable[..., int]


@pytest.fixture(autouse=True)
def _never_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("trained although the arguments were wrong")

    monkeypatch.setattr(train_module, "train_run", fail)


def error_of(code: int, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on standard error of a command that ended with exit code 2."""
    out, err = capsys.readouterr()
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1, err
    assert err.startswith("qgnn")
    assert "error: " in err
    assert "Traceback" not in err
    return err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--precision", "int9"], "number format (got 'int9'): 'parse' expects int2 to int8"),
        (["--precision", "fp32,"], "--precision: expected fp32, bf16 or a number format (got '')"),
        (["--precision", "fp64"], "expected fp32, bf16 or a number format (got 'fp64'): 'parse' expects the name of a"),
        (["--precision", "int8:weight"], "'QConfig' expects 'components' among ('features', 'weights', "),
        (["--precision", "bf16:weights"], "expected a number format in front of the component 'weights' (got 'bf16"),
        (["--precision", "int8:weights:features"], "expected FORMAT, FORMAT:COMPONENT, FORMAT:SCHEDULE or all three"),
        (
            ["--precision", "int8:adq[8,2]"],
            "or adq[2,8] or plateau[2,8] from the smaller to the larger width (got 'adq",
        ),
        (["--precision", "mxfp4:sdq[4,8]"], "'mxfp4' has codes of 4 bits only (got 8)"),
        (["--precision", "fp32:sdq[2,4]"], "put a format such as int8 in place of fp32, or compress what is kept"),
        (
            ["--precision", "fp32:sdq[2,3]", "--compress", "int2"],
            "--compress int2: 'Blocks' expects 'bits' to be one of",
        ),
        (["--compress", "topk"], "--compress: expected none, or a format such as int2, int2-rp8 or int2-rp8-vm (got"),
        (["--compress", "none,"], "or a format such as int2, int2-rp8 or int2-rp8-vm (got '')"),
        (["--compress", "int2-vm-rp8"], "--compress: 'Blocks' expects a name such as 'int2', 'int4-vm' or 'int2-rp8"),
        (["--compress", "int3"], "--compress: 'Blocks' expects 'bits' to be one of (1, 2, 4, 8) (got 3)"),
        (["--compress", "int2,int8-vm"], "--compress: 'Blocks' expects bins='uniform' for 8-bit codes"),
        (["--epochs", "0"], "--epochs: expected a whole number from 1 to 2147483647 (got 0)"),
        (["--seeds", "0"], "--seeds: expected a whole number from 1 to 10000 (got 0)"),
        (["--layers", "0"], "--layers: expected a whole number from 1 to 1000 (got 0)"),
        (["--layers", "1001"], "--layers: expected a whole number from 1 to 1000 (got 1001)"),
        (["--hidden", "x"], "--hidden: expected a whole number from 1 to 2147483647 (got 'x')"),
        (["--hidden", "2147483648"], "--hidden: expected a whole number from 1 to 2147483647 (got 2147483648)"),
        (["--batch-size", f"{10**20}"], f"--batch-size: expected a whole number from 1 to 2147483647 (got {10**20})"),
        (["--fanout", f"5,{10**20}"], f"--fanout: expected whole numbers from 1 to 2147483647, or all (got {10**20})"),
        (["--seeds", "10001"], "--seeds: expected a whole number from 1 to 10000 (got 10001)"),
        (["--dropout", "1"], "--dropout: expected a number in [0, 1) (got 1.0)"),
        (["--lr", "0"], "--lr: expected a number in (0, 100] (got 0.0)"),
        (["--lr", "nan"], "--lr: expected a number in (0, 100] (got nan)"),
        (["--weight-decay", "-1"], "--weight-decay: expected a number in [0, 100] (got -1.0)"),
        (["--model", "mlp"], "--model: invalid choice: 'mlp'"),
        (["--device", "tpu"], "--device: invalid choice: 'tpu'"),
        (["--no-such-option"], "unrecognized arguments: --no-such-option"),
        (["--layers", "1", "--precision", "int8"], "int8 expects at least 2 layers (got 1), since the last"),
        (["--model", "gcn2", "--layers", "2", "--precision", "fp32"], "gcn2 expects at least 3 layers (got 2)"),
        (
            ["--precision", "int8:sdq[2,3,4,5,6]"],
            "expects at least 5 epochs, one a width (got 4); change --model, --pre",
        ),
        (
            ["--precision", "int8:attention"],
            "expects a component that the model has: of gcn with 2 layers, these are fe",
        ),
        (
            ["--seed", "18446744073709551615", "--seeds", "2"],
            "the last seed of --seed 18446744073709551615 --seeds 2: ",
        ),
        (["--seed", "18446744073709551616"], "--seed: expected a whole number from 0 to 18446744073709551615 (got 184"),
    ],
)
def test_a_bad_argument_is_one_line(
    qgnn_train: Train, capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str
) -> None:
    assert expected in error_of(qgnn_train(*arguments), capsys)


def test_heads_divide_the_width_before_data_are_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_module, "load", lambda *_: pytest.fail("loaded"))
    message = error_of(main(["train", "--model", "gat", "--hidden", "10"]), capsys)
    assert "the model gat expects a hidden width that is a multiple of 4, its number of heads (got 10)" in message


def test_a_missing_command_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert "{train,sweep,info}" in error_of(main([]), capsys)


def test_an_unknown_data_set_lists_the_names(capsys: pytest.CaptureFixture[str]) -> None:
    message = error_of(main(["train", "--dataset", "coraa"]), capsys)
    assert "did you mean 'cora'?" in message
    assert "ogbn-arxiv" in message


def test_missing_files_without_a_network_name_the_folder(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("Network is unreachable")

    monkeypatch.setattr("socket.create_connection", refuse)
    monkeypatch.setattr("urllib.request.getproxies", dict)
    message = error_of(main(["train", "--dataset", "cora", "--root", str(tmp_path)]), capsys)
    assert str(tmp_path / "Planetoid" / "Cora" / "raw") in message
    assert "Network is unreachable" in message


def test_a_message_of_several_lines_becomes_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise DatasetError("first\nsecond")

    monkeypatch.setattr(train_module, "load", fail)
    assert "first second" in error_of(main(["train"]), capsys)


def test_cuda_without_a_gpu_says_what_to_do(
    qgnn_train: Train, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "--device cuda expects a GPU" in error_of(qgnn_train("--device", "cuda"), capsys)
    assert train_module.pick_device(None).type == "cpu"


@pytest.mark.parametrize("flag", ["--json", "--plot"])
@pytest.mark.parametrize("name", ["no/such/folder/out.png", "."])
def test_an_unwritable_file_is_found_before_training(
    qgnn_train: Train, capsys: pytest.CaptureFixture[str], tmp_path: Path, flag: str, name: str
) -> None:
    message = error_of(qgnn_train(flag, str(tmp_path / name)), capsys)
    assert f"{flag} expects a file that can be written" in message
    assert list(tmp_path.iterdir()) == []


def test_checking_a_file_leaves_it_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "there.json").write_text("old")
    train_module.check_writable("--json", tmp_path / "there.json")
    train_module.check_writable("--json", tmp_path / "new.json")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("there.json", "old")]


def test_plot_without_matplotlib_says_how_to_get_it(
    qgnn_train: Train, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "pip install matplotlib" in error_of(qgnn_train("--plot", str(tmp_path / "a.png")), capsys)


def test_plot_of_an_unknown_format_lists_the_formats(
    qgnn_train: Train, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    message = error_of(qgnn_train("--plot", str(tmp_path / "a.xyz")), capsys)
    assert "png" in message
    assert "svg" in message


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory.\nlong text"),
        RuntimeError("Storage size calculation overflowed with sizes=[2147483647, 2147483647]"),
    ],
)
def test_out_of_memory_says_what_to_do(
    qgnn_train: Train, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(train_module, "train_run", fail)
    assert "not enough memory on cpu" in error_of(qgnn_train(), capsys)


def test_ctrl_c_exits_130_without_traceback(
    qgnn_train: Train, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(train_module, "train_run", interrupt)
    assert qgnn_train() == 130
    assert capsys.readouterr() == ("", "qgnn train: interrupted\n")


def test_an_error_of_our_own_is_not_hidden(qgnn_train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line is for what the user can put right; a bug keeps its traceback."""

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(train_module, "train_run", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        qgnn_train()


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["--version"]])
def test_help_and_version_exit_with_0(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert main(arguments) == 0
    assert "qgnn" in capsys.readouterr().out


def test_peak_is_unknown_where_the_mark_cannot_be_reset(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(PeakMemory, "CLEAR", tmp_path / "missing" / "clear_refs")
    peak = PeakMemory(torch.device("cpu"))
    peak.start()
    assert peak.mib is None


def test_a_file_name_that_no_system_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = error_of(main(["train", "--json", str(tmp_path / ("x" * 300))]), capsys)
    assert "--json expects a file that can be written" in message


def test_a_root_in_the_home_of_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    message = error_of(main(["train", "--dataset", "cora", "--root", "~no-such-user/data"]), capsys)
    assert "--root expects a folder that can be read (got '~no-such-user/data'" in message


def test_no_memory_on_a_cpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """torch has no error type of its own for it; other errors of the same type keep their traceback."""
    texts = iter(["DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes", "something else"])

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError(next(texts))

    monkeypatch.setattr(train_module, "train_run", fail)
    arguments = ["train", "--device", "cpu"]
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert "not enough memory on cpu to train on wordnet" in err
    assert "--device cpu" not in err
    with pytest.raises(RuntimeError, match="something else"):
        main(arguments)


def test_a_gpu_without_triton(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(train_module.importlib.util, "find_spec", lambda _: None)
    assert "pip install triton, or give --device cpu" in error_of(main(["train"]), capsys)
