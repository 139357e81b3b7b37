"""Rewards by name: the table is fixed and cheap to import, each entry finds its weights; and rewards in files."""

import re
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch

from sage_grpo.data.requests import Request
from sage_grpo.plugins import trust
from sage_grpo.rewards.base import Composite, Setup
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
    assert "torch" in loaded
    assert not loaded & {"transformers", "accelerate", "rapidocr_onnxruntime", "cv2"}


def test_a_name_and_its_alias_build_the_reward_with_its_setup(videoalign_folders):
    setup = Setup(videoalign_folders["VideoReward"], CPU, sample_fps=3.0)
    ((name, reward),) = build_rewards(["videoalign_local"], setup).items()
    assert name == "videoalign"
    assert isinstance(reward, VideoAlign)
    assert reward.sample_fps == 3.0
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
    section = text.partition("## From Python")[2]
    (block,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    file = tmp_path / "example.py"
    file.write_text(block)
    monkeypatch.setattr("sage_grpo.rewards.build.REWARDS", dict(REWARDS))
    spec = spec_from_file_location("example", file)
    spec.loader.exec_module(module_from_spec(spec))


def test_the_documentation_names_every_reward():
    text = (ROOT / "docs" / "rewards.md").read_text()
    # rows of the package are strings; studies add others to the table
    names = [name for name, place in REWARDS.items() if isinstance(place, str)]
    assert names
    assert not [name for name in names if f"| `{name}` |" not in text]


FILE = """
def of_request(clips, requests, fps):
    return [float(isinstance(request, str)) for request in requests]

def of_prompt(clips, prompts):
    return [float(isinstance(prompt, str)) for prompt in prompts]

class OfClips:
    def __init__(self, setup):
        self.device = setup.device

    def score(self, clips):
        return [float(len(clip)) for clip in clips]
"""


def test_a_reward_in_a_file_is_given_what_its_parameters_name(tmp_path):
    (tmp_path / "mine.py").write_text(FILE)
    names = [f"{tmp_path}/mine.py:{name}" for name in ("of_request", "of_prompt", "OfClips")]
    trust(*names)
    rewards = build_rewards(names, Setup(tmp_path, CPU))
    clips = [torch.zeros(length, 2, 2, 3, dtype=torch.uint8) for length in (3, 5)]
    scores = Composite(rewards, None).score(clips, [Request("a boat"), "a boat"], 8.0)
    assert not scores.errors
    assert {name: values.tolist() for name, values in scores.named.items()} == {
        "of_request.of_request": [0.0, 0.0],
        "of_prompt.of_prompt": [1.0, 1.0],
        "OfClips.OfClips": [3.0, 5.0],
    }


def file_rewards(folder, code):
    """The reward `mine` that this code of a file defines, after it was trusted."""
    (folder / "mine.py").write_text(code)
    name = f"{folder}/mine.py:mine"
    trust(name)
    return build_rewards([name], Setup(folder, CPU))


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ("clips, prompts", "clips prompts"),
        ("clips, prompts, fps", "clips prompts fps"),
        ("a, b, fps", "clips prompts fps"),
        ("clips, prompts, /, fps", "clips prompts fps"),
        ("clips, fps", "clips fps"),
        ("clips", "clips"),
        ("clips, requests, *, fps", "clips prompts fps"),
        ("clips, prompts, threshold=0.5", "clips prompts 0.5"),
        ("clips, prompts, threshold=0.5, fps=30", "clips prompts 0.5 fps"),
        ("clips, prompts, *, device='cpu', **more", "clips prompts cpu {}"),
    ],
)
def test_a_parameter_with_a_default_is_not_given_the_fps(tmp_path, parameters, expected):
    names = re.findall(r"(\w+)(?:=[^,]*)?(?:,|$)", parameters)
    code = f"def mine({parameters}):\n    seen.append(({', '.join(names)},))\n    return [0.0]\nseen = []\n"
    (reward,) = file_rewards(tmp_path, code).values()
    request = Request("p") if reward.sees_requests else "p"
    clips = [torch.zeros(2, 2, 2, 3, dtype=torch.uint8)]
    reward.score(clips, [request], 8.0)
    (seen,) = sys.modules["plugin_mine"].seen
    shown = {id(clips): "clips", str([request]): "prompts", "8.0": "fps"}
    assert " ".join(shown.get(id(v), shown.get(str(v), str(v))) for v in seen) == expected


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def mine(clips, prompts, fps, model): pass", "needs model, .* give model a default"),
        (
            "def mine(clips, prompts, threshold): pass",
            "needs threshold, .* give threshold a default",
        ),
        ("def mine(clips, prompts, *, device): pass", "needs device, .* give device a default"),
        ("def mine(*all, **more): pass", "has no parameter for the clips"),
        ("class mine:\n names = 'VQ'\n def score(self, clips): pass", r"write names = \('VQ',\)"),
    ],
)
def test_a_reward_in_a_file_that_cannot_be_called_is_one_sentence(tmp_path, code, words):
    with pytest.raises(ValueError, match=words):
        file_rewards(tmp_path, code)


def test_a_reward_that_returns_nothing_says_so(tmp_path):
    reward = Composite(file_rewards(tmp_path, "def mine(clips, prompts): pass"), None)
    scores = reward.score([torch.zeros(2, 2, 2, 3, dtype=torch.uint8)], ["p"], 8.0)
    assert "it returned None; return a number for each clip" in scores.errors[0]


def test_plain_values_are_those_of_one_score(tmp_path):
    code = "class mine:\n names = ('p', 'q')\n def score(self, clips): return [0.0] * len(clips)\n"
    reward = Composite(file_rewards(tmp_path, code), None)
    scores = reward.score([torch.zeros(2, 2, 2, 3, dtype=torch.uint8)], ["p"], 8.0)
    assert scores.total.isnan().all()
    assert "no dictionary of its scores p, q" in scores.errors[0]
