"""`label`: make a study, or continue one, and serve its page."""

import argparse
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from sage_grpo.config.fields import Config, ConfigError
from sage_grpo.escape import terminal_text
from sage_grpo.exit_codes import DONE
from sage_grpo.tools.gate import build_server, listen
from sage_grpo.tools.prefer.answers import AnswersFile
from sage_grpo.tools.prefer.blinding import blind_copies
from sage_grpo.tools.prefer.pairs import candidates, draw, least_certain
from sage_grpo.tools.prefer.server import Labeling, addresses
from sage_grpo.tools.prefer.sources import collect
from sage_grpo.tools.prefer.study import Study, StudyError, check_raters, clips_folder


def label(options: argparse.Namespace, config: Config) -> int:
    """Serve the page until Ctrl-C; returns the exit code."""
    check_raters(options.raters)
    answers = open_study(options, config)
    if answers.cut_bytes:
        print(f"note: {options.output} ended in half a line, which was cut off")
    labeling = Labeling(answers, options.raters)
    server = build_server(labeling.app(options.allow_host), options.port)
    listener, base = listen(server)
    study = answers.study
    print(
        f"{len(study.pairs)} pairs of {', '.join(map(terminal_text, study.systems))}; "
        f"answers go to {options.output}. Ctrl-C ends; the same command continues."
    )
    for rater, address in addresses(labeling, base).items():
        print(f"{terminal_text(rater)}: {address}", flush=True)
    with suppress(KeyboardInterrupt):  # uvicorn raises it again after its own shutdown
        server.run(sockets=[listener])
    answers.close()
    print(f"python -m sage_grpo.tools.prefer result {options.output}")
    return DONE


def open_study(options: argparse.Namespace, config: Config) -> AnswersFile:
    """The study of the output file, or a new one."""
    if not options.output.exists():
        return AnswersFile(options.output, new_study(options, config))
    answers = AnswersFile(options.output)
    if options.questions != answers.study.questions:
        answers.close()
        raise StudyError(
            f"{options.output} asks {','.join(answers.study.questions)}, "
            f"not {','.join(options.questions)}; give another --output"
        )
    return answers


def new_study(options: argparse.Namespace, config: Config) -> Study:
    """Collect and blind the clips, and draw the pairs."""
    if not options.sources:
        raise ConfigError(f"{options.output} does not exist; name what to compare")
    folder = clips_folder(options.output)
    systems, sourced = collect(
        options.sources,
        config,
        seeds=options.seeds,
        reward=options.active,
        folder=folder / "sampled",
    )
    clips = [clip for _, clip in sourced]
    possible = candidates(clips)
    if options.active:
        names = score_names(sourced[0][1].scores)
        pairs = least_certain(clips, possible, options.pairs, names)
    else:
        pairs = draw(clips, possible, options.pairs, options.seed)

    used = sorted({index for pair in pairs for index in pair})
    places = {index: place for place, index in enumerate(used)}
    names_in_folder = blind_copies([sourced[index][0] for index in used], folder, secret_seed())
    return Study(
        systems=systems,
        questions=options.questions,
        clips=tuple(
            replace(clips[index], file=name)
            for index, name in zip(used, names_in_folder, strict=True)
        ),
        pairs=tuple((places[a], places[b]) for a, b in pairs),
        repeat=options.repeat,
        seed=options.seed,
        ordered=bool(options.active),
        created=time.strftime("%FT%T%z"),
    )


def score_names(scores: Sequence[str]) -> list[str]:
    """The scores that make up a reward: all but held-out ones."""
    return [name for name in scores if not name.startswith("held-out ")]


def secret_seed() -> int:
    """The seed for numbering clips, which must not be derivable from the study's public seed."""
    return random.SystemRandom().getrandbits(64)
