"""What the doctor measures of the batch, the prompts, the VAE, the reward and the sampler.

A check takes an assembled trainer and yields findings. Nothing is trained or written.
"""

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from sage_grpo.algo.sde import SDES, Schedule, build_schedule, flow_sigmas
from sage_grpo.models.sample import counter_noise, denoise
from sage_grpo.models.text import MAX_TEXT_TOKENS
from sage_grpo.train.rollout import training_order
from sage_grpo.train.trainer import Trainer
from sage_grpo.worlds import world_of
from sage_grpo.worlds.shapes import render, scenes_from_prompt

REWARD_CLIPS, VAE_CLIPS = 16, 4
VAE_BOUND = 0.05  # RMS, of the range of a pixel: 26 dB, where details are plainly lost
PATH_BOUND = {"fp32": 1e-4, "bf16": 0.05}  # relative: how far rounding may drive two equal paths apart
DEFECTS = {"static": "MQ", "noise": "VQ", "wrong prompt": "TA"}  # kinds of bad clips, and the score that is about each


@dataclass(frozen=True)
class Finding:
    check: str
    mark: str  # ok, note or WRONG
    text: str
    remedy: str = ""
    numbers: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{self.mark:<6}{self.check:<11}{self.text}"]
        if self.mark == "WRONG":
            lines.append(f"{'':17}remedy: {self.remedy}")
        return "\n".join(textwrap.fill(line, 120, subsequent_indent=" " * 17) for line in lines)


def judged(check: str, good: bool, text: str, remedy: str, **numbers: Any) -> Finding:
    return Finding(check, "ok" if good else "WRONG", text, "" if good else remedy, numbers)


def counted(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "es" if what.endswith("ch") else "s")


def check_batch(trainer: Trainer) -> Iterator[Finding]:
    """What one iteration is made of. That whole groups fit was found when the trainer was put together."""
    c, pieces = trainer.config, trainer.pieces()
    stochastic = trainer.schedule().stochastic
    trained = training_order(stochastic, c.timestep_fraction, False, c.seed, trainer.step, pieces[0]).shape[1]
    videos, updates, accumulated = (
        c.batch_size * trainer.ranks.count,
        c.updates_per_rollout,
        c.gradient_accumulation_steps,
    )
    pairs = accumulated * videos * trained // updates
    every = counted(accumulated, "iteration") if accumulated > 1 else "iteration"
    yield judged(
        "batch",
        trained >= updates,
        f"{videos} videos per iteration, {counted(videos // c.num_generations, 'prompt')} x a group of "
        f"{c.num_generations}, on {counted(trainer.ranks.count, 'rank')} with {counted(len(pieces), 'micro-batch')} of "
        f"{len(pieces[0].samples)} each; {trained} of {c.num_sampling_steps} denoising steps are trained; "
        f"{counted(updates, 'optimizer step')} per {every}, of {pairs} (video, step) pairs",
        f"updates_per_rollout is {updates}, but only {counted(trained, 'step')} can be shared out among them; lower it",
        videos=videos,
        trained_steps=trained,
        pairs=pairs,
    )


def check_prompts(trainer: Trainer) -> Iterator[Finding]:
    train = [prompt.text for prompt in trainer.prompts]
    held_out = [prompt.text for prompt in trainer.validation.prompts] if trainer.validation else []
    longest = max(train + held_out, key=len)
    tokens = len(trainer.policy.encode([longest])[0].text)
    text = f"{len(train)} to train, {len(held_out)} held out; the longest has {counted(len(longest.split()), 'word')}, "
    numbers = {"train": len(train), "held_out": len(held_out), "longest": longest, "tokens": tokens}
    yield Finding("prompts", "ok", text + counted(tokens, "token"), numbers=numbers)
    repeated, shared = len(train) - len(set(train)), set(train) & set(held_out)
    notes = {
        f"{repeated} of the training prompts repeat another one and weigh that much more": repeated,
        f"{len(shared)} of the held-out prompts are trained on, so validation will flatter": shared,
        "nothing is held out, so nothing will be validated: give --validation_prompts": not held_out,
        f"the model reads only {MAX_TEXT_TOKENS} tokens of the longest prompt": tokens >= MAX_TEXT_TOKENS,
    }
    yield from (Finding("prompts", "note", text) for text, so in notes.items() if so)


