"""Run the studies of research/studies/questions.py: many runs in parallel, each resumable, none repeated.

    python -m research.studies.ablate --list                                     lists the studies and their cost
    python -m research.studies.ablate --studies last_step equalizer --jobs 16    all runs of two studies
    python -m research.studies.ablate --jobs 16 --budget_minutes 9 --cut         a slice of everything; call again to
                                                                                 continue

Each run is a process of its own on one core, and on the GPU if there is one; it does what post_train.py does, and then
measures what its study asks for (research/studies/path_kl.py, research/studies/spread.py). A finished run adds one line
to the file --results and is never repeated. When the budget ends, runs are told to stop; they save, and the next call
resumes them from --work. Nothing is started that cannot finish within the budget, unless --cut allows it.
Exit code 0: all done; 75: some runs are left; 1: a run failed; 2: an argument is wrong.
"""

import argparse
import math
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from tqdm import tqdm

from research.studies import one_run, records
from research.studies.questions import (
    RECIPE,
    RECORDS,
    ROOT,
    STUDIES,
    Study,
    StudyPlan,
    StudyRun,
    core_seconds,
    identity,
)
from sage_grpo.config.fields import ConfigError
from sage_grpo.exit_codes import DONE, FAILED, PREEMPTED, WRONG_INPUT
from sage_grpo.files.json_files import read_object, write_json
from sage_grpo.tools.paired import aligned
from sage_grpo.train.guards import heard

# Environment of the process that runs are forked from. NVML answers whether there is a GPU: asking the driver would
# leave the forks without one.
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([one_run.__name__])
SAVING_SECONDS = 30.0  # at the end of the budget, for stopped runs to save
POLL_SECONDS = 0.2
LOST = "not finite"  # in the last message of a collapsed run: a result, not a failure


@dataclass(frozen=True)
class Started:
    """A running process: its run, when it started (monotonic seconds), and the core-seconds it was planned to take."""

    run: StudyRun
    begin: float
    planned: float


