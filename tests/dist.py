"""Ranks as processes on one machine, forked from a server that has imported the heavy packages once."""

import multiprocessing
import os
import pickle
import socket
import sys
import traceback
import warnings
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from unittest import mock

ROOT = str(Path(__file__).parents[1])
# of the server
os.environ["PYTHONPATH"] = os.pathsep.join(
    [ROOT, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
)
CONTEXT = multiprocessing.get_context("forkserver")
PACKAGES = ("sage_grpo.train.build", "sage_grpo.worlds.shapes.reward", "torch.testing")
CONTEXT.set_forkserver_preload(
    [
        *PACKAGES,
        "tests.narrow_glyphs",
        "tests.smallest_run",
        "tests.trivial_backbone",
        "tests.warm",
    ]
)
PATIENCE = 120  # seconds


def fork_server():
    """Fork the server from this process, which knows the packages already, instead of starting an interpreter for it.

    Only before the first test: a fork of a process that has run autograd cannot run it again.
    """
    if not Path("/proc/self/fd").is_dir():
        return

    def fork(path, words, kept):
        pid = os.fork()
        if pid == 0:
            serve(words[-1], kept)
        return pid

    with mock.patch.dict(os.environ, PYTHONWARNINGS="ignore"):
        resource_tracker.ensure_running()  # in the end it would name the locks of processes that were killed
    with mock.patch.object(util, "spawnv_passfds", fork), warnings.catch_warnings():
        # Python 3.12 warns of threads, of which pytest-xdist has some; the server uses nothing of theirs
        warnings.simplefilter("ignore", DeprecationWarning)
        forkserver.ensure_running()


def serve(code, kept):
    """Run the server's code in a process whose other files lead nowhere; does not return.

    They are not closed: what still writes to one, such as a logger, would then write to the next file of that number.
    What ranks print belongs to no test; their errors come back through pipes.
    """
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor not in (*kept, nowhere):
            os.dup2(nowhere, descriptor, inheritable=descriptor <= 2)
    for number, name in ((1, "stdout"), (2, "stderr")):
        setattr(sys, name, os.fdopen(number, "w", buffering=1, closefd=False))
    warnings.resetwarnings()  # pytest makes them errors
    try:
        exec(code, {})
    finally:
        os._exit(0)


def run_ranks(world, work, *arguments, **layout):
    """What `work(ranks, *arguments)` gives on each rank, all on the CPU; `layout` goes to `join_ranks`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pipes = [CONTEXT.Pipe(duplex=False) for _ in range(world)]
    processes = [
        CONTEXT.Process(
            target=_rank, args=(rank, world, port, pipes[rank][1], layout, work, arguments)
        )
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    try:
        silent = (None, f"no answer within {PATIENCE} s")
        found = [
            pickle.loads(reader.recv_bytes()) if reader.poll(PATIENCE) else silent
            for reader, _ in pipes
        ]
    finally:
        for process in processes:
            process.kill()
    failed = {rank: text for rank, (result, text) in enumerate(found) if text}
    assert not failed, "\n".join(f"rank {rank}: {text}" for rank, text in failed.items())
    return [result for result, _ in found]


def _rank(rank, world, port, pipe, layout, work, arguments):
    from sage_grpo.parallel.ranks import join_ranks
    from tests.smallest_run import prepare_process

    prepare_process()
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    try:
        # a machine has fewer GPUs than ranks, and a forked process cannot use the server's
        with join_ranks(PATIENCE, device_type="cpu", **layout) as ranks:
            result = work(ranks, *arguments)
        answer = (result, "")
    except BaseException:  # told to the test
        answer = (None, traceback.format_exc())
    # by value: `send` would hand over memory that ends with this process
    pipe.send_bytes(pickle.dumps(answer))
