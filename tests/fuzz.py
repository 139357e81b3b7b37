"""Thousands of damaged folders and replies: every one is read, or refused in one sentence, and nothing gets out.

    python -m tests.fuzz --cases 10000 --seed 1 --jobs 2
    python -m tests.fuzz --cases 10000 --seed 1 --part 1/4      (every fourth case)

A case damages one file of a good folder (a value, a tensor, some bytes, or the file itself), plants a link in it, or
changes what a server says, and hands it to the code that reads it. `fuzz_foreign.py` has what comes from others: there,
files outside the folder must stay as they were, and their content must not show anywhere.

A case follows from seed, kind and number alone: `--only KIND:NUMBER` repeats one, with its traceback. Exits with 1 if a
case ended in anything but success or one sentence, or took more than LIMIT seconds of processor time.
"""

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

LIMIT, PATIENCE = 30, 600  # seconds of processor time, and of waiting, after which a case hangs
HUGE, LONG = 2**62, "x" * 5000
VALUES = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    3,
    7,
    0.5,
    1e-30,
    1e308,
    -1e308,
    10**6,
    2**31,
    HUGE,
    10**400,
    float("nan"),
]
VALUES += [
    float("inf"),
    "",
    "x",
    "0",
    "\ud800",
    "\x1b[2J\n",
    LONG,
    "../../etc/passwd",
    "(a+)+b",
    "<script>",
    [],
    [1],
]
VALUES += [[0], [None], [-1, 2, 3], [[[]]], ["x"] * 3, {}, {"a": 1}, {"": {"": []}}]
ENDS = ("success", "refused", "traceback", "hang", "leak", "written")


class Hang(BaseException):
    """Raised by a timer; nothing may catch it as an ordinary error."""


# damage


def places(value, path=()):
    """Paths to everything inside a JSON value."""
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


def damage_value(value, rng):
    """Change one place of a JSON value: another value, no value, or another name."""
    found = list(places(value))
    if not found or rng.random() < 0.03:
        return rng.choice(VALUES)
    *path, last = rng.choice(found)
    parent = value
    for key in path:
        parent = parent[key]
    deed = rng.choice(["replace"] * 6 + ["delete", "rename", "scale"])
    old = parent[last]
    if deed == "replace":
        parent[last] = rng.choice(VALUES)
    elif deed == "scale" and type(old) in (int, float):
        factor = rng.choice((2, 3, 0.5, -1, 1000))
        with contextlib.suppress(OverflowError):  # an integer that no float can hold
            parent[last] = old * factor
    else:
        del parent[last]
        if deed == "rename" and isinstance(parent, dict):
            parent[rng.choice(["x", "", "\n", LONG, f"{last}x"])] = old
    return value


def damage_json(path, rng):
    path.write_text(json.dumps(damage_value(json.loads(path.read_text()), rng)))


def damage_lines(path, rng):
    """One line of a .jsonl file, whose others stay."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    number = rng.randrange(len(lines))
    lines[number] = damage_value(lines[number], rng)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def damage_yaml(path, rng):
    lines = path.read_text().splitlines()
    texts = [": :", "eta: 1\neta: 2", "- x", "\t", "a: &a [*a]", "\x1b", "height: <script>"]
    lines[rng.randrange(len(lines))] = rng.choice(texts)
    path.write_text("\n".join(lines), errors="replace")


def damage_tensors(path, rng):
    """The header of a safetensors file, kept readable; or one tensor, with a header to match."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    if rng.random() < 0.3:
        raw = path.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header = json.dumps(damage_value(json.loads(raw[8 : 8 + length]), rng)).encode()
        path.write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + length :])
        return
    with safe_open(path, "pt") as file:
        metadata = file.metadata() or {}
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    if metadata and rng.random() < 0.5:
        key = rng.choice(sorted(metadata))
        with contextlib.suppress(ValueError):
            metadata[key] = json.dumps(damage_value(json.loads(metadata[key]), rng))
    else:
        name = rng.choice(sorted(tensors))
        damage_tensor(tensors, name, rng)
    with contextlib.suppress(Exception):  # what cannot be written is not a case
        save_file(tensors, path, metadata)


