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
from pathlib import Path

import torch

from sage_grpo.environment import TOKEN_VARIABLE
from sage_grpo.rewards.base import Setup
from sage_grpo.rewards.build import build_reward
from sage_grpo.rewards.remote import RemoteReward

ROOT = Path(__file__).resolve().parents[2]
PROMPT = "a red circle moving left"


def start(args: argparse.Namespace, batch_size: int) -> tuple[subprocess.Popen, str]:
    command = [sys.executable, "scripts/reward_server.py", "--reward", args.reward, "--port", "0"]
    command += [
        "--reward_path",
        str(args.reward_path.resolve()),
        "--reward_batch_size",
        str(batch_size),
    ]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    return process, process.stdout.readline().split()[0]


def seconds(score, args: argparse.Namespace) -> float:
    """Seconds for `args.clients` threads to score `args.requests` clips each."""
    clip = torch.randint(0, 256, (args.frames, args.size, args.size, 3), dtype=torch.uint8)
    threads = [threading.Thread(target=lambda: [score([clip], [PROMPT], args.fps) for _ in range(args.requests)])
               for _ in range(args.clients)]  # fmt: skip
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
    parser.add_argument("--reward", default="videoalign")
    parser.add_argument("--reward_path", type=Path, default=Path("ckpts/VideoReward"))
    parser.add_argument("--batch_sizes", type=int, nargs="+", default=[1, 8])
    for name, default in {
        "clients": 8,
        "requests": 4,
        "rounds": 5,
        "frames": 9,
        "size": 32,
        "fps": 8,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    os.environ[TOKEN_VARIABLE] = secrets.token_hex(32)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    reward, lock = build_reward(args.reward, Setup(args.reward_path, device)), threading.Lock()

    def here(*batch):
        with lock:
            return reward.score(*batch)

    servers = {size: start(args, size) for size in args.batch_sizes}
    calls = {"no server, one by one": here}
    for size, (_, url) in servers.items():
        calls[f"server, batches of up to {size}"] = RemoteReward(
            Setup(args.reward_path, device, url=url)
        ).score
    times = {name: [] for name in calls}
    for _ in range(args.rounds + 1):
        for name, call in calls.items():
            times[name].append(seconds(call, args))
    for process, _ in servers.values():
        process.terminate()
        process.wait()
    clips = args.clients * args.requests
    for name, taken in times.items():
        best, middle = min(taken[1:]), statistics.median(taken[1:])  # the first round warms up
        print(f"{name:32}{clips / best:8.1f} clips/s at best, {clips / middle:8.1f} in the median")


if __name__ == "__main__":
    main()
