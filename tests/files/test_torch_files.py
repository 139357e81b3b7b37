"""Published torch files become safetensors with the same numbers; anything but plain tensors is rejected."""

import hashlib
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from sage_grpo.files.torch_files import convert
from tests.hostile import write_bomb

FOLDER = Path(__file__).parents[1] / "fixtures" / "videoalign"


@pytest.mark.parametrize("name", ["VideoReward", "VideoReward_split"])
def test_the_numbers_stay_and_the_source_is_recorded(tmp_path, name):
    folder = shutil.copytree(FOLDER / name, tmp_path / name)
    (source,) = folder.glob("checkpoint-*/*.pth")
    target = source.with_suffix(".safetensors")
    source.with_suffix(".tmp").write_text("precious")
    assert convert(source).startswith(f"wrote {target}")
    assert convert(source) == f"{target} is up to date"

    before = torch.load(source, weights_only=True)
    after = load_file(target)
    assert before.keys() == after.keys()
    for key, value in after.items():
        assert before[key].dtype == value.dtype
        assert torch.equal(before[key], value)

    with safe_open(target, "pt") as file:
        digest = hashlib.sha256(source.read_bytes()).hexdigest()
        assert file.metadata() == {"format": "pt", "source": source.name, "source_sha256": digest}
    assert [path.read_text() for path in source.parent.glob("*.tmp")] == ["precious"]


def test_code_in_a_file_is_not_run(tmp_path):
    trace = tmp_path / "trace"
    source = write_bomb(tmp_path / "model.pth", trace)
    with pytest.raises(
        ValueError, match=rf"{source} is damaged or holds more than tensors"
    ) as caught:
        convert(source)
    assert "\n" not in str(caught.value)
    assert not trace.exists()
    assert not source.with_suffix(".safetensors").exists()


def test_a_damaged_file_is_named(tmp_path):
    source = tmp_path / "model.pth"
    published = FOLDER / "VideoReward" / "checkpoint-11352" / "model.pth"
    source.write_bytes(published.read_bytes()[:1000])
    with pytest.raises(ValueError, match=f"{source} is damaged"):
        convert(source)