def damage_tensor(tensors, name, rng):
    import torch

    value = tensors.pop(name)
    deed = rng.choice(["delete", "rename", "shape", "rank", "type", "content"])
    if deed == "rename":
        names = [
            f"{name}x",
            "x",
            "",
            "(a+)+b.lora_A.weight",
            name.upper(),
            name.replace("0", "9" * 30),
        ]
        tensors[rng.choice(names)] = value
    elif deed == "shape":
        shape = list(value.shape)
        if shape:
            shape[rng.randrange(len(shape))] = rng.choice([0, 1, 2, 3, 5, 1000])
        tensors[name] = torch.zeros(shape)
    elif deed == "rank":
        tensors[name] = rng.choice(
            [value.flatten(), value[None].clone(), torch.tensor(1.0), torch.zeros(0)]
        )
    elif deed == "type":
        kinds = [
            torch.bool,
            torch.int8,
            torch.int64,
            torch.float16,
            torch.float64,
            torch.float8_e4m3fn,
        ]
        tensors[name] = value.to(rng.choice([*kinds, torch.complex64]))
    elif deed == "content":
        tensors[name] = torch.full_like(value, rng.choice([float("nan"), float("inf"), 1e30, 0]))


def damage_bytes(path, rng):
    raw = bytearray(path.read_bytes())
    deed = rng.choice(["cut", "flip", "empty", "grow", "noise", "nest"])
    if deed == "cut":
        raw = raw[: rng.randrange(len(raw) + 1)]
    elif deed == "flip" and raw:
        for _ in range(rng.choice([1, 1, 10])):
            raw[rng.randrange(min(len(raw), 4000))] = rng.randrange(256)
    elif deed == "grow":
        raw += b"\0" * 100
    else:
        raw = {"noise": rng.randbytes(200), "nest": b"[" * 100_000}.get(deed, b"")
    path.write_bytes(raw)


def damage_file(path, rng):
    """The file itself: away, a folder, a pipe, or a link to nowhere or to something else."""
    path.unlink()
    deed = rng.choice(["away", "folder", "pipe", "nowhere", "elsewhere"])
    if deed == "folder":
        path.mkdir()
    elif deed == "pipe":
        os.mkfifo(path)
    elif deed != "away":
        path.symlink_to("/nowhere/at/all" if deed == "nowhere" else "/proc/self/cmdline")


CONTENT = {
    ".json": damage_json,
    ".jsonl": damage_lines,
    ".safetensors": damage_tensors,
    ".yaml": damage_yaml,
}


