"""People in the loop from end to end, in one command: label, learn a reward, post-train with it, compare blindly.

    python -m research.people.demo --output outputs/people             about 9 minutes on two cores; `make demo-people`
    python -m research.people.demo --seeds 1 2 3 4 5 --output outputs/people --record FILE.json         the proof

The raters are simulated: they like large shapes, about which the embedded reward hardly cares. They see what the page
sends, and nothing else. Each stage is skipped if its result exists, so a second call continues. The story ends in
OUTPUT/seed-N/people.html.
"""

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from research.people.page_rater import rate
from research.people.taste import Rater, open_prompts, ordered_rightly, taste
from sage_grpo.files.json_files import read_object, write_json
from sage_grpo.intervals import Interval, interval
from sage_grpo.rewards.videoalign.reward import VideoAlign
from sage_grpo.runs.clips import LISTING, pair_clips, read_clips
from sage_grpo.runs.media import read_mp4, reduced
from sage_grpo.tools.prefer.answers import Answer, read_answers
from sage_grpo.tools.prefer.statistics import share
from sage_grpo.tools.prefer.study import Study, clip_path
from sage_grpo.tools.templating import ENVIRONMENT

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "assets" / "tiny"
OLD_REWARD = MODEL / "VideoReward"
SIDE = 48  # pixels of a clip
FPS = 8
STEPS = 3  # denoising steps, as in training
QUESTION = "vq"
STUDY_PROMPTS = 100
CLIPS_PER_PROMPT = 3
PAIRS = 300
NOISE = 0.10  # of the rater who teaches
JUDGE_NOISE = 0.20  # of the one who judges
TRAIN_PROMPTS = 256
HELD_PROMPTS = 64
RECIPE = "configs/tiny_cpu_nft.yaml"
ITERATIONS = 30
WEIGHTS = {"VQ": 1.5, "MQ": 0.25, "TA": 1.5}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--output", type=Path, default=Path("outputs/people"), help="folder for everything")
    add("--seeds", type=int, nargs="+", default=[0], help="one run of the loop for each")
    add("--record", type=Path, help="JSON file for the results of all seeds; a table beside it")
    args = parser.parse_args(arguments)
    records = []
    for seed in args.seeds:
        begin = time.time()
        loop = Loop(args.output / f"seed-{seed}", seed)
        records.append(loop.run())
        print(f"seed {seed}: {time.time() - begin:.0f} s; {loop.folder / 'people.html'}")
        if args.record:
            args.record.parent.mkdir(parents=True, exist_ok=True)
            about = {"date": time.strftime("%F"), "torch": torch.__version__, "seeds": records}
            write_json(args.record, about)
            args.record.with_suffix(".md").write_text(record_page(about))


