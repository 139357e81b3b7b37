"""Checks every command in the docs: do the files and flags exist, and does it run?

    python -m tests.check_commands            checks files and flags of all commands, in seconds
    python -m tests.check_commands --run      also runs those that need neither GPU nor weights, page by page

A command is in an indented or fenced block and begins with make, bash, python, torchrun or one of our scripts.
Run this from the repository root, like every command in the docs.
"""

import argparse
import contextlib
import importlib.util
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = (
    "*.md",
    "docs/*.md",
    "research/*.md",
    "research/benchmarks/*.md",
    "research/studies/*.md",
    "assets/tiny/README.md",
)
PROGRAMS = (
    r"make|bash|sbatch|(?:\.venv/bin/)?(?:python|torchrun)|\./?\S+\.sh|(post_train|generate)\.py"
)
STARTS = rf"(?:[A-Z_]+=\S+ )*({PROGRAMS})\b"
OURS = r"(configs|assets|scripts|research/(?!benchmarks)\w+|docs|tests)/[\w./-]+"  # results are put into benchmarks
NOT_RUN = {  # why a command is only read
    r"^(post_train|generate)\.py|\.\.\.|FILE|RUN|OURS|GOOD_CLIPS|FOLDER|\[any flag|\bN\b": "is a pattern",
    r"download_weights": "needs the network",
    r"^(?!.*tools\.plan).*(hunyuan15|ckpts|videoalign|nproc_per_node 8|run_|multinode|sbatch)": "needs weights or GPUs",
    r"research[./](benchmarks|tiny)\b|-m tests\.(fuzz|mutants\.run)\b": "needs a GPU or many minutes",
    r"studies\.(ablate (?!--list)|second_edition (?!--list)|learning|diagnosis)": "needs a GPU or many minutes",
    r"studies\.(page|readme_figures|damage_study)": "would draw the figures of the pages",
    r"my_(reward|sde)\.py": "needs the file that the page shows",
    r"tools\.prefer|research\.people|demo-people": "needs people, or many minutes",
    r"tools\.watch": "serves until it is stopped",
    r"tools\.publish": "needs an account on the hub",
    r"make (test|lint|golden|chaos|figures)|-m pytest|reward_server": "is run elsewhere, or never ends",
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", action="store_true", help="run what can run here")
    options = parser.parse_args(arguments)

    pages = [page for pattern in PAGES for page in sorted(ROOT.glob(pattern))]
    documented = [(page, command) for page in pages for command in commands(page)]
    problems = [(page, command, problem(command)) for page, command in documented]
    wrong = [
        f"{page.name}: {command}\n    {sentence}"
        for page, command, sentence in problems
        if sentence
    ]
    print(f"{len(documented)} commands, {len(wrong)} wrong", *wrong, sep="\n")
    if wrong or not options.run:
        return int(bool(wrong))

    unique = dict.fromkeys(command for _, command in documented)
    failed = [command for command in unique if not executed(command)]
    return int(bool(failed))


def commands(page: Path) -> Iterator[str]:
    """The commands of a page, each on one line, without comments."""
    text = page.read_text(encoding="utf-8")
    text = re.sub(r"```(?:python|yaml)\n.*?```", "", text, flags=re.DOTALL)
    fenced_blocks = re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)
    fenced_lines = {line for block in fenced_blocks for line in block.splitlines()}
    for line in text.replace("\\\n", " ").splitlines():
        command = re.sub(r"^\$ ", "", line.strip())
        in_block = line.startswith("    ") or line in fenced_lines
        if in_block and re.match(STARTS, command):
            without_comment = re.split(r"\s#|\s{3,}\(", command)[0]
            yield " ".join(without_comment.split())


def problem(command: str) -> str:
    """What is wrong with a command, or nothing."""
    words = [
        word for word in shlex.split(command.replace("...", "")) if not re.match(r"[A-Z_]+=", word)
    ]
    if words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return "" if words[1] in targets else f"the Makefile has no {words[1]}"

    programs = [i for i, word in enumerate(words) if word.endswith((".py", ".sh")) or word == "-m"]
    if not programs:
        return ""
    name, *rest = words[programs[0] :]
    if name == "-m":
        name, *rest = rest
        if not is_module(name):
            return f"there is no module {name}"
    elif not (ROOT / name).is_file():
        return f"there is no {name}"

    missing = [word for word in rest if re.fullmatch(OURS, word) and not (ROOT / word).exists()]
    if missing:
        return f"there is no {missing[0]}"
    is_script = name.endswith((".py", ".sh"))
    is_ours = is_script or (ROOT / name.split(".")[0]).is_dir()
    if not is_ours:
        return ""
    known = flags_of(name)
    flags = [word.split("=")[0] for word in rest if word.startswith("--")]
    unknown = [flag for flag in flags if flag not in known]
    return f"{name} has no {unknown[0]}" if unknown else ""


def is_module(name: str) -> bool:
    """Whether `python -m name` finds something to run."""
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:  # a package
            spec = importlib.util.find_spec(f"{name}.__main__")
    except ModuleNotFoundError:  # what it is in does not exist
        return False
    return spec is not None


@cache
def flags_of(name: str) -> frozenset[str]:
    """The flags that a script or module takes, from its help, or from the source of a shell script."""
    if name.endswith(".sh"):
        source = (ROOT / name).read_text()
        return frozenset(re.findall(r"--\w+", source)) | flags_of("post_train.py")
    printed = io.StringIO()
    argv = sys.argv
    sys.argv = [name, "--help"]
    # a module may be imported already
    quiet = warnings.catch_warnings(action="ignore", category=RuntimeWarning)
    try:
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit), quiet:
            if name.endswith(".py"):
                runpy.run_path(str(ROOT / name), run_name="__main__")
            else:
                runpy.run_module(name, run_name="__main__", alter_sys=True)
    finally:
        sys.argv = argv
    flags = frozenset(re.findall(r"--\w+", printed.getvalue()))
    takes_all = re.search(r"flags?\s+(?:are\s+those\s+)?of\s+`?post_train", printed.getvalue())
    return flags | flags_of("post_train.py") if takes_all else flags


def executed(command: str) -> bool:
    """Run a command in the repository with its .venv, and tell how it went."""
    reasons = [reason for pattern, reason in NOT_RUN.items() if re.search(pattern, command)]
    if reasons:
        print(f"  --        {command}: {reasons[0]}", flush=True)
        return True

    start = time.monotonic()
    environment = os.environ | {"PATH": f"{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    verdict = "ok" if done.returncode == 0 else "FAILED"
    print(f"  {verdict:<6} {time.monotonic() - start:4.0f} s  {command}", flush=True)
    if done.returncode:
        print(done.stdout[-1000:], done.stderr[-3000:])
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
