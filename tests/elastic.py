"""post_train.py under torchrun's elastic agent, in processes forked from one that has imported everything."""

import os
import signal
import sys
from pathlib import Path

from tests.dist import CONTEXT


def start(words, ranks=2, max_restarts=0, **environment):
    """A running agent with its ranks: a process whose exit code is 0, or 1 where a rank ended otherwise.

    words: of the command line of post_train.py.
    """
    process = CONTEXT.Process(
        target=_agent, args=([str(word) for word in words], ranks, max_restarts, environment)
    )
    process.start()
    return process


def _agent(words, ranks, max_restarts, environment):
    import torch
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    torch.set_num_threads(1)
    os.environ |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **environment}
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id="test",
        max_restarts=max_restarts,
        monitor_interval=0.1,
        start_method="fork",
    )
    elastic_launch(config, _rank)(words)


def _rank(words):
    import post_train
    from tests.smallest_run import prepare_process

    prepare_process()
    # a fork has the agent's handler; a rank of torchrun has none
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    folder = Path(words[words.index("--output_dir") + 1]).parent / "ranks"
    folder.mkdir(exist_ok=True)
    draft = folder / f"{os.environ['RANK']}.tmp"
    draft.write_text(str(os.getpid()))
    draft.rename(draft.with_suffix(".pid"))  # whoever finds it reads a number
    code = post_train.main(words)
    (folder / f"{os.environ['RANK']}.code").write_text(str(code))
    sys.exit(code)
