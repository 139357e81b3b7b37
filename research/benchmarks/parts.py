"""Parts of a benchmark that each start programs: a time limit for each, and results that are written as they come.

A part that fails is recorded with its error, and the next one runs. Results are JSON, the page is made from them:
`--page_only` makes it again.
"""

import argparse
import datetime
import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parents[2]
ONE_GPU = ROOT / "research" / "benchmarks" / "one_gpu"
TAIL = 1500  # characters of a failed program's output that are kept
# noise in all steps and an update in each iteration, whatever a recipe has
ALL_STEPS = (
    "--sde_window all --same_init_noise False --tail_steps 0 --gradient_accumulation_steps 1"
)

Results = dict[str, Any]


class PartError(RuntimeError):
    """Why a part failed, with the end of the program's output, and what it found before that."""

    partial: Mapping[str, Any] = {}


def log(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


class Parts:
    """Runs parts one after the other, until the time is up."""

    def __init__(self, options: argparse.Namespace, page: Callable[[Results], str]) -> None:
        self.options = options
        self.page = page
        self.begun = time.monotonic()
        self.file = options.output.with_suffix(".json")
        self.results: Results = {"parts": {}}
        # Results of an earlier call with other parts are kept.
        continues = options.only or options.page_only
        if continues and self.file.is_file():
            self.results = json.loads(self.file.read_text())

    @property
    def time_left(self) -> float:
        """Seconds until the limit of the whole benchmark."""
        return self.options.limit - (time.monotonic() - self.begun)

    def run(self, name: str, limit: float, work: Callable[[float], Results]) -> Results | None:
        """The result of `work(limit)`, unless it fails or is not wanted."""
        if self.options.only and name not in self.options.only:
            return self.results["parts"].get(name)
        begin = time.monotonic()
        limit = min(limit, self.time_left)
        result: Results = {}
        try:
            if limit <= 0:
                raise PartError("no time left")
            result = work(limit)
        except Exception as error:  # of any kind: the next part must run
            if isinstance(error, PartError):
                result = dict(error.partial)
            result["error"] = f"{type(error).__name__}: {error}"
            log(f"{name} failed: {result['error']}")
        result["seconds"] = time.monotonic() - begin
        self.results["parts"][name] = result
        self.write()
        log(f"{name}: {result['seconds']:.0f} s, {self.time_left:.0f} s left")
        return None if "error" in result else result

    def write(self) -> None:
        """Write the results, and the page if it can be made of them."""
        self.file.write_text(json.dumps(self.results, indent=1) + "\n")
        try:
            self.options.output.write_text(self.page(self.results))
        except (KeyError, TypeError, ValueError, IndexError) as error:  # --page_only tries again
            log(f"{self.options.output} could not be made: {error!r}")

    def end(self) -> NoReturn:
        """Exit, with an error if a part failed."""
        failed = [name for name, part in self.results["parts"].items() if "error" in part]
        sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


def add_arguments(parser: argparse.ArgumentParser, names: Sequence[str], limit: float) -> None:
    """Flags that all such benchmarks share."""
    script = getattr(sys.modules["__main__"], "__file__", None) or ""
    kind = Path(script).stem.replace("_", "-")
    page = Path(f"research/benchmarks/results/{datetime.date.today()}-{kind}.md")
    scratch = Path("outputs", kind)
    add = parser.add_argument
    add("--output", type=Path, default=page, help="page; its results are beside it, as .json")
    add("--scratch", type=Path, default=scratch, help="folder for models and runs")
    add("--only", nargs="+", choices=names, help="parts to run; others keep their earlier results")
    add("--limit", type=float, default=limit, help="seconds for all parts (default: %(default)s)")
    add("--rehearse", action="store_true", help="try the script with small models on the CPU")
    add("--page_only", action="store_true", help="make the page again from the results")


def begin(
    about: str,
    names: Sequence[str],
    page: Callable[[Results], str],
    arguments: Sequence[str] | None,
    models: Sequence[str] = (),
    writes: bool = False,
) -> tuple[argparse.Namespace, "Parts"]:
    """Read the command line of a benchmark; with --page_only, make the page and exit.

    models: values of `--model`, the default first, for benchmarks that measure one of several.
    writes: whether the benchmark writes weights first, and so has `--write_only`.
    """
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser, names, 540)
    if models:
        help_text = "what to measure (default: %(default)s)"
        parser.add_argument("--model", choices=models, default=models[0], help=help_text)
    if writes:
        help_text = "write the weights and measure nothing"
        parser.add_argument("--write_only", action="store_true", help=help_text)
    options = parser.parse_args(arguments)
    parts = Parts(options, page)
    if options.page_only:
        parts.write()
        sys.exit(0)
    stop_on_signal()
    options.scratch.mkdir(parents=True, exist_ok=True)
    return options, parts


