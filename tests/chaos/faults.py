"""The faults of `chaos.py`: what can happen to a run, when, how it recovers, and what must not happen."""

import errno
import random
import re
import resource
import signal
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sage_grpo.train.checkpoint_folders import step_of
from tests.chaos.world import MoodyReward, Stuck, Training

ANY = ("start", "iteration", "save")
KINDS = {  # and the moments at which they occur
    "kill_rank": ANY,
    "kill_all": ANY,  # including the launcher
    "kill_launcher": ANY,  # alone, and start it again while its ranks live on
    "two_starts": ANY,  # kill_all, then start two launchers
    "term_launcher": ANY,
    "term_rank": ANY,
    "hang_rank": ANY[1:],  # a start may take long
    "full_disk": ("iteration",),
    "slow_disk": ANY[1:],  # a save takes longer than ranks wait for each other
    "damage": ANY[1:],  # kill_all, then change, truncate or delete a file of the newest checkpoint
    "reward_raises": ("iteration",),
    "reward_hangs": ("iteration",),
    "reward_nan": ("iteration",),
    "pause_all": ANY[1:],  # all ranks stand still for a while, as on a suspended machine
    "clock_jump": ("iteration",),  # the clock is wrong by days
    "no_room": ("iteration",),  # metrics.jsonl cannot be written
    "no_permission": ("iteration",),  # checkpoints cannot be written
    "lock_deleted": ("iteration",),
    "torn_line": ("iteration",),  # kill_all, then half a line at the end of metrics.jsonl
    "link_planted": ANY[
        1:
    ],  # kill_all, then links to a folder of the user where checkpoints will be
    "litter": ANY[1:],  # kill_all, then names like those of checkpoints, newer than all of them
    "double_term": ANY[1:],  # a second SIGTERM, while the run saves because of the first
}
GOES_ON = (
    "pause_all",
    "clock_jump",
    "no_room",
    "no_permission",
    "lock_deleted",
)  # without a restart
# A run without a sound checkpoint is refused, as it should be, so some faults wait until there is one to fall back to.
CHECKPOINTS_BEFORE = {"damage": 2, "litter": 1}
RELAUNCHES = 5  # after the last fault, before an operator would give up
SMALL_FILE = 1 << 14  # bytes
FREE = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
SAVE_FAILED = r"step-\d+ could not be written"
BUSY = "is in use by process"
SLOW = {signal.SIGCONT: 0.1, signal.SIGSTOP: 0.4}  # seconds
PAUSE = 3.0  # seconds; less than the run's collective_timeout
IMPATIENCE = 1.5  # seconds between two signals; sooner, the second counts as an echo of the first
DAY = 24 * 3600  # seconds
DENIED = {
    "no_room": (errno.ENOSPC, "metrics.jsonl"),
    "no_permission": (errno.EACCES, "/checkpoints/"),
}
BUFFERED = "buffering metrics in memory"
NEWEST_OF_ALL = "step-099999"  # a name that litter has
PRECIOUS = "a file of the user\n"


@dataclass(frozen=True)
class Fault:
    kind: str
    moment: str
    step: int  # it occurs once this iteration is done
    fraction: float  # of the start, the iteration or the save's files that passes first
    rank: int
    seed: int  # determines what is damaged, and how

    def __str__(self) -> str:
        who = f" {self.rank}" if self.kind.endswith("rank") else ""
        return f"{self.kind}{who} in {self.moment}" + (
            "" if self.moment == "start" else f" after {self.step}"
        )


@dataclass
class Outcome:
    run: str
    fault: str
    ended: str
    resumed: (
        int | None
    )  # iteration after which training resumed; None: it never stopped, or the next fault came first
    seconds: float  # from the fault until then
    wrong: str  # what should not have happened

    def __str__(self) -> str:
        where = "" if self.resumed is None else f", resumed after {self.resumed}"
        return f"{self.run}: {self.fault}: {self.ended}{where}, {self.seconds:.1f} s{self.wrong and ': ' + self.wrong}"


