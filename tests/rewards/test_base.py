"""The table of rewards: fixed, cheap to import, and each entry finds its weights."""

import re
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch

from sage_grpo.rewards.base import Setup
from sage_grpo.rewards.build import build_reward, build_rewards
from sage_grpo.rewards.registry import REWARDS
from sage_grpo.rewards.videoalign.reward import VideoAlign

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


def test_the_table_is_imported_without_any_model():
    code = "import sys, sage_grpo.rewards.base; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    assert "torch" in loaded and not loaded & {
        "transformers",
        "accelerate",
        "rapidocr_onnxruntime",
        "cv2",
    }


def test_a_name_and_its_alias_build_the_reward_with_its_setup(videoalign_folders):
    setup = Setup(videoalign_folders["VideoReward"], CPU, sample_fps=3.0)
    ((name, reward),) = build_rewards(["videoalign_local"], setup).items()
    assert name == "videoalign" and isinstance(reward, VideoAlign) and reward.sample_fps == 3.0
    assert reward.model.dtype == torch.float32


def test_models_are_bf16_on_an_accelerator():
    assert Setup(Path("x"), torch.device("cuda")).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "name, folder", [("clipscore", "clip-vit-large-patch14"), ("pickscore", "PickScore_v1")]
)
def test_other_weights_lie_beside_those_of_videoalign(tmp_path, name, folder):
    with pytest.raises(FileNotFoundError, match=str(tmp_path / folder)):
        build_reward(name, Setup(tmp_path / "VideoReward", CPU))


def test_a_name_outside_the_table_is_refused(tmp_path):
    with pytest.raises(ValueError, match=f"'os.system'; choose one of {', '.join(REWARDS)}"):
        build_reward("os.system", Setup(tmp_path, CPU))


def test_a_missing_package_is_named_with_its_remedy(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "rapidocr_onnxruntime", None)
    monkeypatch.delitem(sys.modules, "sage_grpo.rewards.ocr", raising=False)
    with pytest.raises(ValueError, match=r"pip install --no-deps -r requirements-ocr.txt"):
        build_reward("ocr", Setup(tmp_path, CPU))


def test_the_example_of_the_documentation_runs(tmp_path, monkeypatch):
    text = (ROOT / "docs" / "rewards.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    file = tmp_path / "example.py"
    file.write_text(block)
    monkeypatch.setattr("sage_grpo.rewards.build.REWARDS", dict(REWARDS))
    spec = spec_from_file_location("example", file)
    spec.loader.exec_module(module_from_spec(spec))


def test_the_documentation_names_every_reward():
    text = (ROOT / "docs" / "rewards.md").read_text()
    assert not [name for name in REWARDS if f"| `{name}` |" not in text]
