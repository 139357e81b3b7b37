"""Do the tests notice mistakes? Applies each mistake of `table.py` to a copy of the repository and runs its tests.

    python -m tests.mutants.run --check_rows                             # seconds: does every row still fit the code?
    python -m tests.mutants.run --jobs 16 --output FILE.md               # all of them
    python -m tests.mutants.run --only "EMA decay" "lock not released"   # some, by a part of their names

The tests of a row run first as in `make test`, without slow ones; if these pass, as in `make test-all`. A mistake that
both leave unnoticed has survived: write a test for it. Exit code 0: every mistake was caught.
"""

import argparse
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import cache_from_source
from pathlib import Path
from queue import Queue
from typing import TypeVar

from tests.mutants.table import MISTAKES, Mistake

ROOT = Path(__file__).parents[2]
T = TypeVar("T")

# outcomes
FAST = "make test"
SLOW = "only make test-all"
SURVIVED = "survived"
STALE = "stale"
UNCLEAN = "tests fail without it"
CAUGHT = (FAST, SLOW)

# folders that a copy of the repository does not need
WRITTEN_BY_TOOLS = {
    ".git",
    ".venv",
    "outputs",
    "__pycache__",
    ".pytest_cache",
    ".ruff_cache",
    ".mypy_cache",
    ".hypothesis",
}

# exit codes of pytest
PASSED = 0
NO_TESTS = 5


@dataclass(frozen=True)
class Verdict:
    """How pytest ended."""

    code: int
    first_failure: str  # name of the first test that failed, or what else went wrong

    @property
    def failed(self) -> bool:
        return self.code not in (PASSED, NO_TESTS)


@dataclass(frozen=True)
class Result:
    """What became of a mistake."""

    mistake: Mistake
    outcome: str
    evidence: str
    seconds: float


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m tests.mutants.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--jobs", type=int, default=1, help="mistakes that are tried at a time")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="parts of names, in any case")
    parser.add_argument("--output", type=Path, metavar="FILE.md", help="where the table is written")
    parser.add_argument(
        "--check_clean",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="first run all named tests without any mistake",
    )
    parser.add_argument(
        "--check_rows", action="store_true", help="only check that every row fits the code"
    )
    parser.add_argument(
        "--timeout", type=float, default=1800, help="seconds after which a test run counts as hung"
    )
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        parser.error(f"--jobs is {options.jobs}; at least 1 is needed")

    mistakes = chosen(options.only)
    if not mistakes:
        parser.error(f"--only {' '.join(options.only)}: no mistake has such a name")
    if options.check_rows:
        problems = [f"{mistake.name}: {text}" for mistake in mistakes if (text := misfit(mistake))]
        print(*problems, f"{len(mistakes)} rows, {len(problems)} stale", sep="\n")
        return int(bool(problems))

    with tempfile.TemporaryDirectory(prefix="mutants-") as home:
        folders = [Path(home) / str(number) for number in range(min(options.jobs, len(mistakes)))]
        copies = [Copy(folder, options.timeout) for folder in folders]
        results = try_all(mistakes, copies, options.check_clean, options.output)
    print(f"\n{totals(results)}")
    return int(any(result.outcome not in CAUGHT for result in results))


def chosen(parts: Sequence[str] | None) -> list[Mistake]:
    if not parts:
        return list(MISTAKES)
    return [
        mistake
        for mistake in MISTAKES
        if any(part.lower() in mistake.name.lower() for part in parts)
    ]


def misfit(mistake: Mistake, root: Path = ROOT) -> str:
    """Why a row cannot be tried any more; empty if it can."""
    for name in (mistake.file, *mistake.tests):
        if not (root / name).is_file():
            return f"there is no {name}"
    count = (root / mistake.file).read_text().count(mistake.old)
    if count != 1:
        return f"{mistake.file} has its old text {count} times"
    return ""


