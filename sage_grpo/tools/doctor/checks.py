"""The doctor's checks. Each takes an assembled trainer and yields findings; nothing is trained or written."""

import math
import textwrap
import tomllib
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from sage_grpo.algo.equalizer import equalizer, gradient_scale
from sage_grpo.algo.sde import build_schedule
from sage_grpo.config.fields import Config
from sage_grpo.models.sample import counter_noise, denoise, integrate
from sage_grpo.plugins import resolved
from sage_grpo.tools import audit
from sage_grpo.tools.paired import aligned
from sage_grpo.tools.templating import render, sentence
from sage_grpo.train.rollout import Trajectory
from sage_grpo.train.trainer import Trainer
from sage_grpo.train.update import Objective
from sage_grpo.train.windows import num_trained

REWARD_CLIPS, VAE_CLIPS = 16, 4
VAE_BOUND = 0.05  # RMS, relative to the pixel range: 26 dB, where details are visibly lost
PATH_BOUND = {
    "fp32": 1e-4,
    "bf16": 0.05,
}  # relative: how far rounding may drive two identical trajectories apart
SENTENCES = tomllib.loads(
    Path(__file__).parents[1].joinpath("templates", "findings.toml").read_text()
)
indented = partial(textwrap.indent, prefix=" " * 17)  # under the text of a finding
BALANCE = ("step", "sigma", "std", "N_t", "gradient", "S_t", "equalized")


@dataclass(frozen=True)
class Finding:
    check: str
    mark: str  # ok, note or WRONG
    text: str
    remedy: str = ""
    table: str = ""
    numbers: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{self.mark:<6}{self.check:<11}{self.text}"]
        lines += [f"{'':17}remedy: {self.remedy}"] if self.remedy else []
        wrapped = [textwrap.fill(line, 120, subsequent_indent=" " * 17) for line in lines]
        return "\n".join([*wrapped, self.table] if self.table else wrapped)


def judged(
    key: str, good: bool | None, table: str = "", c: Config | None = None, **numbers: Any
) -> Finding:
    """A finding in the words of templates/findings.toml, which may use the numbers; a note if `good` is None."""
    words, check, said = (
        SENTENCES[key],
        numbers.get("check", key.partition(".")[0]),
        {"c": c} | numbers,
    )
    remedy = sentence(words.get("remedy", ""), **said) if good is False else ""
    mark = {None: "note", True: "ok", False: "WRONG"}[good]
    return Finding(check, mark, sentence(words["text"], **said), remedy, table, numbers)


def attempt(
    name: str, check: Callable[[Any], Any], subject: Any, failure: str = "broken"
) -> Iterator[Finding]:
    """The check's findings; a check that fails to finish is also WRONG."""
    try:
        yield from check(subject)
    except (ValueError, OSError, RuntimeError) as error:
        said = {
            "kind": type(error).__name__,
            "error": str(error),
            "memory": isinstance(error, torch.OutOfMemoryError),
        }
        yield judged(failure, False, check=name, traceback=traceback.format_exc(), **said)


def check_batch(trainer: Trainer) -> Iterator[Finding]:
    """Describe one iteration. Whether layout and groups divide was checked when the trainer was assembled."""
    c, micro_batches, ranks = trainer.config, trainer.micro_batches(), trainer.ranks.count
    trained, videos = num_trained(trainer.windows.size, c.timestep_fraction), c.batch_size * ranks
    pairs = c.gradient_accumulation_steps * videos * trained // c.updates_per_rollout
    shards = trainer.ranks.world // c.dp_replicate if c.enable_fsdp else 1
    yield judged("layout", True, data=ranks, sequence=c.sp_size, shards=shards)
    numbers = {"videos": videos, "ranks": ranks, "trained": trained, "pairs": pairs}
    yield judged(
        "batch", True, c=c, micro_batches=len(micro_batches), clips=len(micro_batches[0]), **numbers
    )
    few = judged(
        "batch.few", None, prompts=c.gradient_accumulation_steps * videos // c.num_generations
    )
    yield from [few] if few.text else []


