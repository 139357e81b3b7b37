"""The doctor's checks. Each takes an assembled trainer and yields findings; nothing is trained or written."""

import math
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from sage_grpo.algo.equalizer import equalizer, gradient_scale
from sage_grpo.algo.sde import build_schedule
from sage_grpo.models.sample import counter_noise, denoise, integrate
from sage_grpo.plugins import resolved
from sage_grpo.tools import edits
from sage_grpo.tools.paired import aligned
from sage_grpo.tools.plan import plan_of, remedies
from sage_grpo.tools.plan_memory import fits, peak
from sage_grpo.tools.plan_model import Plan, few_prompts
from sage_grpo.train.metrics import UpdateStats
from sage_grpo.train.rollout import Trajectory, num_trained
from sage_grpo.train.trainer import Trainer
from sage_grpo.train.update import Objective

REWARD_CLIPS, VAE_CLIPS = 16, 4
VAE_BOUND = 0.05  # RMS, relative to the pixel range: 26 dB, where details are visibly lost
PATH_BOUND = {"fp32": 1e-4, "bf16": 0.05}  # relative: how far rounding may drive two identical trajectories apart
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


def judged(check: str, good: bool, text: str, remedy: str, table: str = "", **numbers: Any) -> Finding:
    return Finding(check, "ok" if good else "WRONG", text, "" if good else remedy, table, numbers)


