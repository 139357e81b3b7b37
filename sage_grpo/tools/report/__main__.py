"""One page about a run: did the reward rise, did the clips get better, was the training healthy? Or one about several.

    python -m sage_grpo.tools.report RUN [--output FILE]
    python -m sage_grpo.tools.report RUN_A RUN_B [RUN_C ...] [--output FILE]

Reads run folders and writes one self-contained HTML file with figures and clips. Several runs are compared with the
first. docs/metrics.md explains the metrics.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from sage_grpo.config.command_line import answer_early, answering
from sage_grpo.tools.options import ToolParser


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = ToolParser("python -m sage_grpo.tools.report", __doc__)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run folder")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="page to write (default: RUN/report.html, or ./comparison.html for several runs)",
    )
    return parser.parse_args(arguments)


answer_early(__name__, parse_arguments)

from sage_grpo.tools.report.page import write_report


@answering("")
def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    print(write_report(*options.runs, output=options.output))
    return 0


if __name__ == "__main__":
    sys.exit(main())
