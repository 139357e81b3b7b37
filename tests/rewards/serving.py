"""Reward servers for tests: the real one, and one with scripted responses, each in a thread of this process.

Run as a program: serves the reward Light with room for argv[1] bytes; prints its address.
"""

import json
import sys
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch

from sage_grpo.rewards.base import Composite, Setup
from sage_grpo.rewards.remote import RemoteReward
from scripts.reward_server import Limits, build_server, listen

TOKEN = "a-token-for-the-tests-0123456789"
INFO = {"names": ["light"], "rewards": ["x"], "max_clips": 8, "max_bytes": 1 << 20}


def remote_reward(url, timeout=300.0, start_timeout=1800.0):
    setup = Setup(None, torch.device("cpu"), url=url, timeout=timeout, start_timeout=start_timeout)
    return RemoteReward(setup)


class Light:
    """Mean of a clip's pixels, and the length of its prompt: whatever is mixed up on the way shows."""

    names = ("light", "words")

    def __init__(self, delay=0.0):
        self.delay, self.batches = delay, []

    def check(self, prompts):
        if "dark" in prompts:
            raise ValueError("the prompt 'dark' cannot be scored")

    def score(self, clips, prompts, fps):
        self.batches.append(len(clips))
        time.sleep(self.delay)
        if "broken" in prompts:
            raise OSError("a clip that breaks its batch")
        light = torch.stack([clip.double().mean() for clip in clips])
        return {"light": light, "words": torch.tensor([float(len(prompt)) for prompt in prompts])}


def composite(rewards, batch_size=4, timeout=30.0):
    weights = {name: dict.fromkeys(reward.names, 1.0) for name, reward in rewards.items()}
    return Composite(rewards, weights, batch_size, timeout)


@contextmanager
def serving(reward, limits=None, token=TOKEN):
    """The address of a server for a composite reward; it runs in a thread."""
    server = build_server(reward, limits or Limits(seconds=30.0), token, "127.0.0.1", 0)
    listener, address = listen(server)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield address
    finally:
        server.should_exit = True
        thread.join(10)
        if thread.is_alive():
            raise RuntimeError(f"the reward server at {address} does not end")


@contextmanager
def answering(answer):
    """The address of a server whose every request is `answer(handler)`, and the paths that were asked for."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            answer(self)

        do_POST = do_GET

        def log_message(self, *words):
            pass

        def say(self, status, value, **headers):
            body = value if isinstance(value, bytes) else json.dumps(value).encode()
            self.send_response(status)
            for name, text in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, text)
            self.end_headers()
            self.wfile.write(body)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", asked
        finally:
            server.shutdown()
            thread.join()


if __name__ == "__main__":
    with serving(
        composite({"light": Light()}, batch_size=8), Limits(waiting=int(sys.argv[1]))
    ) as url:
        print(url, flush=True)
        sys.stdin.read()
