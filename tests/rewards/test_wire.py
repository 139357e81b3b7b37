"""Messages of the reward server: what goes in comes out, and nothing else gets through."""

import json

import pytest
import torch

from sage_grpo.environment import TOKEN_VARIABLE
from sage_grpo.rewards.client import RemoteError, read_token
from sage_grpo.rewards.remote import MAX_HEADER, pack
from scripts.reward_server import TooMuch, unpack

CLIPS = [torch.randint(0, 256, shape, dtype=torch.uint8) for shape in ((3, 4, 5, 3), (1, 2, 2, 3))]
PROMPTS = ['a "red"\ncircle 🙂', "\u202eright to left\0"]


def message(clips=CLIPS, prompts=PROMPTS, fps=8.0):
    return bytearray(b"".join(pack(clips, prompts, fps)))


def spoilt(**changes):
    header = {"fps": 8, "prompts": ["a"], "shapes": [[1, 1, 1]]} | changes
    given = {key: value for key, value in header.items() if value is not ...}
    return bytearray(json.dumps(given).encode() + b"\n123")


def test_what_goes_in_comes_out():
    clips, prompts, fps = unpack(message(), 2)
    assert all(map(torch.equal, clips, CLIPS))
    assert prompts == PROMPTS
    assert fps == 8.0
    strided = CLIPS[0].flip(1).transpose(0, 1)
    assert torch.equal(unpack(message([strided], ["a"]), 1)[0][0], strided)


@pytest.mark.parametrize(
    "body, words",
    [
        (b"", "no line of JSON"),
        (b"{" * 20, "no line of JSON"),
        (b" " * (MAX_HEADER + 1) + b"\n", "no line of JSON"),
        (b"[" * 100_000 + b"\n", "not JSON"),
        (b"\x80\x04K\x01.\n", "not JSON"),
        (b"[]\n", "must be an object with the keys fps, prompts, shapes"),
        (spoilt(fps=...), "must be an object"),
        (spoilt(code="x"), "must be an object"),
        (spoilt(fps=0), "fps is 0"),
        (spoilt(fps=True), "fps is True"),
        (spoilt(fps=10**400), "fps is 1000"),
        (spoilt(fps=float("nan")), "fps is nan"),
        (spoilt(prompts=[], shapes=[]), "at least one"),
        (spoilt(prompts=["a", "b"]), "one entry for each clip"),
        (spoilt(prompts="a"), "one entry for each clip"),
        (spoilt(prompts=[1]), "a prompt must be text"),
        (spoilt(shapes=[[1, 1]]), "three whole numbers"),
        (spoilt(shapes=[[1, 1, -1]]), "three whole numbers"),
        (spoilt(shapes=[[True, 1, 1]]), "three whole numbers"),
        (spoilt(shapes=[[1, 1, 2]]), "need 6 bytes, but 3 came"),
        (spoilt() + b"4", "need 3 bytes, but 4 came"),
        (spoilt(shapes=[[2**62, 2**62, 1]]), "but 3 came"),
    ],
)
def test_what_is_wrong_is_refused(body, words):
    with pytest.raises(RemoteError, match=words):
        unpack(bytearray(body), 4)


def test_limits():
    with pytest.raises(TooMuch, match="2 clips in one request; at most 1"):
        unpack(message(), 1)
    with pytest.raises(RemoteError, match="the prompts take"):
        pack(CLIPS[:1], ["a" * MAX_HEADER], 8.0)
    for clip in (CLIPS[0].float(), CLIPS[0][0], CLIPS[0][..., :2]):
        with pytest.raises(ValueError, match="must be uint8"):
            pack([clip], ["a"], 8.0)


@pytest.mark.parametrize(
    "token, words", [(None, "is not set"), ("short-secret", "does not"), ("line\n" * 9, "does not")]
)
def test_a_token_that_is_none_is_refused_without_being_shown(monkeypatch, token, words):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    if token:
        monkeypatch.setenv(TOKEN_VARIABLE, token)
    with pytest.raises(RemoteError, match=f"{TOKEN_VARIABLE} {words}") as caught:
        read_token()
    assert "secret" not in str(caught.value)
    assert "line" not in str(caught.value)