def good_clips(trainer: Trainer, count: int) -> tuple[Tensor, list[str]] | None:
    """uint8 clips that show exactly what their prompts say, where the model's world can draw them."""
    if world_of(trainer.policy.folder) is None:
        return None
    c, texts = trainer.config, list(dict.fromkeys(prompt.text for prompt in trainer.prompts))[:count]
    scenes = scenes_from_prompt(texts, torch.Generator().manual_seed(c.seed))
    return (render(scenes, c.num_frames, c.height, c.width) * 255).round().to(torch.uint8), texts


def smooth_clips(trainer: Trainer, count: int) -> Tensor:
    """uint8 clips of drifting colour waves, a few of them across a frame."""
    c = trainer.config
    t, y, x = torch.meshgrid(*(torch.linspace(0, 1, n) for n in (c.num_frames, c.height, c.width)), indexing="ij")
    phases = [(1 + k) * x + (count - k) * y + t + channel / 3 for k in range(count) for channel in range(3)]
    waves = (2 * torch.pi * torch.stack(phases)).sin().view(count, 3, *t.shape)
    return (127.5 + 100 * waves).round().to(torch.uint8).permute(0, 2, 3, 4, 1)


def check_vae(trainer: Trainer) -> Iterator[Finding]:
    known = good_clips(trainer, VAE_CLIPS)
    clips, kind = (known[0], "rendered") if known else (smooth_clips(trainer, VAE_CLIPS), "smooth synthetic")
    latents = trainer.policy.encode_video(clips)
    remedy = (
        "its weights are damaged or not those of this model: fetch vae/ again, mind its scaling_factor, try dtype fp32"
    )
    try:
        decoded = trainer.policy.decode(latents).cpu()
    except ValueError as error:  # pixels that are not finite
        yield judged("vae", False, f"after encoding {kind} clips: {error}", remedy)
        return
    rms = ((decoded.float() - clips.float()) / 255).square().mean().sqrt().item()
    yield judged(
        "vae",
        rms <= VAE_BOUND,
        f"{kind} clips, encoded and decoded, differ by an RMS of {rms:.3f} of the pixel range (at most {VAE_BOUND}); "
        f"their latents have mean {latents.mean():.2f} and standard deviation {latents.std():.2f}",
        remedy,
        rms=rms,
        latent_std=latents.std().item(),
    )


