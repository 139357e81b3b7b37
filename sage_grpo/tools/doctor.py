"""Checks a configuration before it costs GPU hours: reports measurements, problems and remedies.

    python -m sage_grpo.tools.doctor --config FILE.yaml [--FLAG VALUE ...]     (any flag of post_train.py)
    python -m sage_grpo.tools.doctor --short --config FILE.yaml ...            (only the machine, in seconds)

First comes what needs no weights: this machine and the files. Then one process acts as the first rank of the run;
nothing is trained, and the run folder is not touched. At the end, all exploration SDEs are compared on the model and
the prompts. Exit code 0: no problems; 1: something is WRONG; 2: the configuration cannot run, with the error that
post_train.py would print, or the machine cannot run it.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from sage_grpo.config import Config, ConfigError
from sage_grpo.flags import Parser


def options_of(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, Config]:
    """Parse the doctor's flags; all others go to post_train.py's parser."""
    parser = Parser("python -m sage_grpo.tools.doctor", __doc__)
    add = parser.add_argument
    add("--output", type=Path, metavar="FOLDER", help="where numbers and pictures go (default: OUTPUT_DIR-doctor)")
    add("--short", action="store_true", help="check the machine only, a line per check")
    add("--skip_ab", action="store_true", help="leave out the comparison of the exploration SDEs")
    add("--ranks", type=int, metavar="N", help="processes that the run will have (default: gpus of the configuration)")
    add("--ranks_here", type=int, metavar="N", help="how many of them run on this machine (default: all, if --short)")
    add("--prompts", type=int, metavar="N", default=4, help="prompts to compare the SDEs on")
    add("--clips", type=int, metavar="N", default=4, help="clips per prompt compared")
    options, config = parser.parse_with_config(arguments)
    run = Path(config.output_dir)
    options.output = options.output or run.with_name(f"{run.resolve().name}-doctor")
    options.ranks = config.gpus or 1 if options.ranks is None else options.ranks
    options.ranks_here = options.ranks_here or (options.ranks if options.short else 1)
    for name, least in {"ranks": 1, "prompts": 1, "clips": 2}.items():
        if getattr(options, name) < least:
            raise ConfigError(f"{name} is {getattr(options, name)}; it must be at least {least}")
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ConfigError("the doctor is one process: start it without torchrun and pass --ranks N")
    if options.output.resolve() == run.resolve():
        raise ConfigError(f"output and output_dir are both {options.output}; the doctor stays out of the run folder")
    return options, config


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        options, config = options_of(arguments)  # before imports that take seconds
        from transformers.utils.logging import disable_progress_bar

        from sage_grpo.tools.examination import examine, prepare
        from sage_grpo.tools.machine_checks import examine_machine, machine_of
        from sage_grpo.train.build import join_run

        disable_progress_bar()  # from the text encoders
        code = examine_machine(machine_of(config, options.ranks, options.ranks_here))
        if code or options.short:
            return code
        with join_run(replace(config, sp_size=1, dp_replicate=1)) as alone:
            return examine(options, *prepare(config, alone, options.ranks))
    except (ValueError, OSError) as error:
        print(f"doctor: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
