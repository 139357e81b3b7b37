"""`learn`: fine-tune VideoAlign on the answers of a study, and write it only if it is better on left-out prompts."""

import argparse
import hashlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm

from sage_grpo import __version__
from sage_grpo.algo.preference import THETA, outcome_probabilities, tie_losses
from sage_grpo.exit_codes import DONE, FAILED
from sage_grpo.files.json_files import write_json
from sage_grpo.rewards.videoalign.folder import DIMENSIONS, check_folder
from sage_grpo.rewards.videoalign.reward import VideoAlign
from sage_grpo.rewards.videoalign.writing import write_with_head
from sage_grpo.runs.media import read_mp4
from sage_grpo.tools.plan.calibration import MEASURED_ON, calibrate
from sage_grpo.tools.prefer.answers import Answer, read_answers
from sage_grpo.tools.prefer.heads import (
    Comparisons,
    choose_strength,
    fit_heads,
    full_head,
    prompt_folds,
    raw_scores,
)
from sage_grpo.tools.prefer.statistics import Share, share
from sage_grpo.tools.prefer.study import Study, StudyError, clip_path
from sage_grpo.tools.templating import render

FEWEST_PROMPTS = 10
BATCH = 16  # clips per forward
BINS = 5  # of calibration
RESAMPLES = 400  # of a bootstrap
GB = 1e9  # bytes
LARGE = 1e9  # parameters from which on the planner's figures for the published model apply


def learn(options: argparse.Namespace) -> int:
    """Returns the exit code: FAILED if the new reward is not better and was not written."""
    if options.output.exists():
        raise StudyError(f"{options.output} exists already; give another --output")
    study, answers = read_answers(options.answers)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    reward = VideoAlign(options.base, device, dtype)
    comparisons = comparisons_of(study, answers, reward.norm)
    training, held_out = split(comparisons, options.holdout, options.seed)
    print(plan_line(reward, study), flush=True)

    draft = options.output.with_name(options.output.name + ".partial")
    hidden = cached_hidden(reward, study, options.answers, draft, cache_key(options))
    old_head = full_head(reward.head).cpu().double()
    losses = choose_strength(hidden, old_head, training, options.seed)
    strength = min(losses, key=losses.__getitem__)
    new_head = fit_heads(hidden, old_head, training, strength)

    before = judged(held_out, raw_scores(hidden.double(), old_head))
    after = judged(held_out, raw_scores(hidden.double(), new_head))
    record = {
        "study": options.answers.name,
        "base": options.base.name,
        "method": "heads",
        "answers": len(answers),
        "raters": len({answer.rater for answer in answers}),
        "pairs": len({answer.pair for answer in answers}),
        "questions": list(study.questions),
        "comparisons": {"training": len(training), "held_out": len(held_out)},
        "prompts": {
            "training": len(set(training.prompts)),
            "held_out": len(set(held_out.prompts)),
        },
        "penalty": strength,
        "cross_validation": {str(value): loss for value, loss in losses.items()},
        "theta": THETA,
        "seed": options.seed,
        "before": asdict(before),
        "after": asdict(after),
        "version": __version__,
    }
    print(summary(before, after))
    better = after.accuracy.mean > before.accuracy.mean and after.loss.value < before.loss.value
    if not better and not options.even_if_worse:
        print(
            f"not written: on left-out prompts the new reward is not better than {options.base}; "
            "collect more answers, or give --even_if_worse"
        )
        return FAILED

    folder = draft / "reward"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    # the check is done: what is written learns from the held-out answers too
    final_head = fit_heads(hidden, old_head, comparisons, strength)
    write_with_head(options.base, folder, final_head)
    write_json(folder / "learning.json", record)
    card = render(
        "reward_card.md", record=record, before=before, after=after, dimensions=DIMENSIONS
    )
    (folder / "README.md").write_text(card, encoding="utf-8")
    check_folder(folder)
    folder.rename(options.output)
    shutil.rmtree(draft)
    print(f"wrote {options.output}; train with --reward_path {options.output}")
    return DONE


# answers as comparisons


