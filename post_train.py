"""Post-train a video model by reinforcement learning: GRPO, AWM or DiffusionNFT.

    python post_train.py --config configs/tiny_cpu.yaml                         (the embedded model, on a CPU)
    torchrun --nproc_per_node 8 post_train.py --config FILE.yaml --FLAG VALUE   (flags beat the file; --help lists them)

Exit code 0: done; 75: stopped by a signal, with a checkpoint to resume from; 1: training had to stop; 2: the
configuration or a file is wrong, or another process uses the run folder; nothing was written but prompt embeddings.
"""

import sys
import traceback
from typing import Any

from sage_grpo.config.command_line import USER_ERRORS, error_text
from sage_grpo.config.fields import ConfigError
from sage_grpo.config.parse import parse
from sage_grpo.escape import terminal_text
from sage_grpo.exit_codes import DONE, FAILED, PREEMPTED, WRONG_INPUT
from sage_grpo.installed import require_packages
from sage_grpo.parallel import elastic


def main(arguments: list[str] | None = None) -> int:
    refusal = elastic.earlier_refusal()
    if refusal:  # a restart by torchrun changes neither flags nor files
        print(f"post_train.py: refused as before this restart: {refusal}", file=sys.stderr)
        return WRONG_INPUT
    try:
        # before imports that take seconds
        config = parse(sys.argv[1:] if arguments is None else arguments)
        require_packages()
        from sage_grpo.train import console
        from sage_grpo.train.build import build_trainer, join_run

        with join_run(config) as ranks:
            trainer = build_trainer(config, ranks)
            # named here, because train/ must not import tools/
            trainer.run.report_module = "sage_grpo.tools.report"
            ranks.set_timeout(config.collective_timeout)
            console.begin(trainer)
            exit_code = train(trainer)
            if exit_code == FAILED:
                ranks.abandon(exit_code)
            return exit_code
    except USER_ERRORS as error:
        text = error_text(error)
        print(f"post_train.py: {text}", file=sys.stderr)
        if isinstance(error, ConfigError):
            elastic.note_refusal(text)
        return WRONG_INPUT


def train(trainer: Any) -> int:
    from sage_grpo.train.guards import Preempted, TrainingError

    try:
        trainer.train()
    except (Preempted, TrainingError) as end:
        print(f"post_train.py: {terminal_text(end)}", file=sys.stderr)
        return PREEMPTED if isinstance(end, Preempted) else FAILED
    except Exception:  # a fault of the program, not of its input
        traceback.print_exc()
        return FAILED
    finally:
        trainer.run.close()
    if trainer.ranks.is_first:
        from sage_grpo.tools.report.page import print_summary  # loads matplotlib
        from sage_grpo.train import console

        print_summary(trainer.run.path)
        print(console.ending(trainer))
        console.offer_report(trainer.run.path / "report.html")
    return DONE


if __name__ == "__main__":
    sys.exit(main())
