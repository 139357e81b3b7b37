"""One micro-batch through the trainer's own rollout and loss: the first ratio, the gradients, and their balance.

No optimizer step is taken.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from tqdm import tqdm

from sage_grpo.algo.equalizer import equalizer, gradient_scale
from sage_grpo.tools.doctor_checks import Finding, judged
from sage_grpo.train.metrics import UpdateStats
from sage_grpo.train.rollout import Trajectory
from sage_grpo.train.trainer import Trainer
from sage_grpo.train.update import Objective

COLUMNS = ("step", "sigma", "std", "N_t", "gradient", "S_t", "equalized")


def check_update(trainer: Trainer) -> Iterator[Finding]:
    schedule, c = trainer.schedule(), trainer.config
    (trajectory,) = trainer.roll_out(schedule, trainer.pieces()[:1])
    lost = int((~trajectory.sound).sum())
    if lost:
        remedy = f"lower eta ({c.eta:g}) or guidance_scale ({c.guidance_scale:g}), try dtype fp32, check the weights"
        yield judged("rollout", False, f"{lost} of {len(trajectory.x)} paths are not finite", remedy)
        return
    trainer.prepare_anchor([trajectory], schedule)
    scale = equalizer(schedule, c.use_grad_balancing, c.ratio_norm)
    pairs, coef = trajectory.order.numel(), trainer.controller.coef
    goal = Objective(trainer.policy, trainer.guidance, schedule, scale, c, coef, pairs)
    stats = UpdateStats.empty(schedule.num_steps, trainer.ranks.device)
    signs = 1 - 2 * (torch.arange(len(trajectory.x), device=trajectory.x.device) % 2.0)  # stand in for advantages
    for steps in tqdm(trajectory.order.T, "training forward", unit="step", leave=False):
        goal.backward(trajectory, steps, signs, stats)
    yield ratio_finding(stats.policy.max_deviation.max().item(), pairs)
    yield gradient_finding(trainer, trajectory)
    trainer.optimization.forget()
    yield balance_finding(trainer, goal, trajectory, signs)


def ratio_finding(deviation: float, pairs: int) -> Finding:
    exact = "exactly 1: training repeats the rollout's arithmetic to the last bit"
    return judged(
        "ratio",
        deviation == 0,
        f"the first ratio of {pairs} (video, step) pairs is {f'off by up to {deviation:.3g}' if deviation else exact}",
        "the training forward is not the rollout's, and every gradient would be wrong: look for dropout, autocast, "
        "another attention kernel or batch shape, or code that asks whether gradients are on",
        deviation=deviation,
    )


def gradient_finding(trainer: Trainer, trajectory: Trajectory) -> Finding:
    """After a backward pass: gradients where something is trained, and only there."""
    trained, frozen = trainer.optimization.parameters, frozen_parameters(trainer)
    reasons = excused(trained, trajectory, trainer.guidance.negative.glyph)
    silent = [name for name, p in trained.items() if p.grad is None or not p.grad.any()]
    waiting = [reasons[name] for name in silent if name in reasons]
    wrong = {
        "no gradient although it is trained (requires_grad, or a forward that does not use it)": [
            name for name in silent if name not in reasons
        ],
        "a gradient that is not finite (lower eta, or try dtype fp32)": [
            name for name, p in trained.items() if p.grad is not None and not p.grad.isfinite().all()
        ],
        "a gradient although it is frozen (requires_grad)": [name for name, p in frozen.items() if p.grad is not None],
    }
    wrong = {what: names for what, names in wrong.items() if names}
    text = f"{len(trained) - len(silent)} of {len(trained)} trained tensors have one"
    text += f", together of norm {trainer.optimization.clip():.3g}"
    text += "".join(f"; {waiting.count(reason)} {reason}" for reason in dict.fromkeys(waiting))
    text += f"; {sum(p.grad is None for p in frozen.values())} of {len(frozen)} frozen ones have none"
    remedy = "; ".join(f"{names[0]} (and {len(names) - 1} more) has {what}" for what, names in wrong.items())
    return judged("gradients", not wrong, text, remedy, wrong=wrong)


def frozen_parameters(trainer: Trainer) -> dict[str, nn.Parameter]:
    """All that a backward pass could reach and training must not."""
    ours = {id(p) for p in trainer.optimization.parameters.values()}
    parts = {"transformer": trainer.policy.transformer, "vae": trainer.policy.vae}
    named = ((f"{part}.{name}", p) for part, module in parts.items() for name, p in module.named_parameters())
    return {name: p for name, p in named if id(p) not in ours}


def excused(trained: Mapping[str, nn.Parameter], trajectory: Trajectory, negative_glyph: Tensor) -> dict[str, str]:
    """Trained tensors whose gradient may be zero, and why."""
    reasons, quoted = {}, len(trajectory.cond.glyph) + len(negative_glyph)
    for name in trained:
        partner = trained.get(name.replace("lora_A", "lora_B"))
        if "lora_A" in name and partner is not None and not partner.any():
            reasons[name] = "lora_A wait for their lora_B, which starts at 0"
        if name.startswith("context_embedder_2.") and not quoted:
            reasons[name] = "of the glyph embedder wait for a prompt that quotes text"
    return reasons


def balance_finding(trainer: Trainer, goal: Objective, trajectory: Trajectory, signs: Tensor) -> Finding:
    """Norm over the trained parameters of the policy loss's gradient, one denoising step at a time.

    The equalizer multiplies that loss, and so this norm, by S_t.
    """
    schedule, c, rows = goal.schedule, trainer.config, []
    expected, balance = gradient_scale(schedule, c.ratio_norm), equalizer(schedule, True, c.ratio_norm)
    for step in tqdm(schedule.stochastic.nonzero().flatten().tolist(), "gradient per step", unit="step", leave=False):
        steps = torch.full_like(trajectory.order[:, 0], step)
        goal.terms(trajectory, steps, signs).policy.mean().backward()
        norm = trainer.optimization.clip()
        trainer.optimization.forget()
        known = (schedule.sigmas[step], schedule.std[step], expected[step], norm, balance[step], norm * balance[step])
        rows.append([step, *(float(value) for value in known)])
    plain, equalized = (
        max(column) / max(min(column), 1e-30) for column in ([r[4] for r in rows], [r[6] for r in rows])
    )
    text = f"largest over smallest gradient of a denoising step: {plain:.3g} by itself, {equalized:.3g} equalized "
    text += f"(use_grad_balancing: {c.use_grad_balancing})"
    return Finding("balance", "ok", text, numbers={"columns": COLUMNS, "rows": rows})


def balance_table(finding: Finding) -> str:
    """N_t is the size that theory expects of the gradient with respect to the velocity, up to a constant."""
    lines = [[*COLUMNS], *([str(row[0]), *(f"{value:.3g}" for value in row[1:])] for row in finding.numbers["rows"])]
    return "\n".join(" " * 8 + "".join(f"{cell:>11}" for cell in line) for line in lines)
