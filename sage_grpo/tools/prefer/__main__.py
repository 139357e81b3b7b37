"""People in the loop: blind comparison in a browser, its result, and a reward learned from it.

    python -m sage_grpo.tools.prefer label RUN_A RUN_B --output prefs.jsonl        compare two runs, blindly
    python -m sage_grpo.tools.prefer label RUN --active videoalign --output prefs.jsonl       pairs of one model
    python -m sage_grpo.tools.prefer result prefs.jsonl                            who wins, and how sure is that?
    python -m sage_grpo.tools.prefer learn prefs.jsonl --base ckpts/VideoReward --output ckpts/OurReward

label SOURCE ... --output FILE [--raters NAME ...] [--questions LIST] [--pairs N] [--repeat X] [--active REWARD]
      [--seeds N ...] [--study_seed N] [--port N] [--allow_host NAME ...], and every flag of post_train.py
result FILE [--output FILE]
learn FILE --base FOLDER --output FOLDER [--method heads|lora] [--rank N] [--epochs N] [--learning_rate X] [--batch N]
      [--holdout X] [--seed N] [--device NAME] [--even_if_worse]

Each command has its own --help.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from sage_grpo.config.command_line import answer_early, answering
from sage_grpo.config.fields import FIELDS, ConfigError, flag_info
from sage_grpo.tools.options import ToolParser

PROGRAM = "python -m sage_grpo.tools.prefer"

LABEL = """Serve the labeling page: two clips of one prompt side by side, names hidden, sides random.

    python -m sage_grpo.tools.prefer label outputs/run_a outputs/run_b --output prefs.jsonl --raters ann bob

SOURCEs come first: runs (their newest checkpoints), checkpoints, a model folder (its own weights), or folders of clips
that generate.py wrote. With one SOURCE, its own clips of a prompt are compared; without any, an existing study is
continued. Clips of models are sampled first, with the settings of the first run's configuration; every flag of
post_train.py changes them. A run may come from others, so prompts and caches are not taken from there by themselves:
--validation_prompts names the prompts, or --config RUN/config.yaml takes everything.

The page is served on this machine alone; each rater has a secret address. Over SSH: ssh -L 8920:127.0.0.1:8920 HOST.
"""


def questions(text: str) -> tuple[str, ...]:
    """The questions that a text names, such as `overall` or `vq,ta`."""
    names = tuple(name.strip() for name in text.lower().split(","))
    known = ("vq", "mq", "ta")
    is_overall = names == ("overall",)
    if not is_overall and (len(set(names)) < len(names) or not set(names) <= set(known)):
        raise argparse.ArgumentTypeError(f"{text!r} is not overall, or some of vq,mq,ta")
    return names


def share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not a share from 0 to 1")
    return value


def answers_file(text: str) -> Path:
    """The path of an answers file, beside which pages and JSON of the same name are written."""
    path = Path(text)
    if path.suffix != ".jsonl":
        raise argparse.ArgumentTypeError(
            f"{text} does not end in .jsonl, so a page might replace it; rename it"
        )
    return path


def page_file(text: str) -> Path:
    path = Path(text)
    if path.suffix != ".html":
        raise argparse.ArgumentTypeError(
            f"{text} does not end in .html; the JSON beside it would replace it, or the page the answers"
        )
    return path


# Folders of weights, which the configuration of a run may name. A run may come from others, and its other paths
# (prompts, caches, a judge's rubric) could be any file of the user.
FROM_RUN = ("pretrained_model_root", "reward_path")


def parse_label(arguments: Sequence[str]) -> Any:
    parser = ToolParser(f"{PROGRAM} label", LABEL)
    parser.usage = f"{PROGRAM} label [SOURCE ...] --output FILE [--FLAG VALUE ...]"
    add = parser.add_argument
    add("--output", type=answers_file, required=True, metavar="FILE", help="answers file, .jsonl")
    add(
        "--raters",
        nargs="+",
        metavar="NAME",
        default=["rater"],
        help="one address is made for each",
    )
    add(
        "--questions",
        type=questions,
        metavar="LIST",
        default="overall",
        help="overall: one answer per pair; or some of vq,mq,ta: picture, motion, text, as VideoAlign's labelers had",
    )
    add("--pairs", type=int, metavar="N", above=0, help="number of pairs (default: all)")
    add(
        "--repeat",
        type=share,
        metavar="X",
        default=0.1,
        help="share of pairs shown twice, sides swapped",
    )
    add(
        "--active",
        metavar="REWARD",
        help="score the clips by this reward, and show pairs first about which it is unsure",
    )
    add(
        "--seeds",
        type=int,
        nargs="+",
        metavar="N",
        help="one clip per prompt and seed (default: the prompt's own seed, or validation_global_seed)",
    )
    add(
        "--study_seed",
        type=int,
        metavar="N",
        dest="seed",
        default=0,
        help="seed of the choice of pairs; orders and sides are secret",
    )
    add("--port", type=int, metavar="N", default=8920, help="port on 127.0.0.1; 0: any free one")
    add(
        "--allow_host",
        nargs="+",
        metavar="NAME",
        default=[],
        help="name under which a tunnel or proxy shows the page, to rate on a phone",
    )
    # sources come first: the value of a flag of post_train.py would pass for one
    sources = [Path(word) for word in takewhile(lambda word: not word.startswith("-"), arguments)]
    words = list(arguments[len(sources) :])
    has_config = any(word.partition("=")[0] == "--config" for word in words)
    file = None if has_config else config_file(sources)
    not_from_file: list[str] = []
    if file is not None:
        words += ["--config", str(file)]
        not_from_file = [name for name in FIELDS if flag_info(name).is_path]
        not_from_file = [name for name in not_from_file if name not in FROM_RUN]
    options, config = parser.parse_with_config(words, not_from_file)
    options.sources = sources
    options.config_file = file
    return options, config


def config_file(sources: Sequence[Path]) -> Path | None:
    """The configuration of the first run among the sources: of a run folder, or of a checkpoint's run.

    Other folders, such as a model's, have none that counts.
    """
    for source in sources:
        place = source.resolve()
        is_checkpoint = place.parent.name == "checkpoints" and place.name.startswith("step-")
        run = place.parents[1] if is_checkpoint else source
        is_run = (run / "checkpoints").is_dir() and not (run / "model_index.json").exists()
        if is_run and (run / "config.yaml").is_file():
            return run / "config.yaml"
    return None


RESULT = """Write the result of a study: win rates with intervals, agreement of raters and rewards, disputed clips.

    python -m sage_grpo.tools.prefer result prefs.jsonl

