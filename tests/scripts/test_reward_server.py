"""The reward server: authentication, rejected requests, and that clips of many clients are never mixed up."""

import hmac
import http.client
import json
import logging
import os
import re
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch

from sage_grpo.environment import TOKEN_VARIABLE
from sage_grpo.rewards.registry import REWARDS
from sage_grpo.rewards.remote import pack
from scripts import reward_server
from scripts.reward_server import Limits
from tests.programs import exit_code
from tests.rewards.serving import TOKEN, Light, composite, remote_reward, serving

ROOT = Path(__file__).parents[2]
GOOD = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture(autouse=True)
def token(monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)


def clip(value, frames=2):
    return torch.full((frames, 4, 4, 3), value, dtype=torch.uint8)


def message(clips, prompts):
    return b"".join(pack(clips, prompts, 8.0))


def ask(url, method, path, body=None, headers=GOOD):
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=10)
    try:
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read() or "null")
    finally:
        connection.close()


@pytest.mark.parametrize("path", ["/info", "/score", "/check", "/", "/elsewhere"])
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer "},
        {"Authorization": f"Bearer {TOKEN}x"},
        {"Authorization": TOKEN},
    ],
)
def test_nothing_is_told_without_the_token(light_server, path, headers):
    for method in ("GET", "POST"):
        status, answer = ask(light_server, method, path, None, headers)
        assert status == 401
        assert list(answer) == ["error"]
        assert TOKEN not in answer["error"]


def test_the_token_is_compared_in_constant_time(light_server, monkeypatch):
    compared = []
    compare_digest = hmac.compare_digest

    def recorded(given, expected):
        compared.append((given, expected))
        return compare_digest(given, expected)

    monkeypatch.setattr(hmac, "compare_digest", recorded)
    for given, expected_status in ((TOKEN, 200), (f"{TOKEN}x", 401), ("", 401)):
        headers = {"Authorization": f"Bearer {given}"}
        status, _ = ask(light_server, "GET", "/info", None, headers)
        assert status == expected_status
    whole = f"Bearer {TOKEN}".encode()
    assert compared == [(whole, whole), (whole + b"x", whole), (b"Bearer", whole)]


@pytest.fixture(scope="module")
def light_server():
    with serving(composite({"light": Light()}), Limits(clips=3, request=1000, seconds=5)) as url:
        yield url


def test_bodies_that_are_turned_away(light_server):
    good = message([clip(1)], ["a"])
    for body, expected_status, words in [
        (message([clip(1, 1)] * 4, ["a"] * 4), 413, "4 clips in one request; at most 3"),
        (good[:-1], 400, "need 96 bytes, but 95 came"),
        (good + b"1", 400, "need 96 bytes, but 97 came"),
        (b"\x80\x04K\x01.\n", 400, "not JSON"),
        (good.replace(b"8.0", b"9" * 400), 400, "fps is 9999"),
        (b"", 400, "no line of JSON"),
    ]:
        status, answer = ask(light_server, "POST", "/score", body)
        assert status == expected_status
        assert words in answer["error"]

    not_prompts = [b'{"prompts": [1]}', b'{"prompts": 3}', b'{"prompts": "a"}']
    for body in (b"", b"[]", b"{}", b"{", *not_prompts):
        assert ask(light_server, "POST", "/check", body)[0] == 400, body
    assert ask(light_server, "POST", "/score", good)[1]["scores"]["light"] == [1]


def test_the_announced_length_decides_before_a_byte_is_read(light_server):
    for headers, status in (
        ({"Content-Length": "1001"}, 413),
        ({"Content-Length": "9" * 19}, 413),
        ({"Transfer-Encoding": "chunked"}, 411),
    ):
        connection = http.client.HTTPConnection(urlsplit(light_server).netloc, timeout=10)
        connection.putrequest("POST", "/score")
        for name, value in (GOOD | headers).items():
            connection.putheader(name, value)
        connection.endheaders()
        assert connection.getresponse().status == status
        connection.close()


LENGTHS = {
    "chunked too": "Content-Length: 6\r\nTransfer-Encoding: chunked",
    "chunked first": "Transfer-Encoding: chunked\r\nContent-Length: 6",
    "another encoding too": "Content-Length: 6\r\nTransfer-Encoding: identity",
    "chunked twice": "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
    "two lengths": "Content-Length: 6\r\nContent-Length: 7",
    "a list": "Content-Length: 6, 7",
    "negative": "Content-Length: -6",
    "hexadecimal": "Content-Length: 0x6",
    "5000 digits": f"Content-Length: {'9' * 5000}",
}