def check_reward(trainer: Trainer) -> Iterator[Finding]:
    """Known clips: good ones, frozen ones, pixel noise, and good ones under each other's prompts."""
    known = good_clips(trainer, REWARD_CLIPS)
    if known is None:
        yield Finding("reward", "note", "not checked: this model has no world that can draw a clip known to be good")
        return
    good, texts = known
    noise = torch.randint(0, 256, good.shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    cases = {"good": (good, texts), "static": (good[:, :1].expand_as(good), texts), "noise": (noise, texts)}
    if len(texts) > 1:
        cases["wrong prompt"] = (good, [*texts[1:], texts[0]])
    means: dict[str, dict[str, float]] = {}
    for case, (clips, prompts) in cases.items():
        scores = trainer.reward.score(list(clips), prompts, trainer.config.fps)
        if scores.errors:
            yield judged("reward", False, f"it fails on {case} clips: {scores.errors[0]}", "repair the reward")
            return
        means[case] = {name: values.mean().item() for name, values in ({"total": scores.total} | scores.named).items()}
    yield order_of_rewards(means)


def order_of_rewards(means: dict[str, dict[str, float]]) -> Finding:
    """Good clips lead in total, and each kind of bad clip is behind in the score that is about its defect."""
    good, shown, wrong = means["good"], [f"good {means['good']['total']:.2f}"], []
    for case, score in DEFECTS.items():
        bad = means.get(case, {})
        about = [name for name in bad if name.rpartition(".")[2] == score]
        # an equal total is no preference: weights may leave a defect out on purpose
        wrong += [f"{name} of {case} clips" for name in about if bad[name] >= good[name]]
        wrong += [f"total of {case} clips"] if bad and bad["total"] > good["total"] else []
        parts = "".join(f" ({name} {bad[name]:.2f}, good {good[name]:.2f})" for name in about)
        shown += [f"{case} {bad['total']:.2f}{parts}"] if bad else []
    remedy = (
        f"{', '.join(wrong)} should be below that of good ones, or training breeds such clips: mind the reward's sign"
    )
    text = f"mean totals of known clips: {', '.join(shown)}"
    return judged("reward", not wrong, text, f"{remedy} and the reward_weights", means=means)


def check_exploration(trainer: Trainer) -> Iterator[Finding]:
    """How the injected noise compares with the noise level of the state that it goes into."""
    schedule, c = trainer.schedule(), trainer.config
    std, after = schedule.std.tolist(), schedule.sigmas[1:].tolist()
    over = [i for i in range(schedule.num_steps - 1) if std[i] > after[i]]
    if over:
        i = over[0]
        text = f"step {i} injects noise of std {std[i]:.2g}, more than the noise level {after[i]:.2g} that it leads to"
        text += f" (so do {len(over) - 1} more)" if over[1:] else ""
        text += ": the path leaves what the model has learnt; less eta, more steps or sde_type precise keep it there"
        yield Finding("noise", "note", text)
    else:
        text = (
            f"{c.sde_type} at eta {c.eta:g} injects noise of energy {sum(s * s for s in std):.3g} (the sum of std^2), "
        )
        yield Finding("noise", "ok", f"{text}at no step more than the noise level that it leads to")
    if std[-1]:
        text = (
            f"the noise of the last step, std {std[-1]:.2g}, stays in the clip that is judged; sde_window all_but_last"
        )
        text += " makes that step deterministic"
        yield Finding("noise", "note", text)


@torch.no_grad()
def check_noise_free(trainer: Trainer) -> Iterator[Finding]:
    """Without noise the sampler must be the ODE: the same initial noise then ends in the same latents."""
    c, guidance, sigmas = trainer.config, trainer.guidance, trainer.sampler.sigmas
    cond = trainer.policy.encode([trainer.prompts[0].text])[0].to(sigmas.device)
    x, noise = counter_noise(trainer.shape, c.seed, [0])
    x = ode = x.to(sigmas.device)
    for sigma, after in pairwise(sigmas):
        ode = ode + (after - sigma) * guidance.velocity(trainer.policy, ode, sigma.expand(1), cond)
    levels = flow_sigmas(c.num_sampling_steps, c.timestep_shift)
    silent = build_schedule(c.sde_type, levels, 0.0).to(sigmas.device)
    differences = {}
    for name, schedule in (("at eta 0", silent), ("outside the sde_window", trainer.sampler.window([]))):
        *_, last = denoise(trainer.policy, schedule, x, cond, guidance.scale, guidance.negative, noise)
        differences[name] = ((last.x_next - ode).norm() / ode.norm()).item()
    shown = ", ".join(f"{value:.1g} {name}" for name, value in differences.items())
    loud = [name for name in SDES if not is_ode(build_schedule(name, levels, 0.0))]
    others = f"; at eta 0 {', '.join(loud)} is no ODE" if loud else "; at eta 0 every type is the ODE"
    guilty = ", ".join(loud) or c.sde_type
    yield judged(
        "noise 0",
        all(value <= PATH_BOUND[c.dtype] for value in differences.values()) and not loud,
        f"{c.sde_type} without noise against a plain Euler ODE, relative difference of the latents: {shown}{others}",
        f"in algo/sde.py the table of {guilty} must become a = 1, b = next - sigma, std = 0 at eta 0",
        difference=differences,
    )


def is_ode(schedule: Schedule) -> bool:
    """Whether its numbers are those of Euler steps."""
    ode = build_schedule("ode", schedule.sigmas, 0.0)
    pairs = ((getattr(schedule, name), getattr(ode, name)) for name in ("a", "b", "std"))
    return all(torch.allclose(ours, plain, rtol=0, atol=1e-6) for ours, plain in pairs)