class Program:
    """A program in its own process group, with its output in a file."""

    def __init__(self, command: Iterable[object], log: Path, **settings: object) -> None:
        """settings: environment variables."""
        self.command = [str(word) for word in command]
        self.log = log
        self.begun = time.time()
        log.parent.mkdir(parents=True, exist_ok=True)

        folders = [str(ONE_GPU), str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        environment = dict(os.environ)
        environment["PYTHONUNBUFFERED"] = "1"
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
        environment |= {name: str(value) for name, value in settings.items()}
        with log.open("w") as file:
            file.write(f"{shlex.join(self.command)}\n")
            file.flush()
            self.process = subprocess.Popen(
                self.command,
                cwd=ROOT,
                env=environment,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    def wait(self, limit: float, codes: Sequence[int] = (0,)) -> int:
        """Wait for the end; any exit code but `codes` is an error, and so is a longer wait than `limit`."""
        try:
            code = self.process.wait(limit)
        except subprocess.TimeoutExpired:
            self.kill()
            raise PartError(f"took more than {limit:.0f} s: {self.tail()}") from None
        except BaseException:  # this process is told to end
            self.kill()
            raise
        if code not in codes:
            raise PartError(f"exit code {code}: {self.tail()}")
        return code

    def kill(self) -> None:
        """Kill the program and all that it started."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self.process.wait()

    def tail(self) -> str:
        """The end of the output."""
        text = re.sub(r"[^\n]*\r", "", self.log.read_text(errors="replace"))  # progress bars
        return text[-TAIL:]


def recorded(folder: Path) -> list[dict[str, Any]]:
    """The lines of `one_gpu/phase_records.py`, by time; the last line of a killed process may be incomplete."""
    lines = []
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            try:
                lines.append(json.loads(line))
            except ValueError:
                continue
    return sorted(lines, key=lambda record: record["time"])


def host_gb(phases: Path) -> float:
    """The most host memory of any process, without mapped files."""
    return max((record.get("host_gb", 0.0) for record in recorded(phases)), default=0.0)


def metrics(run: Path) -> list[dict[str, Any]]:
    """The training iterations of a run; of one that was repeated after a restart, the last."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return list({line["step"]: line for line in lines if line["kind"] == "train"}.values())


def python(*words: object) -> list[str]:
    """A command that runs this interpreter."""
    return [sys.executable, *map(str, words)]


def about(launcher: str = "") -> dict[str, Any]:
    """Hardware, versions and this command. Another process asks the GPU, so that this one needs none of its memory."""
    command = python("-m", "research.benchmarks.parts")
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    machine = json.loads(answer.stdout.splitlines()[-1])
    return machine | {"command": launcher + shlex.join(["python", *sys.orig_argv[1:]])}


def versions() -> dict[str, Any]:
    """Hardware and versions, as seen by this process."""
    import torch

    device = f"CPU ({platform.machine()})"
    driver = ""
    nccl = "none, gloo instead"
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    packages = ("diffusers", "transformers", "peft", "safetensors")
    return {
        "date": str(datetime.date.today()),
        "device": device,
        "driver": driver,
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "nccl": nccl,
        "python": platform.python_version(),
        "packages": {name: version(name) for name in packages},
    }


def heading(title: str, about: Mapping[str, Any]) -> list[str]:
    """First lines of a page: hardware, versions, command."""
    driver = f", driver {about['driver']}" if about["driver"] else ""
    packages = ", ".join(f"{name} {number}" for name, number in about["packages"].items())
    return [
        f"# {title}, {about['device']}, {about['date']}",
        "",
        f"    {about['command']}",
        "",
        f"One {about['device']}{driver}, {about['cores']} CPU cores; torch {about['torch']}, NCCL {about['nccl']}, "
        f"{packages}, Python {about['python']}. Random weights.",
        "",
    ]


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """A Markdown table; numbers are right-aligned."""
    lines = [f"| {' | '.join(head)} |", f"|---|{'---:|' * (len(head) - 1)}"]
    for row in rows:
        lines.append(f"| {' | '.join(str(cell) for cell in row)} |")
    return lines


def wrapped(lines: Iterable[str]) -> str:
    """A page of these lines, with its sentences in lines of at most 120 characters."""
    page = []
    in_code = False
    for line in lines:
        if line.startswith("```"):
            in_code = not in_code
        if not in_code and not line.startswith(("|", "    ", "#", "```")):
            indent = "  " if line.startswith("- ") else ""
            line = textwrap.fill(line, 120, subsequent_indent=indent)
        page.append(line)
    return "\n".join(page).rstrip() + "\n"


def failure(name: str, part: Mapping[str, Any] | None) -> list[str]:
    """What a page says of a part without a result."""
    if part is None:
        return [f"{name}: not run.", ""]
    sentence = f"{name}: failed after {part['seconds']:.0f} s."
    return [sentence, "", "```", str(part["error"]).strip(), "```", ""]


def stop_on_signal() -> None:
    """Let SIGTERM end this process as an exception does, so that programs are killed and results kept."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped by a signal"))


if __name__ == "__main__":
    print(json.dumps(versions()))
