"""`learn`: fine-tune VideoAlign on the answers of a study, and write it only if it is better on left-out prompts."""

import argparse
import hashlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sage_grpo import __version__
from sage_grpo.algo.preference import THETA, outcome_probabilities, tie_losses
from sage_grpo.exit_codes import DONE, FAILED
from sage_grpo.files.foreign import new_folder
from sage_grpo.files.json_files import write_json
from sage_grpo.rewards.videoalign.adapter import adapter_size
from sage_grpo.rewards.videoalign.folder import DIMENSIONS, check_folder
from sage_grpo.rewards.videoalign.reward import VideoAlign
from sage_grpo.rewards.videoalign.writing import (
    stored_dtype,
    write_with_head,
    write_with_weights,
)
from sage_grpo.tools.plan.calibration import MEASURED_ON, Calibration, calibrate
from sage_grpo.tools.prefer.answers import Answer, read_answers
from sage_grpo.tools.prefer.heads import (
    Comparisons,
    choose_strength,
    fit_heads,
    full_head,
    prompt_folds,
    raw_scores,
)
from sage_grpo.tools.prefer.lora import LARGE, LoraLearner, Recipe
from sage_grpo.tools.prefer.statistics import Share, share
from sage_grpo.tools.prefer.study import Study, StudyError, clip_path
from sage_grpo.tools.prefer.study_clips import BATCH, StudyClips
from sage_grpo.tools.templating import render

MIN_PROMPTS = 10
BINS = 5  # of calibration
RESAMPLES = 400  # of a bootstrap
GB = 1e9  # bytes
# of memory per vision patch of a batch in a forward of the published model; 3.9 GB were measured for 80,640
PATCH_BYTES = 48e3
MARKER = "made-by-prefer-learn"  # file in the folder OUTPUT.partial, which is deleted in the end


