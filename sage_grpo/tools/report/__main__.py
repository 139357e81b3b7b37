"""One page about a run: did the reward rise, did the clips get better, was the training healthy? Or one about several.

    python -m sage_grpo.tools.report RUN [--output FILE]
    python -m sage_grpo.tools.report RUN_A RUN_B [RUN_C ...] [--output FILE]

Reads run folders and writes one self-contained HTML file with figures and clips. Several runs are compared with the
first. docs/metrics.md explains the metrics.
"""

import sys
from collections.abc import Sequence

from sage_grpo.config.command_line import answer_early, answering
from sage_grpo.tools.options import ToolParser

options_of = ToolParser("report", __doc__).parse_args

answer_early(__name__, options_of)

from sage_grpo.tools.report.page import write_report


@answering("")
def main(arguments: Sequence[str] | None = None) -> int:
    options = options_of(arguments)
    print(write_report(*options.runs, output=options.output))
    return 0


if __name__ == "__main__":
    sys.exit(main())
