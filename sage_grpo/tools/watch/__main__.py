"""Follow running jobs in a browser: curves, diagnosis, time, and clips.

    python -m sage_grpo.tools.watch RUN [RUN ...] [--port N]

Prints an address to open on this machine, or through a tunnel: ssh -L 8000:127.0.0.1:8000 MACHINE. The page updates by
itself. It shows the best and the worst clip of a group for logged iterations (--rollout_videos of post_train.py), and
each clip of the newest validation beside the base model's. It reads run folders and writes nothing; Ctrl-C ends it.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from sage_grpo.config.command_line import answer_early, answering
from sage_grpo.tools.options import ToolParser


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = ToolParser("python -m sage_grpo.tools.watch", __doc__)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run folder")
    parser.add_argument(
        "--port", type=int, metavar="N", default=8000, above=-1, help="port; 0 picks a free one"
    )
    return parser.parse_args(arguments)


answer_early(__name__, parse_arguments)

from sage_grpo.tools.watch.server import build_page


@answering("")
def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    for run in options.runs:
        if not run.is_dir():
            print(
                f"note: {run} does not exist yet; its page is empty until a run writes there",
                file=sys.stderr,
            )
    page = build_page(options.runs)
    server, listener, address = page.listen(options.port)
    print(f"open {address}", flush=True)
    server.run(sockets=[listener])
    return 0


if __name__ == "__main__":
    sys.exit(main())