class Copy:
    """A copy of the repository, in which one mistake is made at a time."""

    def __init__(self, folder: Path, timeout: float) -> None:
        self.root = folder / "repository"
        self.scratch = folder / "tmp"
        self.timeout = timeout
        for name in tracked_files():
            target = self.root / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target)

    @contextmanager
    def mutated(self, mistake: Mistake):
        """Context in which the mistake is in the code."""
        path = self.root / mistake.file
        original = path.read_text()
        write_source(path, original.replace(mistake.old, mistake.new))
        try:
            yield
        finally:
            write_source(path, original)

    def run(self, selection: Sequence[str], slow: bool) -> Verdict:
        """Run some tests up to the first failure."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        command += ["--basetemp", str(self.scratch), *selection]
        if not slow:
            command += ["-m", "not slow"]
        environment = os.environ | {"PYTHONPATH": str(self.root), "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            command,
            cwd=self.root,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # so that ranks of a hung test end with it
        )
        try:
            output, _ = process.communicate(timeout=self.timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return Verdict(-signal.SIGKILL, f"no end within {self.timeout:g} s")
        return Verdict(process.returncode, first_failure(output, process.returncode))


def tracked_files() -> list[str]:
    """Files of the repository and new ones that git does not ignore; without git, all but what tools write."""
    names = git("ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    # a file that was deleted and not committed is still listed
    files = [name for name in names if name and (ROOT / name).is_file()]
    if files:
        return files
    paths = [path for path in ROOT.rglob("*") if path.is_file()]
    return [
        str(path.relative_to(ROOT))
        for path in paths
        if not WRITTEN_BY_TOOLS.intersection(path.relative_to(ROOT).parts)
    ]


def git(*arguments: str) -> str:
    """What git answers; empty if this is no repository, or there is no git."""
    if shutil.which("git") is None:
        return ""
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout


def write_source(path: Path, text: str) -> None:
    """Replace a Python file and drop its bytecode, which Python would still use for one of the same second and size."""
    path.write_text(text)
    Path(cache_from_source(str(path))).unlink(missing_ok=True)


def first_failure(output: str, code: int) -> str:
    """The first test of pytest's summary that failed; else its last line."""
    if code == PASSED:
        return ""
    if code == NO_TESTS:
        return "no test is selected"
    match = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", output, re.MULTILINE)
    if match:
        return match[1]
    lines = [line for line in output.splitlines() if line.strip()]
    return lines[-1] if lines else f"pytest ended with {code}"


def try_all(
    mistakes: Sequence[Mistake], copies: Sequence[Copy], check_clean: bool, output: Path | None
) -> list[Result]:
    """Results in the order of the table; they are printed, and written to `output`, as they come."""
    idle: Queue[Copy] = Queue()
    for copy in copies:
        idle.put(copy)

    def with_copy(work: Callable[[Copy], T]) -> T:
        copy = idle.get()
        try:
            return work(copy)
        finally:
            idle.put(copy)

    failures: dict[tuple[str, ...], str] = {}  # of selections that fail without a mistake
    results: dict[str, Result] = {}

    def check(selection: tuple[str, ...]) -> None:
        verdict = with_copy(lambda copy: copy.run(selection, slow=True))
        if verdict.code != PASSED:
            failures[selection] = verdict.first_failure
            print(f"fails without a mistake: {verdict.first_failure}", flush=True)

    def attempt(mistake: Mistake) -> None:
        failure = failures.get(mistake.selection)
        if failure:
            result = Result(mistake, UNCLEAN, failure, 0.0)
        else:
            result = with_copy(lambda copy: try_one(mistake, copy))
        results[mistake.name] = result
        print(f"{result.outcome}: {mistake.name} ({result.seconds:.0f} s)", flush=True)

    with ThreadPoolExecutor(len(copies)) as pool:
        if check_clean:
            selections = dict.fromkeys(mistake.selection for mistake in mistakes)
            print(f"running {len(selections)} selections of tests without a mistake", flush=True)
            list(pool.map(check, selections))
        for attempted in as_completed([pool.submit(attempt, mistake) for mistake in mistakes]):
            attempted.result()
            done = [results[mistake.name] for mistake in mistakes if mistake.name in results]
            if output:
                output.write_text(page(done, len(mistakes)))
    return [results[mistake.name] for mistake in mistakes]


def try_one(mistake: Mistake, copy: Copy) -> Result:
    started = time.monotonic()
    problem = misfit(mistake, copy.root)
    if problem:
        return Result(mistake, STALE, problem, 0.0)

    outcome = SURVIVED
    evidence = ""
    with copy.mutated(mistake):
        for name, slow in ((FAST, False), (SLOW, True)):
            verdict = copy.run(mistake.selection, slow)
            if verdict.failed:
                outcome = name
                evidence = verdict.first_failure
                break
    return Result(mistake, outcome, evidence, time.monotonic() - started)


def totals(results: Sequence[Result]) -> str:
    counts = Counter(result.outcome for result in results)
    shown = [f"{counts[outcome]} {outcome}" for outcome in (*CAUGHT, SURVIVED, STALE, UNCLEAN)]
    return f"{len(results)} mistakes: {', '.join(shown)}"


def page(results: Sequence[Result], planned: int) -> str:
    """The results so far as Markdown."""
    commit = git("describe", "--always", "--dirty").strip() or "unknown"
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    lines = [
        "# Deliberate mistakes, and what catches them",
        "",
        f"{time.strftime('%Y-%m-%d')}, commit {commit}, {machine}.",
        "The rows are those of `tests/mutants/table.py`; `python -m tests.mutants.run` tries them.",
        "",
        "| mistake | file | caught by | first failing test | s |",
        "|---|---|---|---|---:|",
    ]
    for result in results:
        cells = (
            result.mistake.name,
            f"`{result.mistake.file}`",
            result.outcome,
            result.evidence.replace("|", "\\|"),
            f"{result.seconds:.0f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    unfinished = (
        f" {planned - len(results)} are still to be tried." if len(results) < planned else ""
    )
    lines += ["", f"{totals(results)}.{unfinished}", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