def check_batch(trainer: Trainer) -> Iterator[Finding]:
    """Describe one iteration. Whether complete groups fit was checked when the trainer was assembled."""
    c, micro_batches, ranks = trainer.config, trainer.micro_batches(), trainer.ranks.count
    trained = num_trained(trainer.windows.size, c.timestep_fraction)
    videos = c.batch_size * ranks
    pairs = c.gradient_accumulation_steps * videos * trained // c.updates_per_rollout
    text = f"{videos} videos per iteration: prompts x group = {videos // c.num_generations} x {c.num_generations}, "
    text += f"ranks x micro-batches x clips = {ranks} x {len(micro_batches)} x {len(micro_batches[0])}; "
    text += f"{trained} of {c.num_sampling_steps} denoising steps are trained, "
    text += f"{pairs} (video, step) pairs in each optimizer step"
    yield Finding("batch", "ok", text)
    if few := few_prompts(c.gradient_accumulation_steps * videos // c.num_generations):
        yield Finding("batch", "note", few)


def check_plan(trainer: Trainer) -> Iterator[Finding]:
    """Whether the layout's sizes divide, and whether the run fits on this machine's GPU."""
    try:
        plan = plan_of(trainer.config, trainer.ranks.world)
    except ValueError as error:
        yield judged("layout", False, str(error), "change it, or give the number of processes of the run with --ranks")
        return
    sp, device = plan.config.sp_size, trainer.ranks.device
    text = f"data-parallel x sequence-parallel ranks = {plan.gpus // sp} x {sp}, the model in {plan.shards} part(s)"
    yield Finding("layout", "ok", text)
    if device.type == "cuda":
        yield memory_finding(plan, torch.cuda.get_device_properties(device).total_memory)
    else:
        yield Finding("memory", "note", "not checked: there is no GPU; python -m sage_grpo.tools.plan computes it")


def memory_finding(plan: Plan, gpu_bytes: float) -> Finding:
    moment, most = peak(plan)
    text = f"computed peak {most / 1e9:.1f} GB ({moment}), {plan.rates.reserve / 1e9:g} GB in reserve, the GPU has "
    remedy = " ".join(flag for flag, *_ in remedies(plan, gpu_bytes)) or "more GPUs with enable_fsdp, smaller clips"
    return judged("memory", fits(plan, gpu_bytes), f"{text}{gpu_bytes / 1e9:.1f} GB", remedy, peak=most)


def check_prompts(trainer: Trainer) -> Iterator[Finding]:
    backbone, validation = trainer.backbone, trainer.validation.prompts if trainer.validation else []
    train, held_out = ([prompt.text for prompt in prompts] for prompts in (trainer.prompts, validation))
    longest = max([*trainer.prompts, *validation], key=lambda prompt: len(prompt.text))
    tokens = backbone.num_tokens(*backbone.encode([longest]))
    yield Finding("prompts", "ok", f"{len(train)} to train, {len(held_out)} held out; the longest has {tokens} tokens")
    repeated, shared = len(train) - len(set(train)), set(train) & set(held_out)
    notes = {
        f"{repeated} of the training prompts repeat another one and weigh that much more": repeated,
        f"{len(shared)} of the held-out prompts are trained on, so validation will flatter": shared,
        "nothing is held out, so nothing will be validated: give --validation_prompts": not held_out,
        f"the model reads only {backbone.max_tokens} tokens of the longest prompt": tokens >= backbone.max_tokens,
    }
    yield from (Finding("prompts", "note", text) for text, so in notes.items() if so)


def check_vae(trainer: Trainer) -> Iterator[Finding]:
    """Encode and decode clips of the model's world, or one whose colors encode each pixel's time and position."""
    c, known = trainer.config, edits.drawn_clips(trainer.config, trainer.prompts, VAE_CLIPS)
    places = torch.meshgrid(*(torch.linspace(0, 255, n) for n in (c.num_frames, c.height, c.width)), indexing="ij")
    clips = torch.stack(known[0]) if known else torch.stack(places, -1)[None].byte()
    kind = "rendered" if known else "smooth synthetic"
    latents = trainer.backbone.encode_video(clips)
    decoded = trainer.backbone.decode(latents).cpu()
    rms = ((decoded.float() - clips.float()) / 255).square().mean().sqrt().item()
    text = f"{kind} clips, encoded and decoded, differ by an RMS of {rms:.3f} of the pixel range (at most {VAE_BOUND})"
    text += f"; their latents have mean {latents.mean():.2f} and standard deviation {latents.std():.2f}"
    remedy = "its weights are damaged or not those of this model: fetch vae/ again, try dtype fp32"
    yield judged("vae", rms <= VAE_BOUND, text, remedy, rms=rms)


def check_reward(trainer: Trainer) -> Iterator[Finding]:
    """The audit's short form: damage must lower the score that is about it, and nothing may raise the total."""
    known = edits.drawn_clips(trainer.config, trainer.prompts, REWARD_CLIPS)
    if known is None:
        yield Finding("reward", "note", "not checked: this model has no world that can draw a clip known to be good")
        return
    try:
        found = edits.measure(trainer.reward, *known, trainer.config.fps, dict.fromkeys(edits.SHORT, ()))
    except ValueError as error:
        yield judged("reward", False, str(error), "repair the reward")
        return
    told = edits.conclude(found, verdicts := edits.give_verdicts(found, drawn=True))
    remedy = f"{'; '.join(told['wrong'])}: mind the reward's sign and the reward_weights"
    text, shown = "how known edits change the scores of clips known to be good", edits.table(found, verdicts)
    yield judged("reward", not told["wrong"], text, remedy, textwrap.indent(shown, " " * 17), **told)
    if told["unclear"]:
        yield Finding("reward", "note", f"too few clips to tell ({len(known[0])}): {', '.join(told['unclear'])}")


def check_exploration(trainer: Trainer) -> Iterator[Finding]:
    """Compare the injected noise with the noise level of the state it is added to."""
    schedule, c = trainer.sampler.window(trainer.windows.steps), trainer.config
    std, after = schedule.std.tolist(), schedule.sigmas[1:].tolist()
    over = [i for i in range(schedule.num_steps - 1) if std[i] > after[i]]
    text = f"{c.sde_type} at eta {c.eta:g} injects noise of energy {sum(s * s for s in std):.3g} (the sum of std^2)"
    yield Finding("noise", "ok", text + ("" if over else ", at no step more than the noise level that it leads to"))
    if over:
        i = over[0]
        text = f"step {i} injects noise of std {std[i]:.2g}, more than the noise level {after[i]:.2g} that it leads "
        text += "to, and leaves what the model has learnt: less eta, more steps or sde_type precise help"
        yield Finding("noise", "note", text)
    if std[-1]:
        text = f"the noise of the last step, std {std[-1]:.2g}, stays in the clip that is judged"
        yield Finding("noise", "note", f"{text}; sde_window all_but_last makes that step deterministic")


@torch.no_grad()
def check_noise_free(trainer: Trainer) -> Iterator[Finding]:
    """Without noise the sampler must equal the ODE: the same initial noise must give the same latents."""
    c, guidance, sigmas = trainer.config, trainer.guidance, trainer.sampler.sigmas
    cond = trainer.backbone.encode([trainer.prompts[0]])[0].to(sigmas.device)
    x, noise = counter_noise(trainer.shape, c.seed, [0])
    x = x.to(sigmas.device)
    ode = integrate(trainer.backbone, sigmas.cpu(), x, cond, guidance)
    silent = build_schedule(resolved(c.sde_type), sigmas.cpu(), 0.0).to(sigmas.device)
    latents = denoise(trainer.backbone, silent, x, cond, guidance, noise)
    difference = ((latents - ode).norm() / ode.norm()).item()
    text = f"{c.sde_type} at eta 0 against a plain Euler ODE: the latents differ by {difference:.1g} of their norm"
    remedy = f"the table of {c.sde_type} (algo/sde.py) must become a = 1, b = next - sigma, std = 0 at eta 0"
    yield judged("noise 0", difference <= PATH_BOUND[c.dtype], text, remedy, difference=difference)


def check_update(trainer: Trainer) -> Iterator[Finding]:
    """Run one micro-batch through the trainer's rollout and loss, without an optimizer step."""
    schedule, c = trainer.sampler, trainer.config
    (trajectory,) = trainer.roll_out(trainer.micro_batches()[:1])
    lost, pairs = int((~trajectory.is_finite).sum()), trajectory.order.numel()
    if lost:
        remedy = f"lower eta ({c.eta:g}) or guidance_scale ({c.guidance_scale:g}), try dtype fp32, check the weights"
        yield judged("rollout", False, f"{lost} of {len(trajectory.x)} paths are not finite", remedy)
        return
    trainer.prepare_anchor([trajectory])
    goal = Objective(trainer.backbone, trainer.guidance, schedule, c, trainer.controller.coef, pairs)
    stats = UpdateStats.empty(schedule.num_steps, trainer.ranks.device)
    signs = 1 - 2 * (torch.arange(len(trajectory.x), device=trajectory.x.device) % 2.0)  # in place of advantages
    for places in tqdm(trajectory.order.T, "training forward", unit="step", leave=False):
        goal.backward(trajectory, places, signs, stats)
    deviation = stats.max_deviation.max().item()
    shown = f"off by up to {deviation:.3g}" if deviation else "exactly 1, so training repeats the rollout's arithmetic"
    text = f"the first ratio of {pairs} (video, step) pairs is {shown}"
    remedy = "training runs other arithmetic than the rollout, and every gradient would be wrong: look for dropout, "
    remedy += "autocast, another attention kernel or batch shape, or code that asks whether gradients are on"
    yield judged("ratio", deviation == 0, text, remedy, deviation=deviation)
    yield gradient_finding(trainer, trajectory)
    trainer.optimization.zero_grad()
    yield balance_finding(trainer, goal, trajectory, signs)


def gradient_finding(trainer: Trainer, trajectory: Trajectory) -> Finding:
    """After a backward pass: trained parameters, and only those, must have gradients."""
    trained = trainer.optimization.parameters
    ours, seen = {id(p) for p in trained.values()}, (trajectory.cond, trainer.guidance.negative)
    leaked = [n for n, p in trainer.backbone.transformer.named_parameters() if p.grad is not None and id(p) not in ours]
    silent = [name for name, p in trained.items() if p.grad is None or not p.grad.any()]
    early = {name for name in silent if "lora_A" in name and not trained[name.replace("lora_A", "lora_B")].any()}
    reasons = {name: trainer.backbone.awaits(name, seen) for name in silent}
    reasons |= dict.fromkeys(early, "lora_A wait for their lora_B, which starts at 0")
    wrong = [f"{name} has no gradient although it is trained" for name in silent if not reasons[name]]
    wrong += [f"{name} has a gradient although it is frozen" for name in leaked]
    norm = trainer.optimization.clip()
    wrong += [] if math.isfinite(norm) else ["the gradient is not finite: lower eta, or try dtype fp32"]
    text = f"{len(trained) - len(silent)} of {len(trained)} trained tensors have one, together of norm {norm:.3g}"
    text += "".join(f"; {count} {reason}" for reason, count in Counter(reasons.values()).items() if reason)
    remedy = f"{'; '.join(wrong[:3])} ({len(wrong)} in all): mind requires_grad, and what the forward uses"
    return judged("gradients", not wrong, text, remedy, wrong=wrong)


def balance_finding(trainer: Trainer, goal: Objective, trajectory: Trajectory, signs: Tensor) -> Finding:
    """Gradient norm of the policy loss per denoising step; in theory it is proportional to N_t."""
    schedule, c, rows = goal.schedule, trainer.config, []
    expected, balance = gradient_scale(schedule, c.ratio_norm), equalizer(schedule, True, c.ratio_norm)
    for place, step in enumerate(tqdm(trajectory.steps[0].tolist(), "gradient per step", unit="step", leave=False)):
        goal.terms(trajectory, torch.full_like(trajectory.order[:, 0], place), signs).policy.mean().backward()
        norm = trainer.optimization.clip()
        trainer.optimization.zero_grad()
        known = (schedule.sigmas[step], schedule.std[step], expected[step], norm, balance[step], norm * balance[step])
        rows.append([step, *map(float, known)])
    plain, equalized = (max(norms) / max(min(norms), 1e-30) for norms in ([r[4] for r in rows], [r[6] for r in rows]))
    text = f"largest over smallest gradient of a denoising step: {plain:.3g} by itself, {equalized:.3g} equalized"
    table = aligned([BALANCE, *([f"{value:.3g}" for value in row] for row in rows)])
    return judged("balance", True, text, "", textwrap.indent(table, " " * 17), columns=BALANCE, rows=rows)


ALL = (check_batch, check_plan, check_prompts, check_vae, check_reward, check_exploration)
ALL += (check_noise_free, check_update)
CHECKS = {check.__name__.removeprefix("check_"): check for check in ALL}  # in this order
