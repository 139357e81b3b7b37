"""Run the studies of scripts/studies.py: many runs at once, each resumed where it was stopped, none made twice.

    python scripts/ablate.py --list                                              what there is, and what it costs
    python scripts/ablate.py --studies last_step equalizer --jobs 16             all runs of two studies
    python scripts/ablate.py --jobs 16 --budget_minutes 9 --pack slice.tar       a slice of everything, to be carried on
    python scripts/ablate.py --jobs 16 --budget_minutes 9 --unpack slice.tar     elsewhere

Each run is a process of its own through post_train.py, on one core, and on the GPU where there is one. A finished run
leaves one file in --results and is never made again. When the budget ends, runs are told to stop; they save, and the
next call goes on with them from --work. Nothing is started that cannot end within the budget, unless --cut allows it.
--pack writes what the next machine needs into one file: results, then checkpoints of unfinished runs, the most advanced
first, as far as --pack_mib goes. Exit code 0: all is done; 75: some runs are left; 1: a run broke; 2: something given
is wrong.
"""

import argparse
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tqdm import tqdm

from sage_grpo.config import ConfigError
from sage_grpo.json_files import read_object, write_json
from sage_grpo.tools.paired import aligned
from sage_grpo.train.guards import DONE, FAILED, PREEMPTED, WRONG_INPUT, heard
from scripts import packing, results
from scripts.studies import RECIPE, STUDIES, Plan, Run, Study, core_seconds, identity

THREADS = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
LAST_WORDS = 30.0  # seconds before the end of the budget in which stopped runs save
POLL = 0.2
LOST = "not finite"  # in the last words of a run whose gradients or clips are: a result, and no fault