class Grid:
    """Pending, running and finished runs; `work` holds a folder and a log for each, and prompt embeddings.

    results: the file of finished runs (research/studies/records.py).
    """

    def __init__(self, runs: Sequence[StudyRun], work: Path, results: Path, commit: str) -> None:
        work.mkdir(parents=True, exist_ok=True)
        self.work = work.resolve()
        self.results = results
        self.commit = commit

        self.runs = runs
        self.done = {
            records.name_of(record): record for record in records.read_all(results).values()
        }
        self.left = [run for run in runs if not self.finished(run)]
        self.left.sort(key=lambda run: -self.step(run))  # started runs first, then in study order

        self.running: dict[ForkServerProcess, Started] = {}
        self.stopping = False
        self.broken: list[str] = []
        self.pace: list[float] = []  # seconds per planned core-second, for finished runs

    def finished(self, run: StudyRun) -> bool:
        """Whether a run has results; a different configuration under its name is rejected."""
        record = self.done.get(run.name)
        begun = self.work / run.name / "run.json"
        if record:
            records.check_same(run, f"{self.results}: {run.name}", record["config"])
        elif begun.is_file():
            records.check_same(run, str(begun.parent), read_object(begun))
        return record is not None

    def step(self, run: StudyRun) -> int:
        """Completed iterations, as reported by the run."""
        status = self.work / run.name / "status.json"
        return read_object(status)["step"] if status.is_file() else 0

    def seconds(self, run: StudyRun) -> float:
        """Estimated remaining seconds of a run, scaled by the median pace of finished runs."""
        pace = sorted(self.pace)[len(self.pace) // 2] if self.pace else 1.0
        return pace * self.planned(run)

    def planned(self, run: StudyRun) -> float:
        """Planned remaining core-seconds of a run."""
        completed = self.step(run) / max(run.config.max_steps, 1)
        return core_seconds(run.config) * max(0.01, 1 - completed)

    def fill(self, jobs: int, deadline: float, cut: bool) -> None:
        """Start runs in free slots: those already begun, and new ones that can finish in time or may be cut."""
        while len(self.running) < jobs:
            time_left = deadline - SAVING_SECONDS - time.monotonic()
            fitting = [
                run for run in self.left if cut or self.step(run) or self.seconds(run) < time_left
            ]
            if not fitting:
                return
            self.left.remove(fitting[0])
            self.start(fitting[0])

    def start(self, run: StudyRun) -> None:
        folder = self.work / run.name
        folder.mkdir(exist_ok=True)
        write_json(folder / "run.json", identity(run.config))
        arguments = ["--config", str(folder / "run.json"), "--output_dir", str(folder)]
        arguments += ["--resume_from_checkpoint", "auto"]
        arguments += ["--prompt_cache", str(self.work / "prompts")]  # encoded once for all runs
        os.environ.update(SETTINGS)
        process = FORKS.Process(target=one_run.train, args=(arguments, run.measured, self.log(run)))
        process.start()
        self.running[process] = Started(run, time.monotonic(), self.planned(run))

    def log(self, run: StudyRun) -> Path:
        return self.work / f"{run.name}.log"

    def collect(self) -> None:
        """Collect the results of finished runs."""
        for process in [process for process in self.running if process.exitcode is not None]:
            started = self.running.pop(process)
            run = started.run
            code = process.exitcode
            failure = self.failure(run)
            if code == DONE or (code == FAILED and LOST in failure):
                record = records.distil(run, self.work / run.name, self.commit, failure)
                records.append(self.results, record)
                shutil.rmtree(self.work / run.name / "checkpoints", ignore_errors=True)
                self.pace.append((time.monotonic() - started.begin) / started.planned)
            elif code in (PREEMPTED, -signal.SIGTERM) or (
                self.stopping and code == -signal.SIGKILL
            ):
                self.left.insert(0, run)
            else:
                self.broken.append(f"{run.name} ended with exit code {code}: see {self.log(run)}")

    def failure(self, run: StudyRun) -> str:
        """The error that stopped training, if any."""
        path = self.work / run.name / "status.json"
        status = read_object(path) if path.is_file() else {}
        return status["message"] if status.get("state") == "failed" else ""

    def stop(self) -> None:
        """Tell all runs to save and exit, and kill those that do not."""
        self.stopping = True
        for process in self.running:
            process.terminate()
        deadline = time.monotonic() + SAVING_SECONDS
        for process in self.running:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.exitcode is None:
                process.kill()
                process.join()
        self.collect()

    def progress(self) -> int:
        """Completed iterations over all runs."""
        unfinished = {run.name for run in self.left}
        unfinished |= {started.run.name for started in self.running.values()}
        return sum(
            self.step(run) if run.name in unfinished else run.config.max_steps for run in self.runs
        )


def work_off(grid: Grid, jobs: int, deadline: float, cut: bool) -> None:
    """Run until all is done, the budget ends, a signal arrives, or no remaining run can finish in time."""
    signals: list[int] = []
    total = sum(run.config.max_steps for run in grid.runs)
    bar = tqdm(total=total, initial=grid.progress(), mininterval=2, unit="it")
    with heard(lambda number, _: signals.append(number)), bar:
        try:
            while not signals and time.monotonic() < deadline - SAVING_SECONDS:
                grid.collect()
                grid.fill(jobs, deadline, cut)
                counts = {"running": len(grid.running), "runs left": len(grid.left)}
                bar.set_postfix(counts, refresh=False)
                bar.update(grid.progress() - bar.n)
                if not grid.running:
                    break
                time.sleep(POLL_SECONDS)
        finally:
            grid.stop()
        bar.update(grid.progress() - bar.n)
    if signals:
        print(f"ablate.py: stopped by {signal.Signals(signals[0]).name}", file=sys.stderr)


def commit_of(given: str | None) -> str:
    """The commit to record in the results."""
    if given:
        return given
    git = ["git", "-C", str(ROOT)]
    head = [*git, "rev-parse", "--short=12", "HEAD"]
    commit = subprocess.run(head, capture_output=True, text=True)
    if commit.returncode:
        raise ConfigError("there is no git repository to take the commit from: give --commit")
    status = [*git, "status", "--porcelain", "-uno"]
    changes = subprocess.run(status, capture_output=True, text=True, check=True)
    return commit.stdout.strip() + ("+changes" if changes.stdout else "")


def listing(studies: Mapping[str, Study], plan: StudyPlan, results: Path) -> str:
    """List the studies with the runs that each adds to those above it, and their cost."""
    done = {records.name_of(record) for record in records.read_all(results).values()}
    rows = [["study", "arms", "seeds", "new runs", "of them done", "core-minutes", "question"]]
    for name in dict.fromkeys(study for study, _, _ in plan.keys):
        study = studies[name]
        new_runs = [run for run in plan.runs.values() if run.study == name]
        seeds = {seed for study_name, _, seed in plan.keys if study_name == name}
        rows.append([name, len(study.arms), len(seeds), *_costs(new_runs, done), study.question])
    rows.append(["all", "", "", *_costs(list(plan.runs.values()), done), ""])
    return aligned([[str(cell) for cell in row] for row in rows])


def _costs(runs: Sequence[StudyRun], done: Collection[str]) -> list[int]:
    """Number of runs, of those done, and core-minutes."""
    minutes = sum(core_seconds(run.config) for run in runs) / 60
    return [len(runs), sum(run.name in done for run in runs), round(minutes)]


def new_parser(about: str | None = __doc__) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--list", action="store_true", help="print the studies and their cost, run nothing")
    add("--studies", nargs="+", default=[], metavar="NAME", help="studies to run (default: all)")
    add("--seeds", type=int, help="maximum number of seeds per study")
    add("--jobs", type=int, default=1, help="runs at once (default: 1)")
    add("--budget_minutes", type=float, default=math.inf,
        help="end this call after so many minutes (default: no limit)")  # fmt: skip
    add("--cut", action="store_true",
        help="also start runs that cannot finish in time; keep --work then")  # fmt: skip
    add("--work", type=Path, default=ROOT / "outputs" / "ablate", help="folder of the run folders")
    add("--results", type=Path, default=RECORDS / "first.jsonl", help="file of finished runs")
    add("--commit", help="commit to record in the results where there is no git repository")
    add("--recipe", type=Path, default=RECIPE, help="YAML file that the studies vary")
    return parser


def main(arguments: Sequence[str] | None = None, studies: Mapping[str, Study] = STUDIES) -> int:
    begin = time.monotonic()
    args = new_parser().parse_args(arguments)
    try:
        plan = StudyPlan(args.studies, args.seeds, args.recipe, studies)
        if args.list:
            print(listing(studies, plan, args.results))
            return DONE
        grid = Grid(list(plan.runs.values()), args.work, args.results, commit_of(args.commit))
    except (ValueError, FileNotFoundError) as error:
        print(f"ablate.py: {error}", file=sys.stderr)
        return WRONG_INPUT

    work_off(grid, args.jobs, begin + 60 * args.budget_minutes, args.cut)
    for message in grid.broken:
        print(f"ablate.py: {message}", file=sys.stderr)
    done = len(grid.runs) - len(grid.left) - len(grid.broken)
    print(f"{done} of {len(grid.runs)} runs are done")
    if grid.broken:
        return FAILED
    return PREEMPTED if grid.left else DONE


if __name__ == "__main__":
    sys.exit(main())