LARGE = {
    "POST /score": message([clip(1, 30)], ["a"]),
    "POST /check": b'{"prompts": ["%s"]}' % (b"a" * 1000),
    "GET /info": b"x",
}


@pytest.mark.parametrize("path", LARGE)
@pytest.mark.parametrize("length", LENGTHS.values(), ids=LENGTHS)
def test_a_length_is_given_once(light_server, path, length):
    """A good message of more than 1000 bytes, in one chunk, must not get past that limit."""
    head = f"{path} HTTP/1.1\r\nHost: here\r\nAuthorization: Bearer {TOKEN}\r\n{length}\r\n\r\n"
    parts = urlsplit(light_server)
    with socket.create_connection((parts.hostname, parts.port), timeout=10) as connection:
        connection.sendall(
            head.encode() + f"{len(LARGE[path]):x}\r\n".encode() + LARGE[path] + b"\r\n0\r\n\r\n"
        )
        answer = b""
        with suppress(ConnectionResetError):
            while part := connection.recv(1 << 16):  # ends where the server closes
                answer += part
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"onnection: close" in answer
    assert ask(light_server, "GET", "/info")[0] == 200


def test_a_body_that_never_comes_is_given_up():
    with serving(composite({"light": Light()}), Limits(seconds=0.2)) as url:
        assert ask(url, "POST", "/score", iter([b"{"]), GOOD | {"Content-Length": "100"})[0] == 504


def test_nothing_redirects(light_server):
    for path in ("/score/", "/info/", "//score", "/docs"):
        assert ask_status(light_server, path) == 404


def ask_status(url, path):
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=10)
    connection.request("GET", path, headers=GOOD)
    status = connection.getresponse().status
    connection.close()
    return status


def test_clips_that_wait_are_scored_together():
    light = Light(delay=0.2)
    with serving(composite({"light": light}, batch_size=4)) as url, ThreadPoolExecutor(7) as pool:
        first = pool.submit(remote_reward(url).score, [clip(9)], ["first"], 8.0)
        while not light.batches:
            time.sleep(0.01)
        rest = [
            pool.submit(remote_reward(url).score, [clip(i)], ["a" * i], 8.0) for i in range(1, 7)
        ]
        assert [f.result()["words"].item() for f in (first, *rest)] == [5, 1, 2, 3, 4, 5, 6]
    assert light.batches[0] == 1
    assert max(light.batches) == 4
    assert sum(light.batches) == 7


def test_clips_of_other_shapes_are_scored_apart_and_a_broken_one_alone():
    light = Light(delay=0.2)
    with serving(composite({"light": light}, batch_size=8)) as url, ThreadPoolExecutor(4) as pool:
        reward = remote_reward(url)
        first = pool.submit(reward.score, [clip(0)], ["first"], 8.0)
        while not light.batches:
            time.sleep(0.01)
        mixed = pool.submit(reward.score, [clip(1), clip(2, 3), clip(3)], ["a", "b", "c"], 8.0)
        broken = pool.submit(reward.score, [clip(4), clip(5)], ["broken", "d"], 8.0)
        assert mixed.result()["light"].tolist() == [1, 2, 3]
        assert first.result()["light"].tolist() == [0]
        lost, fine = broken.result()["light"].tolist()
        assert lost != lost
        assert fine == 5
    # 1, 3, 4 and 5 have one shape; their batch broke, so each was scored again
    assert light.batches.count(4) == 1
    with (
        serving(composite({"light": Light()})) as url,
        pytest.raises(ValueError, match="OSError: a clip that breaks"),
    ):
        remote_reward(url).score([clip(4)], ["broken"], 8.0)


def test_a_reward_that_hangs_frees_its_place_and_the_queue_is_bounded():
    light = Light(delay=1.2)
    body = message([clip(1)], ["a"])
    limits = Limits(seconds=0.8, waiting=2 * len(body))
    with (
        serving(composite({"light": light}, batch_size=1, timeout=30), limits) as url,
        ThreadPoolExecutor(4) as pool,
    ):
        answers = list(pool.map(lambda _: ask(url, "POST", "/score", body), range(4)))
        assert sorted(status for status, _ in answers) == [503, 503, 504, 504]
        light.delay = 0
        time.sleep(0.8)
        # nothing of the former requests is left, and abandoned clips were not scored
        assert ask(url, "POST", "/score", body)[0] == 200
        assert len(light.batches) == 2