def check_prompts(trainer: Trainer) -> Iterator[Finding]:
    backbone, validation = (
        trainer.backbone,
        trainer.validation.requests if trainer.validation else [],
    )
    train, held_out = (
        [str(prompt) for prompt in prompts] for prompts in (trainer.requests, validation)
    )
    longest = max([*trainer.requests, *validation], key=lambda prompt: len(prompt.text))
    tokens = backbone.num_tokens(*backbone.encode([longest]))
    yield judged("prompts", True, train=len(train), held_out=len(held_out), tokens=tokens)
    notes = {"repeated": len(train) - len(set(train)), "shared": len(set(train) & set(held_out))}
    notes |= {"none": not held_out, "long": tokens >= backbone.max_tokens and backbone.max_tokens}
    yield from (
        judged(f"prompts.{name}", None, count=count) for name, count in notes.items() if count
    )


def check_vae(trainer: Trainer) -> Iterator[Finding]:
    """Encode and decode clips of the model's world, or one whose colors encode each pixel's time and position."""
    c, known = trainer.config, audit.drawn_clips(trainer.config, trainer.requests, VAE_CLIPS)
    places = torch.meshgrid(
        *(torch.linspace(0, 255, n) for n in (c.num_frames, c.height, c.width)), indexing="ij"
    )
    clips = torch.stack(known[0]) if known else torch.stack(places, -1)[None].byte()
    latents = trainer.backbone.encode_video(clips)
    rms = (
        ((trainer.backbone.decode(latents).cpu().float() - clips.float()) / 255)
        .square()
        .mean()
        .sqrt()
        .item()
    )
    numbers = {
        "rms": rms,
        "bound": VAE_BOUND,
        "mean": latents.mean().item(),
        "std": latents.std().item(),
    }
    yield judged(
        "vae", rms <= VAE_BOUND, kind="rendered" if known else "smooth synthetic", **numbers
    )


def check_reward(trainer: Trainer) -> Iterator[Finding]:
    """The audit's short form: damage must lower the score that is about it, and nothing may raise the total."""
    known = audit.drawn_clips(trainer.config, trainer.requests, REWARD_CLIPS)
    if known is None:
        yield judged("reward.no world", None)
        return
    try:
        found = audit.measure(
            trainer.reward, *known, trainer.config.fps, dict.fromkeys(audit.RULES["short"], ())
        )
    except ValueError as error:
        yield judged("reward.fails", False, error=str(error))
        return
    told = audit.conclude(found, verdicts := audit.give_verdicts(found, drawn=True))
    table = render("audit_table.txt", found=found, verdicts=verdicts).rstrip()
    yield judged("reward", not told["wrong"], indented(table), **told)
    if told["unclear"]:
        yield judged("reward.unclear", None, clips=len(known[0]), unclear=told["unclear"])


def check_exploration(trainer: Trainer) -> Iterator[Finding]:
    """Compare the injected noise, if any, with the noise level of the state it is added to."""
    schedule = trainer.sampler.window(trainer.windows.steps)
    std, after = (schedule.std * trainer.algorithm.explores).tolist(), schedule.sigmas[1:].tolist()
    over = [i for i in range(schedule.num_steps - 1) if std[i] > after[i]]
    yield judged("noise", True, c=trainer.config, energy=sum(s * s for s in std), over=over)
    if over:
        yield judged("noise.over", None, step=over[0], std=std[over[0]], level=after[over[0]])
    if std[-1]:
        yield judged("noise.last", None, std=std[-1])


@torch.no_grad()
def check_noise_free(trainer: Trainer) -> Iterator[Finding]:
    """Without noise the sampler must equal the ODE: the same initial noise must give the same latents."""
    c, guidance, sigmas = trainer.config, trainer.guidance, trainer.sampler.sigmas
    cond = trainer.backbone.encode([trainer.requests[0]])[0].to(sigmas.device)
    x, noise = counter_noise(trainer.shape, c.seed, [0])
    x = x.to(sigmas.device)
    ode = integrate(trainer.backbone, sigmas.cpu(), x, cond, guidance)
    silent = build_schedule(resolved(c.sde_type), sigmas.cpu(), 0.0).to(sigmas.device)
    latents = denoise(trainer.backbone, silent, x, cond, guidance, noise)
    difference = ((latents - ode).norm() / ode.norm()).item()
    yield judged("noise 0", difference <= PATH_BOUND[c.dtype], c=c, difference=difference)