class Grid:
    """Runs that are left, running and finished; `work` holds a folder and a log for each, and embeddings of prompts."""

    def __init__(self, runs: Sequence[Run], work: Path, folder: Path, commit: str) -> None:
        self.work, self.folder, self.commit = work.resolve(), folder, commit
        for path in (work, folder):
            path.mkdir(parents=True, exist_ok=True)
        self.runs, self.left = runs, [run for run in runs if not self.finished(run)]
        self.left.sort(key=lambda run: -self.step(run))  # stable: what has begun, then in the order of the studies
        # with when they were started and how many core-seconds were planned for the rest of them
        self.running: dict[subprocess.Popen[bytes], tuple[Run, float, float]] = {}
        self.stopping = False
        self.broken: list[str] = []
        self.pace: list[float] = []  # seconds per planned core-second, of runs that ended

    def finished(self, run: Run) -> bool:
        """Whether a run has its results; another configuration under its name is refused."""
        path, begun = self.folder / f"{run.name}.json", self.work / run.name / "run.json"
        if path.is_file():
            results.check_same(run, path, results.read(path)["config"])
        elif begun.is_file():
            results.check_same(run, begun.parent, read_object(begun))
        return path.is_file()

    def step(self, run: Run) -> int:
        """Iterations done, as far as the run has told."""
        status = self.work / run.name / "status.json"
        return read_object(status)["step"] if status.is_file() else 0

    def seconds(self, run: Run) -> float:
        """What the rest of a run will take, judged by the runs that ended."""
        return (sorted(self.pace)[len(self.pace) // 2] if self.pace else 1.0) * self.planned(run)

    def planned(self, run: Run) -> float:
        """Core-seconds of the rest of a run."""
        return core_seconds(run.config) * max(0.01, 1 - self.step(run) / max(run.config.max_steps, 1))

    def fill(self, jobs: int, deadline: float, cut: bool) -> None:
        """Start runs on free places: those that have begun, and new ones that can end in time or may be cut."""
        while len(self.running) < jobs:
            time_left = deadline - LAST_WORDS - time.monotonic()
            fitting = (run for run in self.left if cut or self.step(run) or self.seconds(run) < time_left)
            if (run := next(fitting, None)) is None:
                return
            self.left.remove(run)
            self.start(run)

    def start(self, run: Run) -> None:
        folder = self.work / run.name
        folder.mkdir(exist_ok=True)
        write_json(folder / "run.json", identity(run.config))
        command = [sys.executable, str(ROOT / "post_train.py"), "--config", str(folder / "run.json")]
        command += ["--output_dir", str(folder), "--resume_from_checkpoint", "auto"]
        command += ["--prompt_cache", str(self.work / "prompts")]  # encoded once for all runs
        with self.log(run).open("ab") as log:
            process = subprocess.Popen(
                command,
                cwd=ROOT,  # the recipe names the model by its place in the repository
                env=os.environ | THREADS,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.running[process] = (run, time.monotonic(), self.planned(run))

    def log(self, run: Run) -> Path:
        return self.work / f"{run.name}.log"

    def collect(self) -> None:
        """Take the results of the runs that have ended."""
        for process in [process for process in self.running if process.poll() is not None]:
            run, begun, planned = self.running.pop(process)
            code, failure = process.returncode, self.failure(run)
            if code == DONE or (code == FAILED and LOST in failure):
                record = results.distil(run, self.work / run.name, self.commit, failure)
                results.write(self.folder / f"{run.name}.json", record)
                shutil.rmtree(self.work / run.name / "checkpoints", ignore_errors=True)
                self.pace.append((time.monotonic() - begun) / planned)
            elif code in (PREEMPTED, -signal.SIGTERM) or (self.stopping and code == -signal.SIGKILL):
                self.left.insert(0, run)
            else:
                self.broken.append(f"{run.name} ended with exit code {code}: see {self.log(run)}")

    def failure(self, run: Run) -> str:
        """The sentence with which training had to stop, if it had to."""
        status = self.work / run.name / "status.json"
        told = read_object(status) if status.is_file() else {}
        return told["message"] if told.get("state") == "failed" else ""

    def stop(self) -> None:
        """Tell all runs to save and end, and end those that do not."""
        self.stopping = True
        for process in self.running:
            process.terminate()
        patience = time.monotonic() + LAST_WORDS
        for process in self.running:
            try:
                process.wait(max(0.0, patience - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.collect()

    def progress(self) -> int:
        """Iterations done, of all runs."""
        unfinished = {run.name for run in self.left} | {run.name for run, _, _ in self.running.values()}
        return sum(self.step(run) if run.name in unfinished else run.config.max_steps for run in self.runs)


def work_off(grid: Grid, jobs: int, deadline: float, cut: bool) -> None:
    """Until all is done, the budget ends, a signal comes, or nothing that is left can end in time."""
    told: list[int] = []
    words = {"total": sum(run.config.max_steps for run in grid.runs), "initial": grid.progress(), "mininterval": 2}
    with heard(lambda number, _: told.append(number)), tqdm(**words, unit="it") as bar:
        try:
            while not told and time.monotonic() < deadline - LAST_WORDS:
                grid.collect()
                grid.fill(jobs, deadline, cut)
                bar.set_postfix({"running": len(grid.running), "runs left": len(grid.left)}, refresh=False)
                bar.update(grid.progress() - bar.n)
                if not grid.running:
                    break
                time.sleep(POLL)
        finally:
            grid.stop()
        bar.update(grid.progress() - bar.n)
    if told:
        print(f"ablate.py: stopped by {signal.Signals(told[0]).name}", file=sys.stderr)


def commit_of(given: str | None) -> str:
    """The commit that the results will name."""
    if given:
        return given
    words = ["git", "-C", str(ROOT)]
    found = subprocess.run([*words, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True)
    if found.returncode:
        raise ConfigError("there is no git repository to take the commit from: give --commit")
    changes = subprocess.run([*words, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
    return found.stdout.strip() + ("+changes" if changes.stdout else "")


def listing(studies: Mapping[str, Study], plan: Plan, folder: Path) -> str:
    """The studies with what is new in each after those above it, and what that costs."""
    done = {run.name for run in plan.runs.values() if (folder / f"{run.name}.json").is_file()}
    rows = [["study", "arms", "seeds", "new runs", "of them done", "core-minutes", "question"]]
    for name in dict.fromkeys(study for study, _, _ in plan.keys):
        own = [run for run in plan.runs.values() if run.study == name]
        seeds = len({seed for study, _, seed in plan.keys if study == name})
        rows.append([name, len(studies[name].arms), seeds, *_costs(own, done), studies[name].question])
    rows.append(["all", "", "", *_costs(list(plan.runs.values()), done), ""])
    return aligned([[str(cell) for cell in row] for row in rows])


def _costs(runs: Sequence[Run], done: Collection[str]) -> list[int]:
    minutes = sum(core_seconds(run.config) for run in runs) / 60
    return [len(runs), sum(run.name in done for run in runs), round(minutes)]


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the studies and their cost, run nothing")
    parser.add_argument("--studies", nargs="+", default=[], metavar="NAME", help="default: all")
    parser.add_argument("--seeds", type=int, help="of each study at most")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once (default: 1)")
    parser.add_argument("--budget_minutes", type=float, default=math.inf, help="of this call (default: no end)")
    parser.add_argument("--cut", action="store_true", help="start runs that cannot end in time too; keep --work then")
    parser.add_argument("--work", type=Path, default=ROOT / "outputs" / "ablate", help="folder of the run folders")
    parser.add_argument("--results", type=Path, default=ROOT / "results", help="folder of the results")
    parser.add_argument("--commit", help="that the results name, where there is no git repository")
    parser.add_argument("--pack", type=Path, metavar="FILE.tar", help="at the end, write all that is worth carrying on")
    parser.add_argument("--pack_mib", type=float, default=math.inf, help="largest size of that file (default: any)")
    parser.add_argument("--unpack", type=Path, metavar="FILE.tar", help="first, take what --pack wrote")
    parser.add_argument("--recipe", type=Path, default=RECIPE, help="YAML file that the studies vary")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None, studies: Mapping[str, Study] = STUDIES) -> int:
    deadline, args = time.monotonic(), parsed(arguments)
    try:
        plan = Plan(args.studies, args.seeds, args.recipe, studies)
        if args.list:
            print(listing(studies, plan, args.results))
            return DONE
        if args.unpack:
            packing.unpack(args.unpack, args.results, args.work, plan.known)
        grid = Grid(list(plan.runs.values()), args.work, args.results, commit_of(args.commit))
    except (ValueError, FileNotFoundError) as error:
        print(f"ablate.py: {error}", file=sys.stderr)
        return WRONG_INPUT
    work_off(grid, args.jobs, deadline + 60 * args.budget_minutes, args.cut)
    if args.pack:
        names = [run.name for run in sorted(grid.left, key=lambda run: -grid.step(run))]
        for name in packing.pack(args.pack, args.results, grid.work, names, args.pack_mib):
            print(f"ablate.py: the checkpoint of {name} does not fit into {args.pack_mib} MiB and is left behind")
    for text in grid.broken:
        print(f"ablate.py: {text}", file=sys.stderr)
    print(f"{len(grid.runs) - len(grid.left) - len(grid.broken)} of {len(grid.runs)} runs are done")
    return FAILED if grid.broken else PREEMPTED if grid.left else DONE


if __name__ == "__main__":
    sys.exit(main())