JSON is written beside the page. The report and the model card of a run show RUN/preferences.json.
"""


def parse_result(arguments: Sequence[str]) -> argparse.Namespace:
    parser = ToolParser(f"{PROGRAM} result", RESULT)
    parser.add_argument(
        "answers", type=answers_file, metavar="FILE", help="answers file that `label` wrote"
    )
    parser.add_argument(
        "--output",
        type=page_file,
        metavar="FILE",
        help="page to write, .html (default: beside the answers, with the same name)",
    )
    return parser.parse_args(arguments)


LEARN = """Fine-tune VideoAlign on the answers of a study, by Bradley-Terry with ties: its heads, or also LoRA.

    python -m sage_grpo.tools.prefer learn prefs.jsonl --base ckpts/VideoReward --output ckpts/OurReward

Heads weigh what the base perceives, and take seconds after one forward per clip. --method lora also trains an adapter
of the language model, which is merged into the weights; on a CPU that is for small models. Whole prompts are held out;
the new reward is written only if it judges them better than the base does. The output is a folder in VideoAlign's
format that --reward_path takes. A second call continues one that was killed. Exit code 1: the reward was not better
and was not written.
"""

# flags that only --method lora has, and their defaults
ADAPTER = {
    "rank": 16,
    "epochs": 8,
    "learning_rate": 2e-4,
    "batch": 16,
}


def parse_learn(arguments: Sequence[str]) -> argparse.Namespace:
    parser = ToolParser(f"{PROGRAM} learn", LEARN)
    add = parser.add_argument
    add("answers", type=Path, metavar="FILE", help="answers file that `label` wrote")
    add(
        "--base",
        type=Path,
        required=True,
        metavar="FOLDER",
        help="VideoAlign's folder to start from",
    )
    add("--output", type=Path, required=True, metavar="FOLDER", help="folder to write")
    add(
        "--method",
        choices=("heads", "lora"),
        default="heads",
        help="heads: the reward heads alone; lora: an adapter of the language model, too",
    )
    # without defaults of argparse, so that a flag that is given can be told from one that is not
    for name, kind, metavar, text in (
        ("rank", int, "N", "rank of the adapter"),
        ("epochs", int, "N", "epochs of the adapter at most"),
        ("learning_rate", float, "X", "learning rate of the adapter"),
        ("batch", int, "N", "pairs per step of the adapter"),
    ):
        about = f"{text} (default: {ADAPTER[name]})"
        add(f"--{name}", type=kind, metavar=metavar, above=0, help=about)
    add(
        "--holdout",
        type=held_out_share,
        metavar="X",
        default=0.2,
        help="share of the prompts that are held out",
    )
    add(
        "--seed",
        type=int,
        metavar="N",
        default=0,
        help="seed of the held-out prompts and of the adapter",
    )
    add("--device", metavar="NAME", help="device of the reward (default: a GPU if there is one)")
    add(
        "--even_if_worse",
        action="store_true",
        help="write a reward that is not better than the base, too",
    )
    options = parser.parse_args(arguments)
    for name, default in ADAPTER.items():
        value = getattr(options, name)
        if value is None:
            setattr(options, name, default)
        elif options.method != "lora":
            raise ConfigError(
                f"--{name} is {value:g}, but --method {options.method} trains no adapter: "
                "leave it out, or give --method lora"
            )
    return options


def held_out_share(text: str) -> float:
    value = float(text)
    if not 0.05 <= value <= 0.5:
        raise argparse.ArgumentTypeError(f"{text} is not a share from 0.05 to 0.5")
    return value


PARSERS: dict[str, Callable[[Sequence[str]], Any]] = {
    "label": parse_label,
    "result": parse_result,
    "learn": parse_learn,
}


def parse_arguments(arguments: Sequence[str] | None) -> tuple[str, Any]:
    """The command, and what its parser made of the other words."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words and words[0] in PARSERS:
        return words[0], PARSERS[words[0]](words[1:])
    parser = ToolParser(PROGRAM, __doc__)
    parser.add_argument("command", metavar="COMMAND", help=f"one of {', '.join(PARSERS)}")
    known = parser.parse_args(words)
    raise ConfigError(f"unknown command {known.command}; choose from {', '.join(PARSERS)}")


answer_early(__name__, parse_arguments)


@answering("prefer: ")
def main(arguments: Sequence[str] | None = None) -> int:
    command, parsed = parse_arguments(arguments)
    if command == "label":
        from sage_grpo.plugins import trust
        from sage_grpo.tools.prefer.label import label

        options, config = parsed
        trust(options.active)
        return label(options, config)
    if command == "result":
        from sage_grpo.tools.prefer.results import result

        return result(parsed)
    if command == "learn":
        from sage_grpo.tools.prefer.learn import learn

        return learn(parsed)
    raise AssertionError(command)


if __name__ == "__main__":
    sys.exit(main())