def check_update(trainer: Trainer) -> Iterator[Finding]:
    """Run one micro-batch through the trainer's rollout and loss, without an optimizer step."""
    c = trainer.config
    trainer.optimization.old = {}  # that of a resumed run lags behind: sample with the trained policy
    (trajectory,) = trainer.roll_out(trainer.micro_batches()[:1])
    lost, pairs = int((~trajectory.is_finite).sum()), trajectory.order.numel()
    if lost:
        yield judged("rollout", False, c=c, lost=lost, paths=len(trajectory.x))
        return
    trainer.prepare_anchor([trajectory])
    goal = Objective(
        trainer.backbone,
        trainer.algorithm,
        trainer.trained_guidance,
        trainer.sampler,
        trainer.controller.coef,
        pairs,
    )
    stats = trainer.no_stats()
    signs = 1 - 2 * (
        torch.arange(len(trajectory.x), device=trajectory.x.device) % 2.0
    )  # in place of advantages
    for places in tqdm(trajectory.order.T, "training forward", unit="step", leave=False):
        goal.backward(trajectory, places, signs, stats)
    deviation = stats.max_deviation.max().item()
    yield judged("ratio", deviation == 0, pairs=pairs, deviation=deviation)
    yield gradient_finding(trainer, trajectory)
    trainer.optimization.zero_grad()
    if trainer.algorithm.explores:
        yield balance_finding(trainer, goal, trajectory, signs)


def gradient_finding(trainer: Trainer, trajectory: Trajectory) -> Finding:
    """After a backward pass: trained parameters, and only those, must have gradients."""
    trained = trainer.optimization.parameters
    ours, used = (
        {id(p) for p in trained.values()},
        (trajectory.cond, trainer.trained_guidance.negative),
    )
    leaked = [
        n
        for n, p in trainer.backbone.transformer.named_parameters()
        if p.grad is not None and id(p) not in ours
    ]
    silent = [name for name, p in trained.items() if p.grad is None or not p.grad.any()]
    early = {
        name
        for name in silent
        if "lora_A" in name and not trained[name.replace("lora_A", "lora_B")].any()
    }
    reasons = {
        name: trainer.backbone.awaits(name, [cond for cond in used if cond is not None])
        for name in silent
    }
    reasons |= dict.fromkeys(early, "lora_A wait for their lora_B, which starts at 0")
    wrong = [
        f"{name} has no gradient although it is trained" for name in silent if not reasons[name]
    ]
    wrong += [f"{name} has a gradient although it is frozen" for name in leaked]
    norm = trainer.optimization.clip()
    wrong += (
        [] if math.isfinite(norm) else ["the gradient is not finite: lower eta, or try dtype fp32"]
    )
    waiting = dict(Counter(filter(None, reasons.values())))
    numbers = {"trained": len(trained), "silent": len(silent), "norm": norm, "waiting": waiting}
    return judged("gradients", not wrong, wrong=wrong, **numbers)


def balance_finding(
    trainer: Trainer, goal: Objective, trajectory: Trajectory, signs: Tensor
) -> Finding:
    """Gradient norm of the policy loss per denoising step; in theory it is proportional to N_t."""
    schedule, c, rows = goal.schedule, trainer.config, []
    expected, balance = (
        gradient_scale(schedule, c.ratio_norm),
        equalizer(schedule, True, c.ratio_norm),
    )
    for place, step in enumerate(
        tqdm(trajectory.steps[0].tolist(), "gradient per step", unit="step", leave=False)
    ):
        goal.terms(
            trajectory, torch.full_like(trajectory.order[:, 0], place), signs
        ).policy.mean().backward()
        norm = trainer.optimization.clip()
        trainer.optimization.zero_grad()
        known = (
            schedule.sigmas[step],
            schedule.std[step],
            expected[step],
            norm,
            balance[step],
            norm * balance[step],
        )
        rows.append([step, *map(float, known)])
    plain, equalized = (
        max(norms) / max(min(norms), 1e-30)
        for norms in ([r[4] for r in rows], [r[6] for r in rows])
    )
    table = aligned([BALANCE, *([f"{value:.3g}" for value in row] for row in rows)])
    return judged(
        "balance",
        True,
        indented(table),
        plain=plain,
        equalized=equalized,
        columns=BALANCE,
        rows=rows,
    )


IN_ORDER = (
    check_batch,
    check_prompts,
    check_vae,
    check_reward,
    check_exploration,
    check_noise_free,
)
CHECKS = {check.__name__.removeprefix("check_"): check for check in (*IN_ORDER, check_update)}
