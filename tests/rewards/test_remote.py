"""The reward server's client: good responses, and every way a server can misbehave."""

import json
import math
import re
import socket
import sys
import time
from contextlib import suppress

import pytest
import torch

import post_train
from sage_grpo import installed
from sage_grpo.environment import HOSTS_VARIABLE, TOKEN_VARIABLE
from sage_grpo.rewards import client
from sage_grpo.rewards.base import Setup
from sage_grpo.rewards.build import build_reward
from sage_grpo.rewards.client import RemoteError
from tests.rewards.serving import INFO, TOKEN, Light, answering, composite, remote_reward, serving

CLIPS = [torch.full((2, 4, 4, 3), value, dtype=torch.uint8) for value in (10, 20, 30)]
PROMPTS = ["a", "bb", "ccc"]


@pytest.fixture(autouse=True)
def token(monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    monkeypatch.setattr(client, "PAUSES", (0.01, 0.01))


def replies(answer):
    """A server that introduces itself well and answers everything else with `answer`."""
    return answering(
        lambda handler: handler.say(200, INFO) if handler.path == "/info" else answer(handler)
    )


def scored(answer, timeout=5.0):
    """The light of CLIPS as the server gives it, and how often it was asked."""
    with replies(answer) as (url, asked):
        reward = remote_reward(url, timeout)
        try:
            return reward.score(CLIPS, PROMPTS, 8.0)["light"].tolist()
        finally:
            scored.times = len(asked) - 1


def test_scores_come_back_under_their_names(tmp_path):
    with serving(composite({"light": Light()})) as url:
        reward = build_reward("remote", Setup(tmp_path, torch.device("cpu"), url=url))
        assert reward.names == ("light", "words")
        scores = reward.score(CLIPS, PROMPTS, 8.0)
        assert scores["light"].tolist() == [10, 20, 30]
        assert scores["words"].tolist() == [1, 2, 3]
        reward.check(["a"])
        with pytest.raises(
            RemoteError, match=r"refused \(422\): the prompt 'dark' cannot be scored"
        ):
            reward.check(["a", "dark"])


def test_without_its_package_a_remote_reward_says_so(monkeypatch):
    """The package is not among those that every program needs."""
    monkeypatch.setitem(sys.modules, "httpx2", None)
    with pytest.raises(RemoteError, match="with httpx2, which is missing"):
        remote_reward("http://127.0.0.1:9")
    assert "httpx2" not in installed.PACKAGES


def test_several_rewards_keep_their_names_apart():
    with serving(composite({"one": Light(), "two": Light()})) as url:
        scores = remote_reward(url).score(CLIPS, PROMPTS, 8.0)
        assert list(scores) == ["one.light", "one.words", "two.light", "two.words"]
        assert scores["two.light"].tolist() == [10, 20, 30]


def test_clips_are_sent_in_chunks_of_a_known_total(monkeypatch):
    monkeypatch.setattr(client, "MAX_CHUNK", 10)
    with serving(composite({"light": Light()})) as url:
        assert remote_reward(url).score(CLIPS, PROMPTS, 8.0)["light"].tolist() == [10, 20, 30]
    seen = {}

    def answer(handler):
        seen.update(handler.headers)
        handler.say(200, {"scores": {"light": [1, 2, 3]}, "errors": []})

    assert scored(answer) == [1, 2, 3]
    assert int(seen["Content-Length"]) > 3 * CLIPS[0].numel()
    assert "Transfer-Encoding" not in seen
    assert seen["Authorization"] == f"Bearer {TOKEN}"
    assert seen["Accept-Encoding"] == "identity"


def test_proxies_of_the_environment_are_ignored(monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    answer = {"scores": {"light": [1, 2, 3]}, "errors": []}
    assert scored(lambda handler: handler.say(200, answer)) == [1, 2, 3]


def test_a_wrong_token_is_an_error_that_does_not_show_it(monkeypatch):
    with serving(composite({"light": Light()})) as url:
        monkeypatch.setenv(TOKEN_VARIABLE, "another-token-0123456789")
        with pytest.raises(
            RemoteError, match=r"refused \(401\): the token is missing or wrong"
        ) as caught:
            remote_reward(url)
    assert TOKEN not in str(caught.value)
    assert "another" not in str(caught.value)


def test_more_than_the_server_takes_is_not_sent():
    with serving(composite({"light": Light()})) as url:
        reward = remote_reward(url)
        reward.max_clips = 2
        with pytest.raises(RemoteError, match=r"3 clips .* lower reward_batch_size"):
            reward.score(CLIPS, PROMPTS, 8.0)
        reward.max_clips = 3
        reward.max_bytes = 100
        with pytest.raises(RemoteError, match=r"more than .* 100 bytes"):
            reward.score(CLIPS, PROMPTS, 8.0)


@pytest.mark.parametrize("body", [b'{"scores": {"light": [1, NaN, null]}, "errors": []}'])
def test_what_is_no_number_is_nan(body):
    first, *rest = scored(lambda handler: handler.say(200, body))
    assert first == 1
    assert all(map(math.isnan, rest))


@pytest.mark.parametrize(
    "value, words",
    [
        (
            {"scores": {"light": [1, 2]}, "errors": []},
            "returned 2 values for light; expected 3, one per clip",
        ),
        ({"scores": {"dim": [1, 2, 3]}, "errors": []}, "returned no values for light; expected 3"),
        (
            {"scores": {"light": [1, "2", 3]}, "errors": []},
            "a value for light that is not a number",
        ),
        (
            {"scores": {"light": [1, True, 3]}, "errors": []},
            "a value for light that is not a number",
        ),
        ({"scores": [1, 2, 3], "errors": []}, "no scores and errors"),
        (
            {"scores": {"light": [None] * 3}, "errors": ["out of memory\nat line 3"]},
            "out of memory at line 3",
        ),
        ([1, 2, 3], "refused"),
        (b"pickle", "without JSON"),
        (b"1" * 200, "more than 100 bytes"),
    ],
)
def test_answers_that_are_none(monkeypatch, value, words):
    monkeypatch.setattr(client, "MAX_ANSWER", 100)
    with pytest.raises(RemoteError, match=words):
        scored(lambda handler: handler.say(200, value))
    assert scored.times == 1


def test_a_redirect_is_not_followed():
    with replies(lambda handler: handler.say(200, {})) as (elsewhere, reached):
        with pytest.raises(RemoteError, match=r"a redirect \(307\), which is not followed"):
            scored(lambda handler: handler.say(307, {}, Location=f"{elsewhere}/score"))
        assert not reached
        assert scored.times == 1


def test_a_slow_server_is_a_timeout_and_not_asked_again():
    with pytest.raises(TimeoutError, match=r"did not answer within 0.2 s"):
        scored(lambda handler: time.sleep(0.6), timeout=0.2)
    assert scored.times == 1


def test_the_other_batches_of_a_slow_server_are_not_tried():
    with replies(lambda handler: time.sleep(0.6)) as (url, asked):
        reward = composite({"b": remote_reward(url, timeout=0.2)}, batch_size=1)
        scores = reward.score(CLIPS, PROMPTS, 8.0)
    assert scores.total.isnan().all()
    assert asked == ["/info", "/score"]


def test_a_full_queue_is_asked_again_and_not_for_ever():
    left = [503, 503]

    def busy(handler):
        if left:
            handler.say(left.pop(), {})
        else:
            handler.say(200, {"scores": {"light": [1, 2, 3]}, "errors": []})

    assert scored(busy) == [1, 2, 3]
    assert scored.times == 3
    with pytest.raises(RemoteError, match=r"3 times in a row \(it answered 503\)"):
        scored(lambda handler: handler.say(503, {}))
    assert scored.times == 3


def hang_up(handler):
    handler.connection.shutdown(socket.SHUT_RDWR)


def break_off(handler):
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"scores"')


@pytest.mark.parametrize("dies", [hang_up, break_off])
def test_a_server_that_dies_is_asked_again_and_not_for_ever(dies):
    with pytest.raises(RemoteError, match=r"3 times in a row .*reward_server\.py running there"):
        scored(dies)
    assert scored.times == 3


def test_a_server_that_is_not_there():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(
        RemoteError,
        match=rf"remote_reward_url {re.escape(url)} .*ConnectError: .*Connection refused",
    ):
        remote_reward(url)


def drip(handler):
    """A good answer, one byte at a time, each of them well in time."""
    handler.send_response(200)
    handler.end_headers()
    with suppress(OSError):
        for letter in json.dumps(INFO):
            handler.wfile.write(letter.encode())
            time.sleep(0.05)


def drip_header(handler):
    with suppress(OSError):
        for _ in range(60):
            handler.wfile.write(b"x")
            time.sleep(0.05)


@pytest.mark.parametrize("slow", [drip, drip_header])
def test_a_server_that_drips_is_ended_by_the_deadline_of_the_start(slow):
    with (
        answering(slow) as (url, _),
        pytest.raises(RemoteError, match=r"cannot be used: no answer within 0\.3 s"),
    ):
        remote_reward(url, timeout=30, start_timeout=0.3)

    def slow_check(handler):
        return handler.say(200, INFO) if handler.path == "/info" else slow(handler)

    with answering(slow_check) as (url, _):
        reward = remote_reward(url, timeout=30, start_timeout=0.5)
        with pytest.raises(RemoteError, match=r"no answer within 0\.5 s"):
            reward.check(["a"])


def test_the_token_is_not_sent_where_only_a_file_says_so(
    tiny_folder, tmp_path, monkeypatch, capsys
):
    monkeypatch.delenv(HOSTS_VARIABLE, raising=False)
    config = tmp_path / "config.yaml"
    with answering(lambda handler: handler.say(500, {"error": "seen"})) as (url, asked):
        values = {
            "reward_model": "remote",
            "remote_reward_url": url,
            "batch_size": 4,
            "output_dir": tmp_path / "run",
            "pretrained_model_root": tiny_folder,
            "train_prompts": tmp_path / "prompts.txt",
        }
        config.write_text("".join(f"{name}: {value}\n" for name, value in values.items()))
        (tmp_path / "prompts.txt").write_text("a red circle\n")
        assert post_train.main(["--config", str(config)]) == 2
        assert not asked
        remedy = f"set {HOSTS_VARIABLE}={url.removeprefix('http://')}"
        assert remedy in capsys.readouterr().err

        monkeypatch.setenv(HOSTS_VARIABLE, "127.0.0.1")
        assert post_train.main(["--config", str(config)]) == 2
        assert asked == ["/info"]
        assert "refused (500): seen" in capsys.readouterr().err


def test_something_else_is_no_reward_server():
    with (
        answering(lambda handler: handler.say(200, {"hello": 1})) as (url, _),
        pytest.raises(RemoteError, match="is not a reward server"),
    ):
        remote_reward(url)
    with (
        answering(lambda handler: time.sleep(0.5)) as (url, _),
        pytest.raises(RemoteError, match=r"within 0\.1 s"),
    ):
        remote_reward(url, timeout=0.1)


def test_an_address_with_control_characters():
    with pytest.raises(
        RemoteError, match=r"remote_reward_url is 'http://h\\x01'; Invalid non-printable"
    ):
        remote_reward("http://h\x01")


@pytest.mark.parametrize(
    "url", ["ftp://host", "host:80", "http://", "http://h:port", "http://h/?a=1", "http://h:0"]
)
def test_an_address_that_is_none(url):
    with pytest.raises(RemoteError, match="write http://HOST:PORT"):
        remote_reward(url)


def test_a_password_in_the_address_is_refused_and_not_repeated():
    with pytest.raises(RemoteError, match="holds a user name or password") as caught:
        remote_reward("http://me:hunter2@host:8900")
    assert "hunter2" not in str(caught.value)


def test_without_an_address_there_is_no_remote_reward(tmp_path):
    with pytest.raises(ValueError, match="give --remote_reward_url"):
        build_reward("remote", Setup(tmp_path, torch.device("cpu")))


@pytest.mark.parametrize("names", [[], [5], [["light"]]])
def test_a_server_must_name_its_scores(names):
    def answer(handler):
        handler.say(200, INFO | {"names": names})

    with answering(answer) as (url, _), pytest.raises(RemoteError, match="names its scores"):
        remote_reward(url, 5.0)