class Chaos:
    """Injects faults into a run, and keeps it going."""

    def __init__(
        self, training: Training, reward: MoodyReward, pace: tuple[float, float], disk: bool
    ) -> None:
        """pace: seconds of a start and of an iteration. disk: whether the run folder is on a separate disk."""
        self.training, self.reward, self.pace, self.disk = training, reward, pace, disk

    def outcomes(self, faults: Sequence[Fault]) -> Iterator[Outcome]:
        self.training.launch()
        try:
            for fault, after in zip(faults, (*faults[1:], None), strict=True):
                yield self.bring(fault, interrupted=after is not None and after.moment == "start")
            self.finish()
        finally:
            self.training.kill_all()

    def bring(self, fault: Fault, interrupted: bool) -> Outcome:
        """Inject a fault. interrupted: the next fault occurs before training resumes."""
        training = self.training
        self.await_moment(fault)
        step, starts, pids = training.step, len(training.starts), self.all_ranks()
        self.newest, self.step = training.checkpoints()[-1:], step
        begun, clock, spoken = time.monotonic(), time.time(), len(training.said)
        wrong = self.strike(fault, pids)
        training.wait(
            "the end of the ranks", lambda: self.over(fault, pids, training.said[spoken:])
        )
        state, newest = training.status(), max(map(step_of, training.checkpoints()), default=0)
        self.relieve(pids)
        ended = self.go_on(fault, pids)
        if not interrupted and not ended.startswith("went on"):
            training.wait("training", lambda: len(training.starts) > starts, tended=True)
        resumed = training.starts[-1] if len(training.starts) > starts else None
        said, flight = training.said[spoken:], self.flight_records(clock)
        wrong = wrong or broken_promise(
            fault, step, state, newest, None if interrupted else said, flight
        )
        if fault.kind in GOES_ON and not ended.startswith("went on"):
            wrong = wrong or "the run did not go on"
        ended = f"{ended}{exit_codes(said)}; {state['state']}"
        return Outcome(
            training.folder.name, str(fault), ended, resumed, time.monotonic() - begun, wrong
        )

    def await_moment(self, fault: Fault) -> None:
        training = self.training
        self.all_ranks()
        if fault.moment == "start":
            time.sleep(fault.fraction * self.pace[0])
            return
        training.wait(
            f"iteration {fault.step}", lambda: training.trains_after(fault.step), tended=True
        )
        needed = CHECKPOINTS_BEFORE.get(fault.kind, 0)
        training.wait("checkpoints", lambda: len(training.checkpoints()) >= needed, tended=True)
        if fault.moment == "save":
            training.wait("a save", training.draft_files, tended=True, pause=0.001)
            files = 1 + int(6 * fault.fraction)
            training.wait(
                "more of a save", lambda: not 0 < training.draft_files() < files, pause=0.001
            )
        else:
            time.sleep(fault.fraction * self.pace[1])

    def all_ranks(self) -> dict[int, int]:
        """The processes by rank, once all are running."""
        training = self.training
        training.wait("all ranks", lambda: len(training.pids()) == training.ranks, tended=True)
        return training.pids()

    def strike(self, fault: Fault, pids: Mapping[int, int]) -> str:
        """Returns what must not be, if anything is seen at once."""
        training = self.training
        match fault.kind:
            case "kill_rank":
                training.send(signal.SIGKILL, pids[fault.rank])
            case "kill_all":
                training.kill_all()
            case "kill_launcher":
                return self.orphan(set(pids.values()), fault.moment == "start")
            case "two_starts":
                training.kill_all()
                return self.start_twice()
            case "term_launcher":
                training.send(signal.SIGTERM, training.launcher.pid)
            case "term_rank":
                training.send(signal.SIGTERM, pids[fault.rank])
            case "hang_rank":
                training.send(signal.SIGSTOP, pids[fault.rank])
            case "full_disk":
                self.fill(pids)
            case "slow_disk":
                training.slow.touch()
            case "damage":
                training.kill_all()
                damage(training.checkpoints()[-1], random.Random(fault.seed))
            case "reward_raises" | "reward_hangs" | "reward_nan":
                self.reward.turn(fault.kind.removeprefix("reward_"))
            case "pause_all":
                training.send(signal.SIGSTOP, *pids.values())
                time.sleep(PAUSE)
                training.send(signal.SIGCONT, *pids.values())
            case "clock_jump":
                training.clock.write_text(str(random.Random(fault.seed).choice((-9 * DAY, DAY))))
            case "no_room" | "no_permission":
                number, text = DENIED[fault.kind]
                training.denied.write_text(f"{number} {text}")
            case "lock_deleted":
                (training.folder / "lock").unlink()
            case "torn_line":
                training.kill_all()
                tear_line(training.folder / "metrics.jsonl")
            case "link_planted":
                training.kill_all()
                plant_links(training)
            case "litter":
                training.kill_all()
                litter(training.folder / "checkpoints")
            case "double_term":
                training.send(signal.SIGTERM, training.launcher.pid)
                time.sleep(IMPATIENCE)
                training.send(signal.SIGTERM, *pids.values())
        return ""

    def orphan(self, orphans: set[int], loading: bool) -> str:
        """Kill the launcher alone and start it again; once one of the two runs has seen the other, kill the first.

        While it trains, the first one is slowed down, or it would be done before the second one has started.
        loading: it does not train yet, and the second one may be the first to do so.
        """
        training, spoken, most = (
            self.training,
            len(self.training.said),
            len(self.training.starts) + loading,
        )
        training.launcher.kill()
        training.launcher.wait()
        training.launch()

        def met() -> bool:
            for number, seconds in SLOW.items() if len(training.starts) == most else ():
                training.send(number, *orphans)
                time.sleep(seconds)
            if training.status().get("state") == "done":  # before the second one has looked
                return True
            return BUSY in training.said[spoken:] or len(training.starts) > most

        training.wait("a start that finds a run", met)
        training.send(signal.SIGCONT, *orphans)
        step = training.step
        training.wait(
            "an iteration beside a waiting start",
            lambda: training.step > step or not self.left(orphans),
        )
        joined = len(training.starts) > most and self.left(orphans)
        training.send(signal.SIGKILL, *orphans)
        return "a second run joined the first" if joined else ""

    def start_twice(self) -> str:
        """Start two launchers; once one of their runs trains and the other one has seen it, end the other one."""
        training, spoken, most = (
            self.training,
            len(self.training.said),
            len(self.training.starts) + 1,
        )
        training.launch()
        training.launch()
        training.wait(
            "a start that finds a run",
            lambda: BUSY in training.said[spoken:] or len(training.starts) > most,
        )
        training.wait("training", lambda: len(training.starts) >= most)
        training.wait("an iteration beside a waiting start", lambda: training.trains_after(0))
        if len(training.starts) > most:
            training.kill_all()
            return "a second run joined the first"
        training.keep_one()
        return ""

    def fill(self, pids: Mapping[int, int]) -> None:
        """Fill the run's disk; if it has no separate one, limit the size of its files."""
        if not self.disk:
            for pid in pids.values():
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (SMALL_FILE, resource.RLIM_INFINITY))
            return
        with (self.training.folder / "filler").open("wb", buffering=0) as file:
            for size in (1 << 20, 1):
                try:
                    while file.write(bytes(size)):
                        pass
                except OSError:  # full
                    continue

    def over(self, fault: Fault, pids: Mapping[int, int], said: str) -> bool:
        """Whether the ranks have exited, or continued without the missing resource."""
        training = self.training
        match fault.kind:
            case "full_disk" | "no_permission":
                goes_on = re.search(SAVE_FAILED, said)
            case "slow_disk":
                goes_on = training.checkpoints()[-1:] != self.newest
            case "no_room":
                goes_on = BUFFERED in said
            case "lock_deleted":
                goes_on = (training.folder / "lock").exists()
            case "pause_all" | "clock_jump":
                goes_on = training.step > self.step
            case _:
                goes_on = False
        return bool(goes_on) or not self.left(pids.values())

    def left(self, pids: Iterable[int]) -> set[int]:
        """Which of these ranks live."""
        return set(pids) & {pid for *_, pid in self.training.living(*self.training.launchers)}

    def relieve(self, pids: Mapping[int, int]) -> None:
        """Free the disk and let the reward respond again."""
        self.reward.turn("good")
        (self.training.folder / "filler").unlink(missing_ok=True)
        for fault in (self.training.slow, self.training.clock, self.training.denied):
            fault.unlink(missing_ok=True)
        for pid in self.left(pids.values()):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, FREE)

    def go_on(self, fault: Fault, pids: Mapping[int, int]) -> str:
        """Wait until torchrun has started new ranks, or start it; returns which of the two."""
        training, newest = self.training, self.training.checkpoints()[-1:]
        if fault.kind == "full_disk":
            training.wait(
                "the next checkpoint",
                lambda: not self.left(pids.values()) or training.checkpoints()[-1:] != newest,
            )
            if self.left(pids.values()):
                return f"went on ({'tmpfs' if self.disk else 'file limit'})"
        if fault.kind in ("slow_disk", *GOES_ON) and self.left(pids.values()):
            step = training.step
            training.wait(
                "the next iteration", lambda: training.step > step or not self.left(pids.values())
            )
            if self.left(pids.values()):
                return "went on"
        training.wait(
            "new ranks",
            lambda: training.ended or set(training.pids().values()) - set(pids.values()),
        )
        if not training.ended:
            return (
                "one start waited"
                if fault.kind in ("kill_launcher", "two_starts")
                else "ranks restarted"
            )
        code = training.launcher.returncode
        training.launch()
        return f"launcher {code}"

    def flight_records(self, since: float) -> int:
        return sum(
            file.stat().st_mtime >= since
            for file in self.training.folder.glob("flight/rank-*.json")
        )

    def finish(self) -> None:
        """Keep the run going until it is done."""
        for _ in range(RELAUNCHES):
            self.training.wait("the end of the run", lambda: self.training.ended)
            if self.training.launcher.returncode == 0 and self.training.status()["state"] == "done":
                return
            self.training.launch()
        raise Stuck(f"{self.training.folder.name} was not done after {RELAUNCHES} more starts")