def comparisons_of(
    study: Study, answers: Sequence[Answer], norm: dict[str, float] | None
) -> Comparisons:
    """One row per answer and question. `overall` asks about the sum of the normalized scores."""
    shares_of = {
        name.lower(): [float(name == other) for other in DIMENSIONS] for name in DIMENSIONS
    }
    shares_of["overall"] = [1 / norm[f"{name}_std"] if norm else 1.0 for name in DIMENSIONS]
    first = []
    second = []
    shares = []
    labels = []
    prompts = []
    questions = []
    for answer in answers:
        for question in study.questions:
            a, b = study.pairs[answer.pair]
            first.append(a)
            second.append(b)
            shares.append(shares_of[question])
            labels.append(2 * answer.outcome(question) - 1)
            prompts.append(study.prompt(answer.pair))
            questions.append(question)
    return Comparisons(
        first=torch.tensor(first, dtype=torch.long),
        second=torch.tensor(second, dtype=torch.long),
        shares=torch.tensor(shares, dtype=torch.float64),
        labels=torch.tensor(labels, dtype=torch.float64),
        prompts=tuple(prompts),
        questions=tuple(questions),
    )


def split(comparisons: Comparisons, holdout: float, seed: int) -> tuple[Comparisons, Comparisons]:
    """Comparisons to learn from and held-out ones, without a common prompt."""
    num_prompts = len(set(comparisons.prompts))
    if num_prompts < FEWEST_PROMPTS:
        raise StudyError(
            f"the answers are about {num_prompts} prompts; learning takes at least {FEWEST_PROMPTS}"
        )
    folds = prompt_folds(comparisons.prompts, max(2, round(1 / holdout)), seed)
    training = [row for row, fold in enumerate(folds) if fold != 0]
    held_out = [row for row, fold in enumerate(folds) if fold == 0]
    return comparisons[training], comparisons[held_out]


# hidden states


def plan_line(reward: VideoAlign, study: Study) -> str:
    """Memory and minutes, from the planner's figures for the published model; a small one takes seconds."""
    parameters = sum(parameter.numel() for parameter in reward.model.parameters())
    clips = len(study.clips)
    text = (
        f"{clips} clips through a reward of {parameters / 1e6:,.0f} M parameters on {reward.device}"
    )
    if parameters < LARGE:
        return f"{text}: under 1 GB, and a few minutes on two cores at most"
    cost = calibrate().rewards["videoalign"]
    memory = (cost.weight_bytes + cost.forward_bytes) / GB
    minutes = clips * cost.seconds / 60
    return f"{text}: {memory:.1f} GB, about {minutes:.0f} minutes on an {MEASURED_ON}; then seconds"


def cache_key(options: argparse.Namespace) -> str:
    """What stored hidden states depend on: the study, and the weights of the base."""
    with options.answers.open("rb") as file:
        digest = hashlib.sha256(file.readline())
    for path in sorted(options.base.rglob("*")):
        if path.is_file():
            status = path.stat()
            digest.update(
                f"{path}\0{status.st_size}\0{status.st_mtime_ns}\n".encode(errors="replace")
            )
    return digest.hexdigest()[:16]


@torch.no_grad()
def cached_hidden(reward: VideoAlign, study: Study, answers: Path, draft: Path, key: str) -> Tensor:
    """Hidden states (N, 3, D) of all clips; each batch is stored, so that a second call goes on after a crash."""
    draft.mkdir(parents=True, exist_ok=True)
    parts = []
    starts = range(0, len(study.clips), BATCH)
    for start in tqdm(starts, "hidden states", unit="batch"):
        file = draft / f"{key}-{start:06d}.safetensors"
        clips = study.clips[start : start + BATCH]
        if not file.is_file():
            videos = [read_mp4(clip_path(answers, clip)) for clip in clips]
            inputs = reward.inputs(
                [
                    reduced(video, clip.height, clip.width)
                    for clip, (video, _) in zip(clips, videos, strict=True)
                ],
                [clip.prompt for clip in clips],
                [fps for _, fps in videos],
            )
            unfinished = file.with_suffix(".new")
            save_file({"hidden": reward.hidden(inputs).float().cpu().contiguous()}, unfinished)
            unfinished.rename(file)
        parts.append(load_file(file)["hidden"])
    return torch.cat(parts)


def reduced(video: Tensor, height: int, width: int) -> Tensor:
    """A clip (F, H, W, 3) in the size in which it was sampled: `write_mp4` magnifies tiny clips by a whole number."""
    rows, columns = video.shape[1:3]
    is_magnified = height and width and rows > height and rows % height == 0
    if not is_magnified or columns * height != rows * width:
        return video
    blocks = video.float().unflatten(2, (width, -1)).unflatten(1, (height, -1))
    return blocks.mean((2, 4)).round().to(torch.uint8)  # (F, height, width, 3)


