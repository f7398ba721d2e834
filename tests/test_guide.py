"""The examples of README and of the guide run as they stand, pasted one behind the other."""

import re
from pathlib import Path

import pytest
import torch.distributed as dist

from house import ROOT

PAGES = ("README.md", *(path.relative_to(ROOT).as_posix() for path in sorted(ROOT.glob("docs/guide/*.md"))))
SEVERAL_PROCESSES = "<!-- example: partitioned -->"  # tests/partitioned.py runs what is behind it


def examples(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", text.split(SEVERAL_PROCESSES)[0], re.DOTALL | re.MULTILINE)


EXAMPLES = {page: found for page in PAGES if (found := examples((ROOT / page).read_text()))}


def test_pages_have_examples() -> None:
    assert set(EXAMPLES) == {
        "README.md",
        *(f"docs/guide/{name}.md" for name in ("batches", "compression", "formats", "layers", "processes")),
    }


@pytest.mark.parametrize("page", EXAMPLES)
def test_examples_of_a_page_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)  # as torchrun does
    names: dict[str, object] = {}
    try:
        for number, example in enumerate(EXAMPLES[page]):
            exec(compile(example, f"{page}, example {number}", "exec"), names)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