def damage(checkpoint: Path, rng: random.Random) -> None:
    """Flip a bit of some file, truncate it, or delete it."""
    file = rng.choice(sorted(path for path in checkpoint.rglob("*") if path.is_file()))
    content, place = bytearray(file.read_bytes()), rng.randrange(file.stat().st_size)
    how = rng.choice(("change", "cut", "delete"))
    content[place] ^= 1 << rng.randrange(8)
    if how == "delete":
        file.unlink()
    else:
        file.write_bytes(content if how == "change" else content[:place])


def tear_line(metrics: Path) -> None:
    """Add half of the last line again, as a writer leaves it that is killed while it writes."""
    last = metrics.read_bytes().splitlines()[-1]
    with metrics.open("ab") as file:
        file.write(last[: len(last) // 2])


def plant_links(training: Training) -> None:
    """Put links to a folder of the user where the next checkpoints and their drafts will be."""
    training.canary.mkdir(exist_ok=True)
    (training.canary / "precious").write_text(PRECIOUS)
    checkpoints = training.folder / "checkpoints"
    checkpoints.mkdir(exist_ok=True)
    newest = max(map(step_of, training.checkpoints()), default=0)
    for step in range(newest + 1, newest + 4):
        for name in (f"step-{step:06d}", f"step-{step:06d}.tmp"):
            if not (checkpoints / name).exists():
                (checkpoints / name).symlink_to(training.canary)


def canary_changes(folder: Path) -> list[str]:
    """What happened to the folder of the user that links in the run led to; empty if nothing."""
    canary = folder.with_suffix(".canary")
    if not canary.exists():
        return []
    found = {path.name: path.read_text() for path in canary.iterdir()}
    return [] if found == {"precious": PRECIOUS} else [f"{canary} was changed: {sorted(found)}"]


def litter(checkpoints: Path) -> None:
    """Leave what looks like a newer checkpoint, a draft that is a file, and names that mean nothing."""
    (checkpoints / NEWEST_OF_ALL).mkdir(parents=True)
    (checkpoints / NEWEST_OF_ALL / "manifest.json").write_text("{}")
    (checkpoints / "step-099998.tmp").write_text("not a folder")
    (checkpoints / "step-x").mkdir(exist_ok=True)
    (checkpoints.parent / "notes.txt").write_text("of the user\n")


def exit_codes(said: str) -> str:
    """Exit codes of ranks as reported by torchrun."""
    codes = re.findall(r"exitcode: (-?\d+)\)", said)
    return f" (exit {', '.join(codes)})" if codes else ""


def broken_promise(
    fault: Fault, step: int, state: Mapping[str, Any], newest: int, said: str | None, flight: int
) -> str:
    """What a fault after iteration `step` should not have caused.

    state, newest: status.json and the newest checkpoint once the ranks had exited. said: the run's output until it
    trained again, None if it was interrupted. flight: new flight records.
    """
    if fault.kind.startswith("term") and fault.moment != "start":
        if state["state"] != "preempted":
            return f"the status is {state['state']} instead of preempted"
        if newest < step:
            return f"the newest checkpoint is that of {newest}, but the signal came after {step}"
    if fault.kind.startswith("reward") and "of the rewards failed" not in state["message"]:
        return f"the run did not stop for its reward: {state['message']}"
    if fault.kind == "hang_rank" and not flight:
        return "there is no flight record"
    # a run that was done before another start looked had given its folder back
    is_met = said is None or BUSY in said or state["state"] == "done"
    if fault.kind in ("kill_launcher", "two_starts") and not is_met:
        return "no start found the run folder in use"
    if fault.kind == "slow_disk" and flight:
        return f"a slow disk ended the run: {state['message']}"
    if fault.kind == "damage" and said is not None and "is damaged and left out" not in said:
        return "the damage was not noticed"
    litter_named = f"{NEWEST_OF_ALL} is damaged and left out"
    if fault.kind == "litter" and said is not None and litter_named not in said:
        return "the litter was not noticed"
    if fault.kind in GOES_ON and flight:
        return f"the run ended: {state['message']}"
    return ""