# how good a reward is


@dataclass(frozen=True)
class Range:
    """A value with its 95 % interval, from a bootstrap over prompts."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Judged:
    """How well scores agree with held-out answers."""

    accuracy: Share  # of the answers that are no ties
    loss: Range  # mean of minus the log-probability of an answer
    calibration_error: Range  # mean difference of predicted and observed shares, ties left out
    bins: list[dict[str, float]]  # predicted and observed share, count
    by_question: dict[str, Share]


def judged(comparisons: Comparisons, raw: Tensor) -> Judged:
    """Compare raw scores (N, 3) with answers."""
    differences = comparisons.differences(raw)
    labels = comparisons.labels
    decided = labels != 0
    right = (differences.sign() == labels.sign()).double()
    right[differences == 0] = 0.5
    rows = decided.nonzero()[:, 0].tolist()

    def accuracy(chosen: Sequence[int]) -> Share:
        return share(right[list(chosen)].tolist(), [comparisons.prompts[row] for row in chosen])

    by_question = {}
    for question in dict.fromkeys(comparisons.questions):
        by_question[question] = accuracy(
            [row for row in rows if comparisons.questions[row] == question]
        )
    losses = tie_losses(differences, labels)

    def loss(chosen: Tensor) -> float:
        return losses[chosen].mean().item()

    def calibration_error(chosen: Tensor) -> float:
        clear = chosen[decided[chosen]]
        return calibration(differences[clear], labels[clear])[1]

    return Judged(
        accuracy=accuracy(rows),
        loss=bootstrapped(loss, comparisons.prompts),
        calibration_error=bootstrapped(calibration_error, comparisons.prompts),
        bins=calibration(differences[decided], labels[decided])[0],
        by_question=by_question,
    )


def bootstrapped(statistic: Callable[[Tensor], float], prompts: Sequence[str]) -> Range:
    """A statistic of rows, and its 95 % interval from a bootstrap over prompts, each with all of its rows."""
    rows_of: dict[str, list[int]] = {}
    for row, prompt in enumerate(prompts):
        rows_of.setdefault(prompt, []).append(row)
    groups = [torch.tensor(rows) for rows in rows_of.values()]
    generator = np.random.default_rng(0)
    values = []
    for _ in range(RESAMPLES):
        drawn = generator.integers(len(groups), size=len(groups))
        values.append(statistic(torch.cat([groups[number] for number in drawn])))
    low, high = np.nanquantile(values, [0.025, 0.975])
    return Range(statistic(torch.arange(len(prompts))), float(low), float(high))


def calibration(differences: Tensor, labels: Tensor) -> tuple[list[dict[str, float]], float]:
    """Predicted and observed shares of the clip that scores higher, in bins of equal counts; their mean distance."""
    probabilities = outcome_probabilities(differences)
    certain = probabilities[:, 0] / (probabilities[:, 0] + probabilities[:, 2])
    predicted = torch.maximum(certain, 1 - certain)
    observed = (differences.sign() == labels.sign()).double()
    bins = []
    error = 0.0
    for rows in predicted.argsort().tensor_split(BINS):
        if not len(rows):
            continue
        mean_predicted = predicted[rows].mean().item()
        mean_observed = observed[rows].mean().item()
        bins.append({"predicted": mean_predicted, "observed": mean_observed, "count": len(rows)})
        error += len(rows) / len(predicted) * abs(mean_predicted - mean_observed)
    return bins, error


def summary(before: Judged, after: Judged) -> str:
    """The table for the terminal."""
    lines = ["held-out answers      before                  after"]
    for question, old in before.by_question.items():
        new = after.by_question[question]
        lines.append(f"{question:20s}  {shown(old):22s}  {shown(new)}")
    lines.append(f"{'loss':20s}  {ranged(before.loss):22s}  {ranged(after.loss)}")
    old = ranged(before.calibration_error)
    lines.append(f"{'calibration error':20s}  {old:22s}  {ranged(after.calibration_error)}")
    return "\n".join(lines)


def ranged(value: Range) -> str:
    return f"{value.value:.3f} ({value.low:.2f} to {value.high:.2f})"


def shown(value: Share) -> str:
    return f"{value.mean:.1%} ({value.low:.0%} to {value.high:.0%})"