def learn(options: argparse.Namespace) -> int:
    """Returns the exit code: FAILED if the new reward is not better and was not written."""
    if options.output.exists():
        raise StudyError(f"{options.output} exists already; give another --output")
    study, answers = read_answers(options.answers)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    open_reward = partial(VideoAlign, options.base, device, dtype)
    draft = options.output.with_name(f"{options.output.name}.partial")
    key = clips_key(options, study, device, dtype)
    clips = StudyClips(open_reward(), study, options.answers, draft, key)
    comparisons = comparisons_of(study, answers, clips.reward.norm)
    training, held_out = split(comparisons, options.holdout, options.seed)
    print(plan_line(clips, options, len(comparisons)), flush=True)

    prepare_draft(draft)
    hidden = clips.hidden(keeps=options.method == "lora")
    old_head = full_head(clips.reward.head).cpu().double()
    losses = choose_strength(hidden, old_head, training, options.seed)
    strength = min(losses, key=losses.__getitem__)
    learner = METHODS[options.method](
        Material(options, open_reward, clips, hidden, old_head, strength)
    )

    before = judged(held_out, raw_scores(hidden.double(), old_head))
    after = judged(held_out, learner.judge(training, held_out))
    record = {
        "study": options.answers.name,
        "base": options.base.name,
        "method": options.method,
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
        **learner.record(),
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
    # the check is done: the written reward also learns from the held-out answers
    learner.write(comparisons, folder)
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


def prepare_draft(draft: Path) -> None:
    """Make the folder for what is computed, unless an earlier call has; any other folder of that name is left alone."""
    if not draft.exists() and not draft.is_symlink():
        marked = new_folder(draft)
        (marked / MARKER).touch()
        marked.rename(draft)
    if draft.is_symlink() or not (draft / MARKER).is_file():
        raise StudyError(
            f"{draft} was not made by `learn`, which needs that name; move it away, or give another --output"
        )


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
    if num_prompts < MIN_PROMPTS:
        raise StudyError(
            f"the answers are about {num_prompts} prompts; learning needs at least {MIN_PROMPTS}"
        )
    folds = prompt_folds(comparisons.prompts, max(2, round(1 / holdout)), seed)
    training = [row for row, fold in enumerate(folds) if fold != 0]
    held_out = [row for row, fold in enumerate(folds) if fold == 0]
    return comparisons[training], comparisons[held_out]


# before it starts


def plan_line(clips: StudyClips, options: argparse.Namespace, num_comparisons: int) -> str:
    """Memory and minutes, from the planner's figures for the published model; a small one takes seconds."""
    reward = clips.reward
    num_clips = len(clips.study.clips)
    parameters = sum(parameter.numel() for parameter in reward.model.parameters())
    text = f"{num_clips} clips through a reward of {parameters / 1e6:,.0f} M parameters on {reward.device}"
    if parameters < LARGE:
        return f"{text}: under 1 GB, and a few minutes on two cores at most"
    calibration = calibrate()
    cost = calibration.rewards["videoalign"]
    patches = clips.patches(0, keeps=False)[0]
    memory = PATCH_BYTES * len(patches) * min(BATCH, num_clips)
    forwards = num_clips
    if options.method == "lora":
        # training comes after the hidden states
        memory = max(memory, lora_bytes(clips, options.rank, calibration))
        # two trainings; each pass over a pair: two clips, forward, layers recomputed, backward to the adapters
        forwards += 2 * options.epochs * num_comparisons * 2 * 3
    memory += cost.weight_bytes
    minutes = forwards * cost.seconds / 60
    return f"{text}: {memory / GB:.1f} GB, at most about {minutes:.0f} minutes on an {MEASURED_ON}"


def lora_bytes(clips: StudyClips, rank: int, calibration: Calibration) -> float:
    """Memory that training an adapter takes besides the weights: its state, and activations of one pair."""
    model = clips.reward.model
    text = model.config.text_config
    state = 16 * adapter_size(model, rank)  # fp32: weights, gradients, two moments
    inputs = clips.inputs([0, 0], keeps=False)
    num_tokens = inputs["input_ids"].numel()
    unit = 2 * num_tokens * text.hidden_size  # one bf16 number per token and channel
    layers = unit * (text.num_hidden_layers + calibration.training_activations.eager)
    return state + layers + PATCH_BYTES * len(inputs["pixel_values_videos"])


def clips_key(options: argparse.Namespace, study: Study, device: str, dtype: torch.dtype) -> str:
    """What stored clips and hidden states depend on: study and clips, the weights of the base, and where it runs."""
    digest = hashlib.sha256(f"{device} {dtype}\n".encode())
    with options.answers.open("rb") as file:
        digest.update(file.readline())
    clips = [clip_path(options.answers, clip) for clip in study.clips]
    weights = [path for path in sorted(options.base.rglob("*")) if path.is_file()]
    for path in (*clips, *weights):
        status = path.stat()
        digest.update(f"{path}\0{status.st_size}\0{status.st_mtime_ns}\n".encode(errors="replace"))
    return digest.hexdigest()[:16]


# what is learned


@dataclass(frozen=True)
class Material:
    """Everything to learn from besides the answers."""

    options: argparse.Namespace
    open_reward: Callable[[], VideoAlign]  # the base
    clips: StudyClips
    hidden: Tensor  # (N, 3, D) of the base
    old_head: Tensor  # (3, D)
    strength: float  # of the penalty on new heads

    def fitted_head(self, comparisons: Comparisons) -> Tensor:
        return fit_heads(self.hidden, self.old_head, comparisons, self.strength)


class Heads:
    """Learns the reward heads alone, on hidden states of the base: a convex problem, solved in seconds."""

    def __init__(self, material: Material) -> None:
        self.material = material

    def judge(self, comparisons: Comparisons, held_out: Comparisons) -> Tensor:
        """Raw scores (N, 3) of the held-out clips, after learning from other comparisons."""
        head = self.material.fitted_head(comparisons)
        return raw_scores(self.material.hidden.double(), head)

    def write(self, comparisons: Comparisons, folder: Path) -> None:
        """Learn from all comparisons, and write the reward."""
        write_with_head(self.material.options.base, folder, self.material.fitted_head(comparisons))

    def record(self) -> dict[str, Any]:
        """The part of the record that only this method has."""
        return {"lora": None}


class Lora:
    """Learns an adapter of the language model, starting from fitted heads."""

    def __init__(self, material: Material) -> None:
        options = material.options
        self.base = options.base
        self.recipe = Recipe(
            rank=options.rank,
            epochs=options.epochs,
            lr=options.learning_rate,
            batch=options.batch,
            seed=options.seed,
        )
        digest = hashlib.sha256(options.answers.read_bytes())
        digest.update(f"{material.clips.key} {options.holdout} {self.recipe}".encode())
        self.learner = LoraLearner(
            open_reward=material.open_reward,
            clips=material.clips,
            first_head=material.fitted_head,
            base_scores=raw_scores(material.hidden.double(), material.old_head),
            recipe=self.recipe,
            dtype=stored_dtype(options.base),
            key=digest.hexdigest()[:16],
        )

    def judge(self, comparisons: Comparisons, held_out: Comparisons) -> Tensor:
        """Raw scores (N, 3) of the held-out clips, after learning from other comparisons."""
        return self.learner.judge(comparisons, held_out)

    def write(self, comparisons: Comparisons, folder: Path) -> None:
        """Learn from all comparisons, and write the reward with the adapter merged."""
        model, head = self.learner.final(comparisons)
        write_with_weights(self.base, folder, model, head)

    def record(self) -> dict[str, Any]:
        """The part of the record that only this method has."""
        losses = {str(epoch): loss for epoch, loss in self.learner.losses.items()}
        return {"lora": asdict(self.recipe) | {"trained": self.learner.epochs, "losses": losses}}


METHODS = {"heads": Heads, "lora": Lora}


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

    accuracy: Share  # of the answers that are not ties
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
