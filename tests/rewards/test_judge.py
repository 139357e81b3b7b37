"""The judge against a real HTTP server that speaks OpenAI's protocol, and every way such a server can fail."""

import base64
import io
import json
import math
import re
import socket
import threading
import time

import numpy as np
import pytest
import torch
from PIL import Image

import post_train
from sage_grpo.config.fields import Config
from sage_grpo.config.parse import parse
from sage_grpo.environment import HOSTS_VARIABLE, TOKEN_VARIABLE
from sage_grpo.rewards import client, judge
from sage_grpo.rewards.base import Composite, Setup
from sage_grpo.rewards.client import RemoteError
from sage_grpo.rewards.judge import RUBRIC, Judge, expected_digit, read_rubric
from sage_grpo.train.inputs import build_composite
from tests.rewards.serving import TOKEN, answering

CLIPS = [torch.full((8, 6, 10, 3), 50 * i, dtype=torch.uint8) for i in (1, 2, 3)]
PROMPTS = ["a cat {jumps}", 'a dog, "slowly"', "третий"]
JSON_RUBRIC = "answer: json\nWatch {prompt}.\n## TA\nIs it there?\n## look\nIs it nice?\n"


@pytest.fixture(autouse=True)
def token(monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    monkeypatch.setattr(client, "PAUSES", (0.01, 0.01))


def images_of(question):
    """The images of a request, as arrays."""
    images = []
    for part in question["messages"][0]["content"]:
        if part["type"] == "image_url":
            kind, _, data = part["image_url"]["url"].partition(",")
            assert kind == "data:image/png;base64"
            images.append(np.asarray(Image.open(io.BytesIO(base64.b64decode(data)))))
    return images


def text_of(question):
    (part,) = [part for part in question["messages"][0]["content"] if part["type"] == "text"]
    return part["text"]


def tokens_of(scores, sharpness):
    """An answer's tokens as a server gives them: at each digit, the alternatives and their log-probabilities."""
    tokens = []
    for piece in re.findall(r"\d|\D+", json.dumps(scores)):
        likely = {piece: -0.01, "x": -5.0}
        if piece.isdecimal():
            weights = {d: math.exp(-sharpness * abs(d - int(piece))) for d in range(10)}
            likely = {
                str(d): math.log(0.5 * weight / sum(weights.values()))
                for d, weight in weights.items()
            }
            likely |= {f" {piece}": math.log(0.1), "<|im_end|>": -9999.0}
        top = [{"token": token, "logprob": value, "bytes": None} for token, value in likely.items()]
        tokens.append(
            {"token": piece, "logprob": likely[piece], "bytes": None, "top_logprobs": top}
        )
    return tokens


def answer_to(question, sharpness=2.0, scores=None):
    """A server's answer: each score is 1 to 4 by how bright the images are."""
    names = list(question["response_format"]["json_schema"]["schema"]["properties"])
    brightness = int(np.mean(images_of(question)) // 50)
    if scores is None:
        scores = dict.fromkeys(names, 1 + brightness)
    logprobs = None
    if question.get("logprobs"):
        logprobs = {"content": tokens_of(scores, sharpness)}
    choice = {
        "index": 0,
        "finish_reason": "stop",
        "message": {"role": "assistant", "content": json.dumps(scores)},
        "logprobs": logprobs,
    }
    return {
        "choices": [choice],
        "usage": {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120},
    }


def vlm(reply=None, models=("vlm",)):
    """A server of such models; `reply(handler, question)` answers instead of it if it returns True."""

    def answer(handler):
        if handler.headers["Authorization"] != f"Bearer {TOKEN}":
            return handler.say(401, {"error": {"message": "Unauthorized"}})
        if handler.path == "/v1/models":
            listed = [{"id": name, "object": "model"} for name in models]
            return handler.say(200, {"object": "list", "data": listed})
        assert (handler.path, handler.command) == ("/v1/chat/completions", "POST")
        assert handler.headers["Content-Type"] == "application/json"
        question = json.loads(handler.body)
        return (reply and reply(handler, question)) or handler.say(200, answer_to(question))

    return answering(answer)


def judge_at(url, timeout=5.0, model=None, rubric=None, cache=None, fps=2.0):
    setup = Setup(
        path=None,
        device=torch.device("cpu"),
        sample_fps=fps,
        url=url,
        timeout=timeout,
        start_timeout=10.0,
        judge_model=model,
        judge_rubric=rubric,
        judge_cache=cache,
    )
    return Judge(setup)


@pytest.fixture
def json_rubric(tmp_path):
    (tmp_path / "rubric.txt").write_text(JSON_RUBRIC)
    return str(tmp_path / "rubric.txt")


def test_the_question_holds_the_sampled_frames_and_the_rubric():
    asked = []
    clip = torch.arange(8, dtype=torch.uint8)[:, None, None, None].expand(8, 6, 10, 3) * 7
    with vlm(lambda handler, question: asked.append(question)) as (url, _):
        judge_at(url).score([clip], PROMPTS[:1], 4.0)
        judge_at(url, fps=100.0).score([clip], PROMPTS[:1], 4.0)
    first, every = asked
    assert first["model"] == "vlm"
    assert first["temperature"] == 0
    assert first["logprobs"]
    assert first["top_logprobs"] == 20

    # four frames, the first and the last too
    assert [image[0, 0, 0] for image in images_of(first)] == [0, 14, 35, 49]
    assert [image[5, 9, 2] for image in images_of(every)] == [7 * i for i in range(8)]
    assert images_of(first)[0].shape == (6, 10, 3)
    rubric = RUBRIC.read_text().partition("\n")[2]
    assert text_of(first) == rubric.replace("{prompt}", PROMPTS[0])

    form = first["response_format"]
    schema = form["json_schema"]["schema"]
    assert form["type"] == "json_schema"
    assert schema["required"] == ["VQ", "MQ", "TA"]
    assert schema["properties"]["MQ"] == {"type": "integer", "enum": [1, 2, 3, 4, 5]}


def test_a_score_is_the_expected_digit():
    """Digits outside of 1 to 5 and other tokens do not count; " 3" is a 3."""
    with vlm() as (url, _):
        scores = judge_at(url).score(CLIPS, PROMPTS, 8.0)
    assert list(scores) == ["VQ", "MQ", "TA"]
    assert all(values.dtype == torch.float64 for values in scores.values())
    for i, digit in enumerate((2, 3, 4)):
        weights = {d: math.exp(-2 * abs(d - digit)) for d in range(10)}
        scale = 0.5 / sum(weights.values())
        likely = {d: scale * weights[d] + 0.1 * (d == digit) for d in range(1, 6)}
        expected = sum(d * weight for d, weight in likely.items()) / sum(likely.values())
        assert scores["MQ"][i].item() == pytest.approx(expected)
    # not the digits themselves
    assert 2.01 < scores["MQ"][0] < 2.9
    assert 3.1 < scores["MQ"][2] < 3.99


def test_probabilities_by_hand():
    def token(text, probability):
        return {"token": text, "logprob": math.log(probability)}

    even = [token("2", 0.25), token("5", 0.25)]
    assert expected_digit(even) == pytest.approx(3.5)
    assert expected_digit([*even, token(" 5\n", 0.25)]) == pytest.approx(4.0)
    assert expected_digit([*even, token("0", 1), token("55", 1)]) == pytest.approx(3.5)
    for without_digit in ([], [token("good", 1)], [{"token": "4", "logprob": -9999.0}]):
        with pytest.raises(RemoteError, match="no digit from 1 to 5"):
            expected_digit(without_digit)


def test_a_rubric_of_ones_own_in_json(json_rubric):
    asked = []
    with vlm(lambda handler, question: asked.append(question)) as (url, _):
        scores = judge_at(url, rubric=json_rubric).score(CLIPS, PROMPTS, 8.0)
    assert list(scores) == ["TA", "look"]
    assert scores["TA"].tolist() == scores["look"].tolist() == [2, 3, 4]
    assert all("logprobs" not in question for question in asked)
    first_lines = {text_of(question).splitlines()[0] for question in asked}
    assert first_lines == {f"Watch {prompt}." for prompt in PROMPTS}


@pytest.mark.parametrize(
    "text",
    [
        "Watch {prompt}.\n## TA\n",
        "answer: text\n{prompt}\n## TA\n",
        "answer: json\nno place\n## TA\n",
        "answer: json\n{prompt} {prompt}\n## TA\n",
        "answer: json\n{prompt}\nTA\n",
        "answer: json\n{prompt}\n## TA\n## TA\n",
        "answer: json\n{prompt}\n## V2\n",
    ],
)
def test_what_is_no_rubric(tmp_path, text):
    (tmp_path / "rubric.txt").write_text(text)
    with pytest.raises(
        ValueError, match=r"rubric.txt must begin with the line .* and have a heading `## NAME`"
    ):
        read_rubric(tmp_path / "rubric.txt")


def say(status, value, **headers):
    def reply(handler, question):
        handler.say(status, value, **headers)
        return True

    return reply


def changed(**changes):
    """A good answer with some of its parts changed."""

    def reply(handler, question):
        answer = answer_to(question)
        answer["choices"][0] |= changes
        handler.say(200, answer)
        return True

    return reply


def scored_as(scores):
    def reply(handler, question):
        handler.say(200, answer_to(question, scores=scores))
        return True

    return reply


def content(text):
    return changed(message={"role": "assistant", "content": text})


def reset(handler, question):
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    handler.connection.close()
    handler.wfile = io.BytesIO()
    return True


def sleepy(handler, question):
    time.sleep(2)
    return True


FAILURES = {
    "500": (say(500, {"error": {"message": "CUDA error"}}), r"3 times in a row \(it answered 500\); is vLLM", 3),
    "502": (say(502, b"<html>"), r"it answered 502", 3),
    "429": (say(429, {}), r"it answered 429", 3),
    "reset": (reset, r"3 times in a row \((Read|Write|RemoteProtocol)Error", 3),
    "timeout": (sleepy, r"did not answer within 1 s", 1),
    "refused": (say(400, {"error": {"message": "too many images"}}), r"refused \(400\): .*too many images", 1),
    "redirect": (say(307, {}, Location="http://elsewhere/"), r"redirect \(307\), which is not followed", 1),
    "not JSON": (say(200, b"{"), "answered 200 without JSON", 1),
    "no choices": (say(200, {"choices": []}), "without what the rubric asks for", 1),
    "no text": (content(None), "without what the rubric asks for", 1),
    "malformed": (content('{"VQ": 4, "MQ"'), "this is not JSON", 1),
    "prose": (content("I like it."), "this is not JSON", 1),
    "a list": (content("[4, 4, 4]"), r"gave \[4, 4, 4\]; expected 1 to 5 for VQ, MQ, TA", 1),
    "too high": (scored_as({"VQ": 4, "MQ": 6, "TA": 4}), r"'MQ': 6.*expected 1 to 5", 1),
    "too low": (scored_as({"VQ": 0, "MQ": 4, "TA": 4}), r"'VQ': 0.*expected 1 to 5", 1),
    "infinite": (content('{"VQ": Infinity, "MQ": 4, "TA": 4}'), r"expected 1 to 5", 1),
    "a word": (content('{"VQ": "4", "MQ": 4, "TA": 4}'), r"'VQ': '4'.*expected 1 to 5", 1),
    "true": (content('{"VQ": true, "MQ": 4, "TA": 4}'), r"expected 1 to 5", 1),
    "one missing": (scored_as({"VQ": 4, "TA": 4}), r"expected 1 to 5 for VQ, MQ, TA", 1),
    "one too many": (scored_as({"VQ": 4, "MQ": 4, "TA": 4, "XQ": 4}), r"expected 1 to 5 for VQ, MQ, TA", 1),
    "no logprobs": (changed(logprobs=None), "without what the rubric asks for .*NoneType", 1),
    "empty logprobs": (changed(logprobs={"content": []}), "probabilities of 0 digits for 3 scores", 1),
    "no alternatives": (
        changed(logprobs={"content": [{"token": "4", "logprob": -0.1, "top_logprobs": []}] * 3}), "no digit from 1", 1),
    "huge logprobs": (
        changed(logprobs={"content": [{"token": "4", "top_logprobs": [{"token": "4", "logprob": 1e9}]}] * 3}),
        "OverflowError", 1),
}  # fmt: skip


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_is_nan_with_a_sentence_for_its_clip_alone(name):
    reply, sentence, times = FAILURES[name]

    def fails_for_one(handler, question):
        return reply(handler, question) if PROMPTS[1] in text_of(question) else None

    with vlm(fails_for_one) as (url, asked):
        reward = judge_at(url, timeout=1.0 if name == "timeout" else 5.0)
        scores = Composite({"judge": reward}, None).score(CLIPS, PROMPTS, 8.0)
    assert [math.isfinite(total) for total in scores.total.tolist()] == [True, False, True]
    assert all(values.isnan().tolist() == [False, True, False] for values in scores.named.values())
    (error,) = scores.errors
    assert error.startswith("judge: ")
    assert re.search(sentence, error)
    assert "\n" not in error
    assert TOKEN not in error
    assert asked.count("/v1/chat/completions") == 2 + times
    assert reward.counts["asked"] == 2


def test_a_server_that_recovers_is_asked_again(monkeypatch):
    left = [
        (429, {"Retry-After": "7"}),
        (503, {"Retry-After": "soon"}),
        (429, {"Retry-After": "9999"}),
    ]
    waited = []
    monkeypatch.setattr(client, "PAUSES", (1.0, 2.0, 4.0))
    monkeypatch.setattr(client.time, "sleep", waited.append)

    def busy(handler, question):
        if left:
            status, headers = left.pop(0)
            handler.say(status, {}, **headers)
            return True

    with vlm(busy) as (url, _):
        scores = judge_at(url).score(CLIPS[:1], PROMPTS[:1], 8.0)
    assert scores["VQ"].isfinite().all()
    assert waited == [7.0, 2.0, 60.0]


def test_clips_of_a_batch_are_judged_at_the_same_time():
    together = threading.Barrier(3)

    def answer(handler):
        if handler.path == "/v1/models":
            return handler.say(200, {"data": [{"id": "vlm"}]})
        together.wait(10)  # breaks unless three requests are open at once
        return handler.say(200, answer_to(json.loads(handler.body)))

    with answering(answer) as (url, _):
        assert judge_at(url).score(CLIPS, PROMPTS, 8.0)["VQ"].isfinite().all()


def test_a_question_is_asked_once(tmp_path):
    cache = tmp_path / "cache"
    with vlm(models=("vlm", "other")) as (url, _):
        first = judge_at(url, model="vlm", cache=str(cache))
        values = first.score(CLIPS, PROMPTS, 8.0)
        assert torch.equal(first.score(CLIPS, PROMPTS, 8.0)["TA"], values["TA"])
        tokens = {"prompt_tokens": 300, "completion_tokens": 60}
        assert first.counts == {"asked": 3, "known": 3} | tokens

        later = judge_at(url, model="vlm", cache=str(cache))
        assert torch.equal(later.score(CLIPS, PROMPTS, 8.0)["TA"], values["TA"])
        assert later.counts["asked"] == 0

        another_clip = CLIPS[1]
        other_pixels = CLIPS[0] + 1
        another_size = CLIPS[0][:, :, :9]
        for clip in (another_clip, other_pixels, another_size):
            later.score([clip], PROMPTS[:1], 8.0)
        assert later.counts["asked"] == 3

        other = judge_at(url, model="other", cache=str(cache))
        other.score(CLIPS, PROMPTS, 8.0)
        assert other.counts["asked"] == 3
        assert len(list(cache.iterdir())) == 9


@pytest.mark.parametrize("damage", ['{"VQ": 7, "MQ": 3, "TA": 3}', '{"VQ": 4, "M', "", "[]"])
def test_a_damaged_file_of_the_cache_is_asked_again_and_replaced(tmp_path, capsys, damage):
    cache = tmp_path / "cache"
    with vlm() as (url, _):
        values = judge_at(url, cache=str(cache)).score(CLIPS, PROMPTS, 8.0)
        contents = {file: file.read_text() for file in cache.iterdir()}
        for file in contents:
            file.write_text(damage)
        damaged = judge_at(url, cache=str(cache))
        assert torch.equal(damaged.score(CLIPS, PROMPTS, 8.0)["VQ"], values["VQ"])
    assert damaged.counts["asked"] == 3
    assert not damaged.failures
    assert {file: file.read_text() for file in cache.iterdir()} == contents
    assert capsys.readouterr().err.count("note: judge_cache") == 1


def test_a_link_in_the_cache_is_not_followed_and_replaced(tmp_path):
    cache = tmp_path / "cache"
    secret = '{"VQ": 1, "MQ": 1, "TA": 1}'
    (tmp_path / "secret").write_text(secret)
    with vlm() as (url, _):
        judge_at(url, cache=str(cache)).score(CLIPS, PROMPTS, 8.0)
        for file in cache.iterdir():
            file.unlink()
            file.symlink_to(tmp_path / "secret")
        again = judge_at(url, cache=str(cache))
        again.score(CLIPS, PROMPTS, 8.0)
    assert again.counts["asked"] == 3
    assert not any(file.is_symlink() for file in cache.iterdir())
    assert (tmp_path / "secret").read_text() == secret


def test_a_cache_that_cannot_be_written_costs_no_score(tmp_path, capsys):
    cache = tmp_path / "cache"
    with vlm() as (url, _):
        reward = judge_at(url, cache=str(cache))
        cache.write_text("in the way since the start")
        assert reward.score(CLIPS, PROMPTS, 8.0)["VQ"].isfinite().all()
    assert not reward.failures
    assert capsys.readouterr().err.count("cannot be written") == 1


@pytest.mark.parametrize("path", ["file", "file/cache"])
def test_a_file_in_place_of_the_cache_is_noticed_at_the_start(tmp_path, path):
    (tmp_path / "file").write_text("")
    with vlm() as (url, _), pytest.raises(ValueError, match=r"judge_cache .* is not a folder"):
        judge_at(url, cache=str(tmp_path / path))


@pytest.mark.parametrize(
    "usage",
    [5, "x", ["x"], {"prompt_tokens": "many"}, {"prompt_tokens": 1e400}, {"prompt_tokens": -1}],
)
def test_a_bad_account_of_tokens_costs_no_score(usage):
    def reply(handler, question):
        handler.say(200, json.dumps(answer_to(question) | {"usage": usage}).encode())
        return True

    with vlm(reply) as (url, _):
        reward = judge_at(url)
        assert reward.score(CLIPS[:1], PROMPTS[:1], 8.0)["VQ"].isfinite().all()
    assert reward.counts["asked"] == 1
    assert reward.counts["prompt_tokens"] == 0


@pytest.mark.parametrize("data", [5, ["x"], {"a": 1}, "vlm", [None]])
def test_models_that_are_no_list_of_models_are_one_sentence(data):
    def answer(handler):
        handler.say(200, {"data": data})

    with (
        answering(answer) as (url, _),
        pytest.raises(RemoteError, match="lists its models as"),
    ):
        judge_at(url)


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_a_rubric_that_cannot_be_read_is_one_sentence(tmp_path, content):
    path = tmp_path / "rubric"
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=r"judge_rubric .*rubric cannot be read"):
        read_rubric(path)


def test_a_failure_is_not_remembered():
    left = [say(400, {})]
    with vlm(lambda *request: left.pop()(*request) if left else None) as (url, _):
        reward = judge_at(url)
        assert reward.score(CLIPS[:1], PROMPTS[:1], 8.0)["VQ"].isnan().all()
        assert len(reward.failures) == 1
        assert reward.score(CLIPS[:1], PROMPTS[:1], 8.0)["VQ"].isfinite().all()
        assert reward.failures == []


def test_tokens_are_reported_at_the_end(monkeypatch, capsys):
    ends = []
    monkeypatch.setattr(judge.atexit, "register", ends.append)
    with vlm() as (url, _):
        flags = f"--reward_model judge --remote_reward_url {url} --judge_model vlm"
        config = parse(flags.split())
        reward = build_composite(config, ("judge",), {"VQ": 1.0, "TA": 0.5}, torch.device("cpu"))
        scores = reward.score(CLIPS, PROMPTS, 8.0)
    assert torch.equal(scores.total, scores.named["VQ"] + 0.5 * scores.named["TA"])
    ends[0]()
    report = "judge: 3 clips asked for, 0 known; 300 prompt and 60 answer tokens"
    assert report in capsys.readouterr().err


@pytest.mark.parametrize(
    ("models", "model", "words"),
    [
        (("a", "b"), None, "judge_model is None; .* serves a, b"),
        (("a", "b"), "c", "judge_model is c; .* serves a, b"),
        ((), None, "serves none"),
    ],
)
def test_the_model_must_be_one_that_is_served(models, model, words):
    with vlm(models=models) as (url, _), pytest.raises(RemoteError, match=words):
        judge_at(url, model=model)


def test_a_wrong_token_is_an_error_that_does_not_show_it(monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, "another-token-0123456789")
    with (
        vlm() as (url, _),
        pytest.raises(RemoteError, match=r"refused \(401\): .*Unauthorized") as caught,
    ):
        judge_at(url)
    assert "another" not in str(caught.value)


def test_an_address_is_needed_and_a_file_alone_cannot_choose_it(
    tiny_folder, tmp_path, monkeypatch, capsys
):
    with pytest.raises(RemoteError, match="give --remote_reward_url"):
        judge_at(None)
    monkeypatch.delenv(HOSTS_VARIABLE, raising=False)
    flags = ["--pretrained_model_root", str(tiny_folder), "--output_dir", str(tmp_path / "run")]
    flags += ["--batch_size", "4"]
    assert post_train.main([*flags, "--reward_model", "judge"]) == 2
    assert "the reward judge needs the address of its server" in capsys.readouterr().err
    with vlm() as (url, asked):
        config = tmp_path / "config.yaml"
        config.write_text(f"reward_model: judge\nremote_reward_url: {url}\n")
        assert post_train.main([*flags, "--config", str(config)]) == 2
        assert not asked
        remedy = f"set {HOSTS_VARIABLE}={url.removeprefix('http://')}"
        assert remedy in capsys.readouterr().err


def test_the_rubric_we_ship_asks_for_the_scores_of_videoalign():
    rubric = read_rubric(RUBRIC)
    assert rubric.names == ("VQ", "MQ", "TA")
    assert rubric.by_probability
    assert "answer:" not in rubric.text
    assert set(Config().reward_weights) == set(rubric.names), "so that the usual weights fit"
