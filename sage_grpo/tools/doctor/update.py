"""One micro-batch through the trainer's rollout and loss, without an optimizer step."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields

import torch
from torch import Tensor
from tqdm import tqdm

from sage_grpo.algo.equalizer import equalizer, gradient_scale
from sage_grpo.tools.doctor.check_result import CheckResult, indented, ok, wrong
from sage_grpo.tools.paired import aligned
from sage_grpo.train.rollout import Trajectory
from sage_grpo.train.trainer import Trainer
from sage_grpo.train.update import Objective

SHOWN_PROBLEMS = 3  # of possibly hundreds of parameters


def check_update(trainer: Trainer) -> Iterator[CheckResult]:
    """Trajectories must be finite, the first ratio exactly 1, and gradients where they belong."""
    c = trainer.config
    # The old policy of a resumed run lags behind; the first ratio is 1 only if the trained policy samples.
    trainer.optimization.old_policy = {}
    (sampled,) = trainer.roll_out(trainer.micro_batches()[:1])
    (trajectory,) = trainer.prepare_for_training([trained_part(trainer, sampled)])
    num_clips = trajectory.size
    lost = int((~trajectory.is_finite).sum())
    if lost:
        yield wrong(
            "rollout",
            f"{lost} of {num_clips} trajectories are not finite",
            f"lower eta ({c.eta:g}) or guidance_scale ({c.guidance_scale:g}), try dtype fp32, "
            "check the weights",
            numbers={"lost": lost, "paths": num_clips},
        )
        return

    trainer.prepare_anchor([trajectory])
    num_pairs = trajectory.trained_positions.numel()
    objective = Objective(
        backbone=trainer.backbone,
        algorithm=trainer.algorithm,
        guidance=trainer.trained_guidance,
        schedule=trainer.schedule,
        kl_lambda=trainer.controller.kl_lambda,
        num_pairs=num_pairs,
    )
    # There is no reward here: alternate between good and bad clips.
    advantages = 1 - 2 * (torch.arange(num_clips, device=trajectory.data.x.device) % 2.0)
    stats = trainer.no_stats()
    turns = tqdm(trajectory.trained_positions.T, "training forward", unit="step", leave=False)
    for positions in turns:
        objective.backward(trajectory, positions, advantages, stats)

    yield ratio_result(num_pairs, stats.max_deviation.max().item())
    yield gradient_result(trainer, trajectory)
    trainer.optimization.zero_grad()
    if trainer.algorithm.explores:
        yield balance_result(trainer, objective, trajectory, advantages)


def trained_part(trainer: Trainer, sampled: Trajectory) -> Trajectory:
    """The first clips of a sampled micro-batch, as many as are trained together; no reward chooses them here."""
    size = trainer.config.trained_micro_batch
    clips = sampled.micro_batch[:size]
    data, _ = sampled.data.split([size, sampled.size - size])
    return trainer.rollout_sampler([clips]).trajectory(clips, data, sampled.is_finite[:size])


def ratio_result(num_pairs: int, deviation: float) -> CheckResult:
    """WRONG unless the first ratio of every pair is exactly 1."""
    numbers = {"pairs": num_pairs, "deviation": deviation}
    subject = f"the first ratio of {num_pairs} (clip, step) pairs"
    if deviation == 0:
        text = f"{subject} is exactly 1, so training repeats the rollout's arithmetic"
        return ok("ratio", text, numbers=numbers)
    return wrong(
        "ratio",
        f"{subject} differs from 1 by up to {deviation:.3g}",
        "rollout and training run different arithmetic, and every gradient would be wrong: look for "
        "dropout, autocast, another attention kernel or batch shape, or code that depends on whether "
        "gradients are enabled",
        numbers=numbers,
    )


def gradient_result(trainer: Trainer, trajectory: Trajectory) -> CheckResult:
    """After a backward pass: WRONG unless the trained parameters, and only those, have finite gradients."""
    trained = trainer.optimization.parameters
    silent = [name for name, p in trained.items() if p.grad is None or not p.grad.any()]
    reasons = {name: reason_for_silence(trainer, trajectory, name) for name in silent}
    problems = [
        f"{name} has no gradient although it is trained" for name in silent if not reasons[name]
    ]

    trained_ids = {id(parameter) for parameter in trained.values()}
    for name, parameter in trainer.backbone.transformer.named_parameters():
        if parameter.grad is not None and id(parameter) not in trained_ids:
            problems.append(f"{name} has a gradient although it is frozen")

    norm = trainer.optimization.clip()
    if not math.isfinite(norm):
        problems.append("the gradient is not finite: lower eta, or try dtype fp32")

    waiting = Counter(reason for reason in reasons.values() if reason)
    text = (
        f"{len(trained) - len(silent)} of {len(trained)} trained tensors have a gradient, "
        f"total norm {norm:.3g}"
    )
    text += "".join(f"; {count} {reason}" for reason, count in waiting.items())
    numbers = {
        "trained": len(trained),
        "silent": len(silent),
        "norm": norm,
        "waiting": dict(waiting),
        "wrong": problems,
    }
    if not problems:
        return ok("gradients", text, numbers=numbers)
    remedy = (
        f"{'; '.join(problems[:SHOWN_PROBLEMS])} ({len(problems)} in all): "
        "check requires_grad, and what the forward uses"
    )
    return wrong("gradients", text, remedy, numbers=numbers)


def reason_for_silence(trainer: Trainer, trajectory: Trajectory, name: str) -> str:
    """Why a trained parameter may have no gradient in this pass; empty if there is no good reason."""
    trained = trainer.optimization.parameters
    if "lora_A" in name and not trained[name.replace("lora_A", "lora_B")].any():
        return "lora_A wait for their lora_B, which starts at 0"
    negative = trainer.trained_guidance.negative
    conditionings = [trajectory.cond] if negative is None else [trajectory.cond, negative]
    trained_steps = trajectory.steps.gather(1, trajectory.trained_positions)
    levels = trainer.schedule.sigmas[trained_steps].flatten().tolist()
    return trainer.backbone.why_no_gradient(name, conditionings, levels)


@dataclass(frozen=True)
class StepBalance:
    """The gradient of one denoising step, by itself and equalized."""

    step: int
    sigma: float
    std: float
    N_t: float  # what the gradient is proportional to in theory
    gradient: float  # norm of the policy loss's gradient
    S_t: float  # the equalizer's factor
    equalized: float


def balance_result(
    trainer: Trainer, objective: Objective, trajectory: Trajectory, advantages: Tensor
) -> CheckResult:
    """How much more late denoising steps push the weights than early ones, and what the equalizer leaves of that."""
    c = trainer.config
    schedule = objective.schedule
    expected = gradient_scale(schedule, c.ratio_norm)
    factors = equalizer(schedule, True, c.ratio_norm)

    rows = []
    steps = trajectory.steps[0].tolist()
    for position, step in enumerate(tqdm(steps, "gradient per step", unit="step", leave=False)):
        positions = torch.full_like(trajectory.trained_positions[:, 0], position)
        pairs = trajectory.pairs(positions, schedule.sigmas)
        objective.terms(pairs, advantages).policy_loss.mean().backward()
        norm = trainer.optimization.clip()
        trainer.optimization.zero_grad()
        factor = float(factors[step])
        row = StepBalance(
            step=step,
            sigma=float(schedule.sigmas[step]),
            std=float(schedule.std[step]),
            N_t=float(expected[step]),
            gradient=norm,
            S_t=factor,
            equalized=norm * factor,
        )
        rows.append(row)

    plain = spread([row.gradient for row in rows])
    equalized = spread([row.equalized for row in rows])
    columns = [column.name for column in fields(StepBalance)]
    cells = [[f"{value:.3g}" for value in astuple(row)] for row in rows]
    return ok(
        "balance",
        f"largest over smallest gradient of a denoising step: {plain:.3g} by itself, "
        f"{equalized:.3g} equalized",
        table=indented(aligned([columns, *cells])),
        numbers={
            "plain": plain,
            "equalized": equalized,
            "columns": columns,
            "rows": [list(astuple(row)) for row in rows],
        },
    )


def spread(norms: list[float]) -> float:
    """Largest over smallest."""
    return max(norms) / max(min(norms), 1e-30)
