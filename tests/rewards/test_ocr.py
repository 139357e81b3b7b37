"""The package's real weights read rendered text, without network access."""

import sys

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont

if sys.version_info >= (3, 13):
    pytest.skip("rapidocr-onnxruntime has no release for this Python", allow_module_level=True)

from sage_grpo.rewards.base import Setup
from sage_grpo.rewards.ocr import OcrReward, edit_distance, likeness, wanted_text


@pytest.fixture(scope="module")
def reward():
    return OcrReward(Setup(None, torch.device("cpu")))


def drawn(text):
    image = Image.new("RGB", (320, 96), "white")
    ImageDraw.Draw(image).text((24, 24), text, fill="black", font=ImageFont.load_default(40))
    return torch.from_numpy(np.array(image))


def clip(*texts):
    return torch.stack([drawn(text) for text in texts])


def test_exact_misspelled_and_blank(reward):
    """Two sampled frames each."""
    clips = [clip("OPEN DAILY", "OPEN DAILY"), clip("OPEM DAYLY", "OPEM DAYLY"), clip("", "")]
    scores = reward.score(clips, ['a sign that says "Open daily"'] * 3, 8.0)
    assert scores["ocr"].tolist() == pytest.approx([1.0, 1 - 2 / 9, 0.0])


def test_the_mean_over_frames_counts(reward):
    scores = reward.score([clip("OPEN", "")], ['"open"'], [8.0])
    assert scores["ocr"].tolist() == [0.5]


def test_wanted_text_may_stand_among_more(reward):
    assert reward.read(drawn("WE OPEN AT 9")) == "weopenat9"
    assert likeness("weopenat9", "open") == 1.0


def test_prompts_without_quoted_text_are_refused(reward):
    reward.check(['a "b" c'])
    assert wanted_text('a sign "Hello  World" and "more"') == "helloworld"
    for prompt in ("a sign", 'a "" sign', 'a " " sign', 'a "sign'):
        with pytest.raises(ValueError, match="no text in double quotes"):
            reward.check([prompt])


@pytest.mark.parametrize(
    "source, target, distance",
    [
        ("", "abc", 3),
        ("abc", "", 3),
        ("abc", "abc", 0),
        ("kitten", "sitting", 3),
        ("flaw", "lawn", 2),
        ("ab", "ba", 2),
    ],
)
def test_edit_distance(source, target, distance):
    assert edit_distance(source, target) == edit_distance(target, source) == distance


def test_more_letters_than_wanted_score_nothing_less_than_zero():
    assert likeness("something else entirely", "abc") == 0.0
    assert likeness("abd", "abc") == pytest.approx(2 / 3)