@contextmanager
def program(*words):
    """A server as a process of its own; what it prints in one line and its number."""
    process = subprocess.Popen(
        [sys.executable, "-m", *words],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process.stdout.readline().strip(), process.pid
    finally:
        process.terminate()
        assert TOKEN not in process.communicate(timeout=20)[0]


@pytest.mark.slow
def test_under_load_nothing_is_lost_or_mixed_up():
    """8 clients, 200 requests of 1 to 3 clips of two shapes, 470 MB of pixels in all; the server has room for 12.

    Slow: many clients at once; one client is served in `make test`.
    """
    results = {}

    def client(number, reward):
        for key in range(number * 25, number * 25 + 25):
            count = 1 + key % 3
            shape = (3 + key % 2, 320, 320, 3)
            values = [(key + i) % 256 for i in range(count)]
            clips = [torch.full(shape, value, dtype=torch.uint8) for value in values]
            results[key] = reward.score(clips, ["x" * (key + i) for i in range(count)], 8.0)

    with program("tests.rewards.serving", str(12 << 20)) as (url, number):
        threads = [threading.Thread(target=client, args=(n, remote_reward(url))) for n in range(8)]
        before = peak_memory(number)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        grown = peak_memory(number) - before
    assert len(results) == 200
    for key, scores in results.items():
        numbers = [key + i for i in range(1 + key % 3)]
        assert scores["words"].tolist() == numbers
        assert scores["light"].tolist() == [number % 256 for number in numbers]
    assert grown < 200 << 20


def peak_memory(process):
    """Bytes that a process has had in memory at most."""
    status = Path(f"/proc/{process}/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\s+(\d+)", status)[1])


def test_the_token_is_never_logged(caplog, capfd):
    caplog.set_level(logging.DEBUG)
    with serving(composite({"light": Light()})) as url:
        remote_reward(url).score([clip(1)], ["a"], 8.0)
        ask(url, "POST", "/score", b"nonsense")
        ask(url, "POST", "/score", b"nonsense", {"Authorization": f"Bearer {TOKEN}x"})
    out, err = capfd.readouterr()
    assert TOKEN not in caplog.text + out + err


def started(*words):
    """The exit code of the program with these flags, which never get it to serve."""
    return exit_code(reward_server.main, list(words))


def test_it_does_not_start_without_a_token_or_weights(monkeypatch, capsys, tmp_path):
    assert started("--reward", "videoalign", "--reward_path", str(tmp_path / "none")) == 2
    assert "does not exist" in capsys.readouterr().err
    monkeypatch.delenv(TOKEN_VARIABLE)
    assert started("--reward", "shapes") == 2
    assert f"{TOKEN_VARIABLE} is not set" in capsys.readouterr().err
    for name, sentence in {
        "remote": "served by another machine",
        "nothing": "choose one of videoalign",
    }.items():
        monkeypatch.setenv(TOKEN_VARIABLE, "x" * 32)
        assert started("--reward", name) == 2
        assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["reward_fps", "reward_batch_size", "max_clips", "timeout"])
def test_it_does_not_start_with_limits_that_let_nothing_through(flag, capsys):
    assert started("--reward", "shapes", f"--{flag}", "0") == 2
    assert f"{flag} is 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flag, value",
    [
        ("port", "99999"),
        ("port", "-1"),
        ("device", "foo"),
        ("device", "cuda:99"),
        ("device", "cpu:x"),
        ("host", "not a host"),
        ("reward_fps", "inf"),
        ("max_clips", "9" * 400),
    ],
)
def test_it_does_not_start_where_it_cannot_serve(flag, value, capsys):
    assert started("--reward", "shapes", f"--{flag}", value) == 2
    assert flag in capsys.readouterr().err


def test_its_help_names_every_reward_that_it_can_serve(capsys):
    assert started("--help") == 0
    (names,) = re.findall(r"one or several of ([^-]*FILE\.py:NAME)", capsys.readouterr().out)
    served = {name.strip() for name in names.split(",")}
    assert served == {*REWARDS, "FILE.py:NAME"} - {"judge", "remote"}


def test_it_does_not_start_at_a_port_in_use(capsys):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        assert started("--reward", "shapes", "--port", port) == 2
    assert f"--port {port} cannot be listened on" in capsys.readouterr().err


def test_the_program_serves_on_loopback():
    with program("scripts.reward_server", "--reward", "shapes", "--port", "0") as (line, _):
        (url,) = re.findall(r"^(http://127\.0\.0\.1:\d+) scores VQ, MQ, TA, up to 8", line)
        assert remote_reward(url).names == ("VQ", "MQ", "TA")
