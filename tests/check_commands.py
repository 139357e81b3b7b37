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
STARTS = r"(?:[A-Z_]+=\S+ )*(make|bash|sbatch|(?:\.venv/bin/)?(?:python|torchrun)|\./?\S+\.sh|(post_train|generate)\.py)\b"
OURS = r"(configs|assets|scripts|research/(?!benchmarks)\w+|docs|tests)/[\w./-]+"  # results are put into benchmarks
NOT_RUN = {  # why a command is only read
    r"^(post_train|generate)\.py|\.\.\.|FILE|RUN|OURS|GOOD_CLIPS|FOLDER|\[any flag|\bN\b": "is a pattern",
    r"download_weights": "needs the network",
    r"^(?!.*tools\.plan).*(hunyuan15|ckpts|videoalign|nproc_per_node 8|run_|multinode|sbatch)": "needs weights or GPUs",
    r"-m (research\.(benchmarks|tiny)|tests\.fuzz)\b|studies\.(ablate (?!--list)|learning)": "needs a GPU or many minutes",
    r"studies\.(page|readme_figures)": "would draw the figures of the pages",
    r"make (test|lint|golden|chaos|figures)|-m pytest|reward_server": "is run elsewhere, or never ends",
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", action="store_true", help="run what can run here")
    run = parser.parse_args(arguments).run
    found = [
        (page, command)
        for pattern in PAGES
        for page in sorted(ROOT.glob(pattern))
        for command in commands(page)
    ]
    wrong = [
        f"{page.name}: {command}\n    {text}"
        for page, command in found
        if (text := problem(command))
    ]
    print(f"{len(found)} commands, {len(wrong)} wrong", *wrong, sep="\n")
    if run and not wrong:
        wrong = [
            command
            for command in dict.fromkeys(command for _, command in found)
            if not executed(command)
        ]
    return int(bool(wrong))


def commands(page: Path) -> Iterator[str]:
    """The commands of a page, each on one line, without comments."""
    text = re.sub(
        r"```(?:python|yaml)\n.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL
    )
    fenced = {
        line
        for block in re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)
        for line in block.splitlines()
    }
    for line in text.replace("\\\n", " ").splitlines():
        shown = re.sub(r"^\$ ", "", line.strip())
        if (line.startswith("    ") or line in fenced) and re.match(STARTS, shown):
            yield " ".join(re.split(r"\s#|\s{3,}\(", shown)[0].split())


def problem(command: str) -> str:
    """What is wrong with a command, or nothing."""
    words = [
        word for word in shlex.split(command.replace("...", "")) if not re.match(r"[A-Z_]+=", word)
    ]
    if words[0] == "make":
        targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return "" if words[1] in targets else f"the Makefile has no {words[1]}"
    place = next(
        (i for i, word in enumerate(words) if word.endswith((".py", ".sh")) or word == "-m"), None
    )
    if place is None:
        return ""
    name, *rest = words[place:]
    if name == "-m":
        name, *rest = rest
        if not is_module(name):
            return f"there is no module {name}"
    elif not (ROOT / name).is_file():
        return f"there is no {name}"
    missing = [word for word in rest if re.fullmatch(OURS, word) and not (ROOT / word).exists()]
    if missing:
        return f"there is no {missing[0]}"
    if not (ROOT / name.split(".")[0]).is_dir() and not name.endswith((".py", ".sh")):
        return ""  # somebody else's module
    known = flags_of(name)
    unknown = [
        flag for word in rest if word.startswith("--") and (flag := word.split("=")[0]) not in known
    ]
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
    out, argv = io.StringIO(), sys.argv
    sys.argv = [name, "--help"]
    try:
        quiet = warnings.catch_warnings(
            action="ignore", category=RuntimeWarning
        )  # the module is imported already
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit), quiet:
            if name.endswith(".py"):
                runpy.run_path(str(ROOT / name), run_name="__main__")
            else:
                runpy.run_module(name, run_name="__main__", alter_sys=True)
    finally:
        sys.argv = argv
    own = frozenset(re.findall(r"--\w+", out.getvalue()))
    takes_all = re.search(r"flags?\s+(?:are\s+those\s+)?of\s+`?post_train", out.getvalue())
    return own | flags_of("post_train.py") if takes_all else own


def executed(command: str) -> bool:
    """Run a command in the repository with its .venv, and tell how it went."""
    why = next((why for pattern, why in NOT_RUN.items() if re.search(pattern, command)), None)
    if why:
        print(f"  --        {command}: {why}", flush=True)
        return True
    begun = time.monotonic()
    environment = os.environ | {"PATH": f"{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    print(
        f"  {'ok' if done.returncode == 0 else 'FAILED':<6} {time.monotonic() - begun:4.0f} s  {command}",
        flush=True,
    )
    if done.returncode:
        print(done.stdout[-1000:], done.stderr[-3000:])
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
