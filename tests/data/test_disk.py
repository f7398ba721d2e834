"""Files that are read whole or not at all."""

import io

import pytest
import torch

from qgnn.data.disk import load_whole


@pytest.mark.parametrize("mask", [0x10, 0xFF])  # 0x10: the mark of a folder
def test_a_byte_that_is_damaged_is_found_or_changes_nothing(mask: int) -> None:
    """Wherever it is: in a tensor, in what describes it, or in the archive around both."""
    file = io.BytesIO()
    x = torch.arange(-6.0, 6.0).view(4, 3)
    torch.save({"x": x, "name": "x"}, file)
    content, messages = file.getvalue(), []
    for place, byte in enumerate(content):
        damaged = content[:place] + bytes([byte ^ mask]) + content[place + 1 :]
        try:
            read = load_whole(io.BytesIO(damaged))
        except ValueError as error:
            messages.append(str(error))
        else:
            assert read["name"] == "x", place
            assert torch.equal(read["x"], x), place
    assert len(messages) > len(content) // 4
    assert not any("\n" in message for message in messages)
