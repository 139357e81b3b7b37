"""Throughput of a reward server at several batch sizes, and of the reward without a server.

    python -m research.benchmarks.reward_server --reward videoalign --reward_path ckpts/VideoReward --clients 8

Every client sends one clip at a time; all clips have the same size. Rounds alternate between servers, so that other
load on the machine slows all of them equally. Prints the best and the median round.
"""

import argparse
import os
import secrets
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from sage_grpo.environment import TOKEN_VARIABLE
from sage_grpo.plugins import trust
from sage_grpo.rewards.base import Setup
from sage_grpo.rewards.build import build_reward
from sage_grpo.rewards.remote import RemoteReward

ROOT = Path(__file__).resolve().parents[2]
PROMPT = "a red circle moving left"

Score = Callable[[list[Tensor], list[str], float], object]


def start(args: argparse.Namespace, batch_size: int) -> tuple[subprocess.Popen, str]:
    """Start a server; returns its process and address."""
    command = [sys.executable, "scripts/reward_server.py", "--reward", args.reward, "--port", "0"]
    command += ["--reward_path", str(args.reward_path.resolve())]
    command += ["--reward_batch_size", str(batch_size)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    return process, process.stdout.readline().split()[0]


def seconds(score: Score, args: argparse.Namespace) -> float:
    """Seconds for `args.clients` threads to score `args.requests` clips each."""
    clip = torch.randint(0, 256, (args.frames, args.size, args.size, 3), dtype=torch.uint8)

    def send() -> None:
        for _ in range(args.requests):
            score([clip], [PROMPT], args.fps)

    threads = [threading.Thread(target=send) for _ in range(args.clients)]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--reward", default="videoalign", help="name of the reward")
    add("--reward_path", type=Path, default=Path("ckpts/VideoReward"), help="its folder")
    add("--batch_sizes", type=int, nargs="+", default=[1, 8], help="one server for each")
    add("--clients", type=int, default=8, help="threads that send clips")
    add("--requests", type=int, default=4, help="clips that each sends in a round")
    add("--rounds", type=int, default=5, help="rounds, after one that warms up")
    add("--frames", type=int, default=9, help="frames of a clip")
    add("--size", type=int, default=32, help="height and width of a clip in pixels")
    add("--fps", type=int, default=8, help="frame rate of a clip")
    args = parser.parse_args()
    os.environ[TOKEN_VARIABLE] = secrets.token_hex(32)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    trust(args.reward)
    reward = build_reward(args.reward, Setup(args.reward_path, device))
    lock = threading.Lock()

    def local_score(clips: list[Tensor], prompts: list[str], fps: float) -> object:
        with lock:
            return reward.score(clips, prompts, fps)

    servers = {size: start(args, size) for size in args.batch_sizes}
    calls: dict[str, Score] = {"no server, one by one": local_score}
    for size, (_, url) in servers.items():
        remote = RemoteReward(Setup(args.reward_path, device, url=url))
        calls[f"server, batches of up to {size}"] = remote.score
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(args.rounds + 1):
        for name, call in calls.items():
            times[name].append(seconds(call, args))
    for process, _ in servers.values():
        process.terminate()
        process.wait()

    clips = args.clients * args.requests
    for name, (_, *rounds) in times.items():  # the first round warms up
        best = clips / min(rounds)
        median = clips / statistics.median(rounds)
        print(f"{name:32}{best:8.1f} clips/s at best, {median:8.1f} in the median")


if __name__ == "__main__":
    main()
