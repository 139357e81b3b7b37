"""`label`: make a study, or continue one, and serve its page."""

import argparse
import random
import secrets
import socket
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import uvicorn
from starlette.applications import Starlette

from sage_grpo.config.fields import Config, ConfigError
from sage_grpo.escape import terminal_text
from sage_grpo.exit_codes import DONE
from sage_grpo.tools.gate import build_server, listen
from sage_grpo.tools.prefer.answers import AnswersFile, locked_clips
from sage_grpo.tools.prefer.blinding import blind_copies
from sage_grpo.tools.prefer.pairs import candidates, draw, least_certain
from sage_grpo.tools.prefer.server import Labeling, addresses
from sage_grpo.tools.prefer.sources import collect
from sage_grpo.tools.prefer.study import Study, StudyError, check_raters


def label(options: argparse.Namespace, config: Config) -> int:
    """Serve the page until Ctrl-C; returns the exit code."""
    check_raters(options.raters)
    # the port is taken before clips are sampled, which can take hours; what is served there follows
    server = build_server(Starlette(), options.port)
    listener, base = listen(server)
    with listener:
        answers = open_study(options, config)
        serve(answers, options, server, listener, base)
        answers.close()
    print(f"python -m sage_grpo.tools.prefer result {options.output}")
    return DONE


def serve(
    answers: AnswersFile,
    options: argparse.Namespace,
    server: uvicorn.Server,
    listener: socket.socket,
    base: str,
) -> None:
    """Serve the page of a study on a bound socket, whose address is `base`."""
    if answers.cut_bytes:
        print(f"note: {options.output} ended in half a line, which was cut off")
    labeling = Labeling(answers, options.raters)
    server.config.app = labeling.app(options.allow_host)
    study = answers.study
    print(
        f"{len(study.pairs)} pairs of {', '.join(map(terminal_text, study.systems))}; "
        f"answers go to {options.output}. Ctrl-C ends; the same command continues."
    )
    for rater, address in addresses(labeling, base).items():
        print(f"{terminal_text(rater)}: {address}", flush=True)
    with suppress(KeyboardInterrupt):  # uvicorn raises it again after its own shutdown
        server.run(sockets=[listener])


def open_study(options: argparse.Namespace, config: Config) -> AnswersFile:
    """The study of the output file, or a new one."""
    if not options.output.exists():
        if not options.sources:
            raise ConfigError(f"{options.output} does not exist; name what to compare")
        with locked_clips(options.output) as folder:
            if not options.output.exists():  # another call may have made it in the meantime
                return AnswersFile(options.output, new_study(options, config, folder))
    answers = AnswersFile(options.output)
    if options.questions != answers.study.questions:
        answers.close()
        raise StudyError(
            f"{options.output} asks {','.join(answers.study.questions)}, "
            f"not {','.join(options.questions)}; give another --output"
        )
    return answers


def new_study(options: argparse.Namespace, config: Config, folder: Path) -> Study:
    """Collect the clips, blind them in `folder`, and draw the pairs."""
    if options.config_file:
        print(
            f"settings come from {options.config_file}, except the paths of prompts and caches: "
            f"--config {options.config_file} takes these, too",
            flush=True,
        )
    systems, sourced, score_names = collect(
        options.sources,
        config,
        seeds=options.seeds,
        reward=options.active,
        folder=folder / "sampled",
    )
    clips = [clip for _, clip in sourced]
    possible = candidates(clips)
    if options.active:
        pairs = least_certain(clips, possible, options.pairs, score_names)
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
        secret=secrets.token_hex(16),
        ordered=bool(options.active),
        created=time.strftime("%FT%T%z"),
    )


def secret_seed() -> int:
    """The seed for numbering clips, which must not be derivable from the study's public seed."""
    return random.SystemRandom().getrandbits(64)