def damage(folder, rng, names=()):
    """Damage one file, mostly inside its format; returns what was done."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    known = [path for path in files if path.suffix in CONTENT and (not names or path.name in names)]
    path = rng.choice(known if rng.random() < 0.9 else files)
    chosen = rng.choices(
        [CONTENT.get(path.suffix, damage_bytes), damage_bytes, damage_file], [8, 1, 1]
    )[0]
    chosen(path, rng)
    if rng.random() < 0.25 and path.is_file():
        with contextlib.suppress(Exception):  # what is damaged already may be beyond its format
            chosen(path, rng)
    return f"{chosen.__name__} of {path.relative_to(folder)}"


def damage_replies(path, rng):
    """What a server says: a value or two of it, or its bytes."""
    if rng.random() < 0.1:
        damage_bytes(path, rng)
        return "damage_bytes of the replies"
    count = rng.choice([1, 1, 1, 2, 3])
    for _ in range(count):
        damage_json(path, rng)
    return f"{count} damaged values in the replies"


def thin_out(path, rng):
    """Keep some of the metrics of a run: each of them is a figure, which takes a tenth of a second."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    names = sorted({key for line in lines[1:] for key in line})
    kept = {"kind", "step", *rng.sample(names, len(names) // 8)}
    lines[1:] = [{key: value for key, value in line.items() if key in kept} for line in lines[1:]]
    if rng.random() < 0.8:
        lines[0].pop("schedule")
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


# what reads the folders


# kinds whose good folder has another name
GOOD = {"diagnose": "run", "readers": "run", "export": "checkpoint"}
# kinds that come from others, for which canaries are watched
FOREIGN = ("run", "diagnose", "readers", "export", "resumed", "prompts", "judge", "remote", "hub")
REPLIES = ("judge", "remote", "hub")  # kinds that are what a server says
# where links are planted, by kind: names of lists in fuzz_foreign.py
PLANTS = {
    "run": "IN_RUN",
    "diagnose": "IN_RUN",
    "readers": "IN_RUN",
    "resumed": "IN_RUN",
    "export": "IN_CHECKPOINT",
}


class Bench:
    """Good folders, made once per process, and the readers of each kind."""

    def __init__(self, home):
        from tests import fuzz_foreign
        from tests.fuzz_folders import make_folders

        self.foreign = fuzz_foreign
        self.home, self.good = home, home / "good"
        self.canaries = fuzz_foreign.Canaries(home / "canaries")
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            self.trainer, self.backbone = make_folders(self.good)
            fuzz_foreign.make_foreign_folders(self.good)
        self.rng = random.Random()  # of the case
        self.kinds = {
            "model": self.read_model,
            "tencent": self.read_model,
            "videoalign": self.read_videoalign,
            "clip": self.read_clip,
            "adapter": self.read_adapter,
            "checkpoint": self.read_checkpoint,
            "run": self.read_run,
            "diagnose": fuzz_foreign.read_diagnosis,
            "readers": fuzz_foreign.read_elsewhere,
            "export": lambda folder: fuzz_foreign.export(folder, self.rng),
            "resumed": fuzz_foreign.resume,
            "prompts": fuzz_foreign.read_prompts,
            "judge": lambda folder: fuzz_foreign.ask_server(folder, self.rng, "judge"),
            "remote": lambda folder: fuzz_foreign.ask_server(folder, self.rng, "remote"),
            "hub": lambda folder: fuzz_foreign.verify(folder, self.rng, self.canaries),
        }

    def case(self, kind, number, seed):
        """How the case ended, and what it was."""
        rng = self.rng = random.Random(f"{seed} {kind} {number}")
        place = self.home / "case"
        folder = place / "checkpoints" / "step-000000"  # where a run has its checkpoints
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(self.good / GOOD.get(kind, kind), folder)
        if kind == "run":
            thin_out(folder / "metrics.jsonl", rng)
        did = self.damage(kind, folder)

        end, said = ended(lambda: self.kinds[kind](folder))
        if kind in FOREIGN and end in ("success", "refused"):
            try:
                self.canaries.check(said, place)
            except self.foreign.Leak as leak:
                return "leak", str(leak), did
            except self.foreign.Written as written:
                return "written", str(written), did
        return end, said, did

    def damage(self, kind, folder):
        """Damage a folder, or plant in it what leads out; returns what was done."""
        rng = self.rng
        if kind == "prompts" and rng.random() < 0.5:
            return self.foreign.misname_image(folder, rng, self.canaries)
        if kind in REPLIES:
            return damage_replies(folder / "replies.json", rng)
        planted_names = PLANTS.get(kind)
        if planted_names and rng.random() < 0.4:
            names = getattr(self.foreign, planted_names)
            root = folder / "run" if kind == "resumed" else folder
            return self.foreign.plant(root, rng, self.canaries, names)
        did = damage(folder, rng)
        if kind == "resumed" and rng.random() < 0.5:
            from tests.hostile import sealed_again

            for checkpoint in sorted((folder / "run" / "checkpoints").glob("step-??????")):
                with contextlib.suppress(OSError):
                    sealed_again(checkpoint)
            did += ", sealed again"
        return did

    def read_model(self, folder):
        import torch

        from sage_grpo.data.requests import Request
        from sage_grpo.models.backbone import Guidance
        from sage_grpo.models.registry import open_backbone
        from sage_grpo.worlds.registry import world_of

        world_of(folder)
        backbone = open_backbone(folder)
        _ = backbone.sampling, backbone.architecture()
        [cond] = backbone.encode([Request('the letter "B" moving left')])
        latents = torch.zeros(1, *backbone.latent_shape(5, 32, 32))
        with torch.no_grad():
            backbone.decode(backbone.velocity(latents, 0.5, cond, Guidance()))

    def read_videoalign(self, folder):
        from sage_grpo.rewards.videoalign.reward import VideoAlign

        VideoAlign(folder)

    def read_clip(self, folder):
        import torch

        from sage_grpo.rewards.base import Setup
        from sage_grpo.rewards.clip import ClipScore

        named = type("Named", (ClipScore,), {"folder": folder.name})
        named(Setup(folder.with_name("VideoReward"), torch.device("cpu")))

    def read_adapter(self, folder):
        from sage_grpo.models.lora import load_adapter

        error = None
        try:
            self.backbone.load_weights(folder)
        except (ValueError, FileNotFoundError) as refusal:
            error = refusal
        load_adapter(self.trainer.backbone.transformer, folder)
        if error:
            raise error

    def read_checkpoint(self, folder):
        """With hashes to match, so that the damage reaches the code that loads."""
        from sage_grpo.files import manifest
        from sage_grpo.train import checkpoint_folders
        from tests.hostile import sealed_again
        from tests.train.iterations import load

        if (folder / manifest.NAME).is_file():
            with contextlib.suppress(OSError):
                sealed_again(folder)
        run, refused = folder.parents[1], None
        try:
            self.backbone.load_weights(folder)
        except (ValueError, FileNotFoundError) as error:
            check_sentence(error)
        for wanted in ("auto", "last_good", str(folder)):
            try:
                path = checkpoint_folders.choose(run, wanted, self.trainer.ranks)
                if path:
                    load(self.trainer, path)
            except (ValueError, FileNotFoundError) as error:
                check_sentence(error)
                refused = error
        checkpoint_folders.tidy(run / "checkpoints", 0)
        if refused:
            raise refused

    def read_run(self, folder):
        from sage_grpo.tools import evaluate
        from sage_grpo.tools.report import __main__ as report
        from tests.programs import exit_code

        page = folder / "report.html"
        code = exit_code(report.main, [str(folder)])
        assert code in (0, 2)
        assert code == 2 or "<script" not in page.read_text()
        evaluate.read_folder(folder / "validation" / "step-000000")
        if code == 2:
            raise ValueError("refused by the report")


def check_sentence(error):
    """A refusal says something, in one line."""
    if not str(error).strip() or len(str(error).splitlines()) != 1:
        raise AssertionError(f"not one sentence: {error!r}") from error


def ended(call):
    """One of ENDS, and what was said."""
    said = io.StringIO()
    signal.setitimer(signal.ITIMER_PROF, LIMIT)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE)
    try:
        with (
            contextlib.redirect_stderr(said),
            contextlib.redirect_stdout(said),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            try:
                call()
            except (ValueError, FileNotFoundError) as error:
                check_sentence(error)
                return "refused", f"{said.getvalue()}{error}"
        return "success", said.getvalue()
    except Hang:
        return "hang", traceback.format_exc()
    except BaseException:
        return "traceback", traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)


def hang(*_):
    raise Hang


def set_timers():
    signal.signal(signal.SIGPROF, hang)
    signal.signal(signal.SIGALRM, hang)


def settle():
    """A process of its own for cases: one thread, quiet packages, timers."""
    import torch
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    from tests.fuzz_foreign import settle_foreign

    set_timers()
    settle_foreign()
    torch.set_num_threads(1)
    diffusers_logging.set_verbosity(50)
    transformers_logging.set_verbosity(50)


def work(cases, seed, results):
    """Announce each case, then send how it ended: a process that dies leaves the case that killed it."""
    settle()
    with tempfile.TemporaryDirectory() as home:
        bench = Bench(Path(home))
        for kind, number in cases:
            results.send((kind, number))
            results.send(bench.case(kind, number, seed))
    results.close()


def outcomes(cases, seed):
    """Kind, number, end, words and damage of each case, in a process that is replaced when it dies."""
    context = multiprocessing.get_context("spawn")
    while cases:
        results, far_end = context.Pipe(duplex=False)
        process = context.Process(target=work, args=(cases, seed, far_end), daemon=True)
        process.start()
        far_end.close()
        done, announced = 0, None
        with contextlib.suppress(EOFError):
            while True:
                announced = results.recv()
                yield (*announced, *results.recv())
                done, announced = done + 1, None
        process.join()
        if announced is None and done < len(cases):
            raise RuntimeError("a process ended before its first case")
        if announced is not None:
            yield (
                *announced,
                "traceback",
                f"the process ended with {process.exitcode}",
                "unknown damage",
            )
        cases = cases[done + 1 :]


def table(counts):
    """Outcomes by kind, as text."""
    kinds = sorted({kind for kind, _ in counts})
    rows = [["kind", *ENDS], *([kind, *(str(counts[kind, end]) for end in ENDS)] for kind in kinds)]
    rows.append(["all", *(str(sum(counts[kind, end] for kind in kinds)) for end in ENDS)])
    return "\n".join("".join(cell.ljust(12) for cell in row).rstrip() for row in rows)


SHARES = {  # of 1000 cases; models take the longest
    "model": 5,
    "tencent": 5,
    "videoalign": 20,
    "clip": 10,
    "adapter": 50,
    "checkpoint": 10,
    "run": 5,
    "diagnose": 200,
    "readers": 100,
    "export": 50,
    "resumed": 30,
    "prompts": 245,
    "judge": 100,
    "remote": 100,
    "hub": 70,
}


def all_cases(count):
    return [
        (kind, number) for kind, share in SHARES.items() for number in range(count * share // 1000)
    ]


def main(arguments=None):
    parser = argparse.ArgumentParser("python -m tests.fuzz", description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=10000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--part", metavar="I/N", default="1/1", help="every Nth case, from the Ith")
    parser.add_argument(
        "--only", metavar="KIND:NUMBER", help="repeat one case and show how it ended"
    )
    args = parser.parse_args(arguments)
    if args.only:
        kind, number = args.only.split(":")
        settle()
        with tempfile.TemporaryDirectory() as home:
            end, said, did = Bench(Path(home)).case(kind, int(number), args.seed)
        print(f"{did}: {end}\n{said}")
        return 0
    from tqdm import tqdm

    cases, counts = all_cases(args.cases), Counter()
    random.Random(args.seed).shuffle(cases)
    part, parts = map(int, args.part.split("/"))
    cases = cases[part - 1 :: parts]
    bar = tqdm(total=len(cases), unit="case", mininterval=30)

    def count(share):
        for kind, number, end, said, did in outcomes(share, args.seed):
            counts[kind, end] += 1
            bar.update()
            if end in ENDS[2:]:
                last_line = (said.strip().splitlines() or [""])[-1]
                bar.write(f"{kind}:{number} {end}, {did}: {last_line}")

    def stop(*_):
        """When told to stop: the table of what was done."""
        print(table(counts), flush=True)
        os._exit(143)

    signal.signal(signal.SIGTERM, stop)
    with ThreadPoolExecutor(args.jobs) as pool:
        for job in [pool.submit(count, cases[job :: args.jobs]) for job in range(args.jobs)]:
            job.result()
    bar.close()
    print(table(counts))
    return 1 if any(counts[kind, end] for kind in SHARES for end in ENDS[2:]) else 0


if __name__ == "__main__":
    sys.exit(main())