class Loop:
    """The stages, in order; each leaves a file or folder."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.seed = seed
        self.reward = folder / "reward"
        self.run_folder = folder / "run"
        prompts = open_prompts(seed)
        self.study_prompts = prompts[:STUDY_PROMPTS]
        self.held_prompts = prompts[STUDY_PROMPTS : STUDY_PROMPTS + HELD_PROMPTS]
        rest = prompts[STUDY_PROMPTS + HELD_PROMPTS :]
        self.train_prompts = rest[:TRAIN_PROMPTS]

    def run(self) -> dict[str, Any]:
        """The results of all stages."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in ("study_prompts", "held_prompts", "train_prompts"):
            (self.folder / f"{name}.txt").write_text("\n".join(getattr(self, name)) + "\n")
        for stage in (self.teach, self.learn, self.train, self.compare):
            self.timed(stage)
        record = self.results()
        write_json(self.folder / "results.json", record)
        self.write_page(record)
        return record

    def timed(self, stage: Callable[[], None]) -> None:
        """Run a stage, and add its seconds to those of earlier calls, which may have been killed."""
        file = self.folder / "seconds.json"
        begin = time.time()
        try:
            stage()
        finally:
            seconds = read_object(file) if file.is_file() else {}
            seconds[stage.__name__] = seconds.get(stage.__name__, 0) + time.time() - begin
            write_json(file, seconds)

    # stages

    def teach(self) -> None:
        """A rater with the taste labels pairs of clips of the base model."""
        file = self.folder / "taught.jsonl"
        words = [str(MODEL), "--output", str(file), "--questions", QUESTION, "--raters", "teacher"]
        words += ["--pairs", str(PAIRS), "--repeat", "0", "--study_seed", str(self.seed)]
        words += ["--config", RECIPE]
        words += ["--validation_prompts", str(self.folder / "study_prompts.txt"), "--seeds"]
        words += [str(100 * self.seed + number) for number in range(CLIPS_PER_PROMPT)]
        self.label(words, file, Rater(NOISE, self.seed, SIDE), PAIRS)

    def learn(self) -> None:
        """Fine-tune the embedded reward on the answers."""
        if self.reward.is_dir():
            return
        tool(
            "learn",
            str(self.folder / "taught.jsonl"),
            "--base",
            str(OLD_REWARD),
            "--output",
            str(self.reward),
        )

    def train(self) -> None:
        """Post-train with the new reward; the old one is held out, so that hacking shows."""
        if (self.ends()[1] / LISTING).is_file():
            return
        command = [sys.executable, "post_train.py", "--config", RECIPE]
        command += ["--output_dir", str(self.run_folder), "--reward_path", str(self.reward)]
        command += ["--reward_weights", json.dumps(WEIGHTS), "--max_steps", str(ITERATIONS)]
        command += ["--train_prompts", str(self.folder / "train_prompts.txt")]
        command += ["--validation_prompts", str(self.folder / "held_prompts.txt")]
        command += ["--validation_videos", str(HELD_PROMPTS), "--seed", str(self.seed)]
        command += ["--holdout_reward", "research/people/old_reward.py:old_reward"]
        command += ["--save_interval", "10", "--resume_from_checkpoint", "auto"]
        subprocess.run(command, cwd=ROOT, check=True)

    def ends(self) -> tuple[Path, Path]:
        """Folders of clips of the held-out prompts, before and after training."""
        validations = self.run_folder / "validation"
        return validations / "step-000000", validations / f"step-{ITERATIONS:06d}"

    def compare(self) -> None:
        """A rater with other noise compares the clips before and after, blindly."""
        file = self.folder / "preferences.jsonl"
        before, after = self.ends()
        words = [str(before), str(after), "--output", str(file), "--questions", QUESTION]
        words += ["--raters", "judge", "--repeat", "0.1"]
        pairs = HELD_PROMPTS + round(0.1 * HELD_PROMPTS)
        self.label(words, file, Rater(JUDGE_NOISE, 1000 + self.seed, SIDE), pairs)

    def label(self, words: Sequence[str], file: Path, rater: Rater, expected: int) -> None:
        """Let a rater answer all pairs of a study through the page."""
        if file.is_file() and len(read_answers(file)[1]) == expected:
            return
        with serving(["label", *words, "--port", "0"]) as address:
            rate(address, rater.choose, QUESTION)

    # results

    def results(self) -> dict[str, Any]:
        before, after = (read_clips(place, anywhere=True) for place in self.ends())
        pairs = pair_clips(before, after)
        tastes_before = tastes([clip.path for clip, _ in pairs])
        tastes_after = tastes([clip.path for _, clip in pairs])
        gains = [b - a for a, b in zip(tastes_before, tastes_after, strict=True)]
        matches = [b.values["gold/match"] - a.values["gold/match"] for a, b in pairs]
        study, answers = read_answers(self.folder / "preferences.jsonl")
        # the pair's first clip is the one from before
        wins = [1 - answer.outcome(QUESTION) for answer in answers]
        verdict = share(wins, [study.prompt(answer.pair) for answer in answers])
        learning = read_object(self.reward / "learning.json")
        return {
            "seed": self.seed,
            "answers": learning["answers"],
            "held_out_answers": {
                "before": learning["before"]["accuracy"],
                "after": learning["after"]["accuracy"],
            },
            "taste_accuracy": self.taste_accuracy(),
            "taste": {"before": mean(tastes_before), "after": mean(tastes_after)},
            "taste_gain": vars(interval(gains)),
            "match": {
                "before": mean([clip.values["gold/match"] for clip, _ in pairs]),
                "after": mean([clip.values["gold/match"] for _, clip in pairs]),
            },
            "match_gain": vars(interval(matches)),
            "blind_win_rate": asdict(verdict),
            "verdicts": {
                "after": wins.count(1.0),
                "tie": wins.count(0.5),
                "before": wins.count(0.0),
            },
            "seconds": read_object(self.folder / "seconds.json"),
        }

    def taste_accuracy(self) -> dict[str, Any]:
        """How often VQ orders clips as the taste does, without noise, for prompts that learning never saw."""
        file = self.folder / "taste_accuracy.json"
        if file.is_file():
            return read_object(file)
        from research.tiny.quality import sample_clips
        from sage_grpo.algo.sde import build_schedule, flow_sigmas
        from sage_grpo.models.registry import open_backbone

        group = 3
        backbone = open_backbone(MODEL, torch.device("cpu"))
        schedule = build_schedule("ode", flow_sigmas(STEPS, backbone.sampling.shift), 0.0)
        sampled = sample_clips(backbone, schedule, self.held_prompts, group, 1.0, seed=77)
        clips = torch.cat(list(sampled))
        liked = taste(clips).tolist()
        prompts = [prompt for prompt in self.held_prompts for _ in range(group)]
        result = {}
        for name, folder in {"before": OLD_REWARD, "after": self.reward}.items():
            reward = VideoAlign(folder)
            scores = []
            for start in range(0, len(clips), 32):
                batch = slice(start, start + 32)
                scores += reward.score(list(clips[batch]), prompts[batch], FPS)["VQ"].tolist()
            right = ordered_rightly(scores, liked, group)
            accuracy = share([value for _, value in right], [number for number, _ in right])
            result[name] = asdict(accuracy)
        write_json(file, result)
        return result

    def write_page(self, record: dict[str, Any]) -> None:
        """The page that tells the story."""
        before, after = (read_clips(place, anywhere=True) for place in self.ends())
        pairs = pair_clips(before, after)[:: max(1, HELD_PROMPTS // 9)][:9]
        study, answers = read_answers(self.folder / "taught.jsonl")
        template = ENVIRONMENT.from_string((Path(__file__).parent / "people.html").read_text())
        text = template.render(
            title="People in the loop",
            record=record,
            noise=NOISE,
            judge_noise=JUDGE_NOISE,
            iterations=ITERATIONS,
            held_prompts=HELD_PROMPTS,
            prompts=len({study.prompt(answer.pair) for answer in answers}),
            taught=self.clear_answers(study, answers),
            pairs=pairs,
        )
        (self.folder / "people.html").write_text(text, encoding="utf-8")

    def clear_answers(
        self, study: Study, answers: Sequence[Answer]
    ) -> list[tuple[str, Path, Path]]:
        """Prompt, preferred clip and other clip of three answers: those with the clearest reason of the first dozen."""
        shown = []
        for answer in answers:
            outcome = answer.outcome(QUESTION)
            if outcome == 0.5 or len(shown) == 12:
                continue
            first, second = (
                clip_path(self.folder / "taught.jsonl", study.clips[number])
                for number in study.pairs[answer.pair]
            )
            liked, other = (first, second) if outcome == 1 else (second, first)
            better, worse = tastes([liked, other])
            shown.append((better - worse, study.prompt(answer.pair), liked, other))
        shown.sort(key=lambda row: row[0], reverse=True)
        return [(prompt, liked, other) for _, prompt, liked, other in shown[:3]]


def record_page(about: dict[str, Any]) -> str:
    """The results of all seeds as a table, with their means and 95 % intervals."""
    records = about["seeds"]

    def over_seeds(*names: str) -> Interval:
        values = []
        for record in records:
            part = record
            for name in names:
                part = part[name]
            values.append(part["mean"])
        return interval(values)

    means = {
        "taste_before": over_seeds("taste_accuracy", "before"),
        "taste_after": over_seeds("taste_accuracy", "after"),
        "answers_before": over_seeds("held_out_answers", "before"),
        "answers_after": over_seeds("held_out_answers", "after"),
        "taste_gain": over_seeds("taste_gain"),
        "match_gain": over_seeds("match_gain"),
        "wins": over_seeds("blind_win_rate"),
    }
    template = ENVIRONMENT.from_string((Path(__file__).parent / "record.md").read_text())
    return template.render(
        about=about,
        means=means,
        pairs=PAIRS,
        noise=NOISE,
        judge_noise=JUDGE_NOISE,
        recipe=RECIPE,
        iterations=ITERATIONS,
        held_prompts=HELD_PROMPTS,
    )


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def tastes(files: Sequence[Path]) -> list[float]:
    """How much the raters like the clips of these files, without noise."""
    videos = [reduced(read_mp4(file)[0], SIDE, SIDE) for file in files]
    return taste(torch.stack(videos)).tolist()


def tool(*words: str) -> None:
    command = [sys.executable, "-m", "sage_grpo.tools.prefer", *words]
    print("$", *command[1:], flush=True)
    subprocess.run(command, cwd=ROOT, check=True)


@contextmanager
def serving(words: Sequence[str]) -> Iterator[str]:
    """Run `label` with these words; gives the address of its only rater."""
    command = [sys.executable, "-m", "sage_grpo.tools.prefer", *words]
    print("$", *command[1:], flush=True)
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        address = None
        while address is None:
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"`label` ended with exit code {process.wait()}")
            match = re.search(r"http://127\.0\.0\.1:\d+/\?token=\S+", line)
            address = match[0] if match else None
        yield address
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


if __name__ == "__main__":
    main()
