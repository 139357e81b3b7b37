"""How long does an iteration take, compared with a plain loop on stock diffusers?

    python -m research.benchmarks.iteration --iterations 3 --guidance_scale 1 \\
        --output research/benchmarks/results/DATE-iteration-cpu.md

Three loops take turns on one machine, with the same prompts, noise, reward, trained parameters and number of forwards:
    ours          unmodified `Trainer.train`, with the times it logs
    plain         stock pipeline, stock transformer with padded text and masks, a second transformer for the KL
    plain, short  plain, with padding cut to the longest prompt, which the stock pipeline allows
The first iteration warms up and checks, from equal weights, that all compute the same latents, rewards and gradient.
All other flags go to post_train.py.
"""

import argparse
import copy
import os
import platform
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import diffusers
import torch
from diffusers import HunyuanVideo15Pipeline
from torch import Tensor
from tqdm import tqdm

from research.benchmarks.stock import StockTransformer
from sage_grpo.algo.equalizer import equalizer
from sage_grpo.algo.grpo import objective, policy_loss
from sage_grpo.config.fields import Config, ConfigError
from sage_grpo.config.parse import parse
from sage_grpo.data.requests import Request
from sage_grpo.models.lora import add_adapter, init_adapter
from sage_grpo.models.sample import counter_noise
from sage_grpo.parallel.ranks import Ranks, join_ranks
from sage_grpo.train.batches import MicroBatch
from sage_grpo.train.build import build_trainer
from sage_grpo.train.metrics import Stopwatch
from sage_grpo.train.optimization import trainable_parameters
from sage_grpo.train.rollout import Trajectory
from sage_grpo.train.trainer import Trainer

OURS, PLAIN, SHORT = "ours", "plain", "plain, short"
PHASES = (
    "text encoding",
    "rollout",
    "decode",
    "reward",
    "gold metrics",
    "reference/anchor",
    "update",
    "other",
)
IN_MODEL = ("text encoding", "rollout", "reference/anchor", "update")
# phases that the trainer logs under another name
LOGGED_NAMES = {"gold metrics": "gold", "reference/anchor": "anchor"}
# fp32: a pixel may round the other way, and rewards and gradient see it
TOLERANCES = {"latents": 1e-4, "rewards": 1e-2, "gradient": 1e-2}
# Features that the plain loop lacks; with other values the loops would do different work.
FIXED = {
    "updates_per_rollout": 1, "gradient_accumulation_steps": 1, "timestep_fraction": 1.0, "micro_batch_size": None,
    "same_init_noise": False, "ratio_norm": False, "optimizer": "adamw", "ema_decay": 0.0, "log_interval": 1,
    "dtype": "fp32",
}  # fmt: skip


class Padding(NamedTuple):
    """Tokens to which the stock pipeline pads every prompt."""

    text: int
    glyph: int
    image: int


STOCK = Padding(text=1000, glyph=256, image=729)  # the pipeline's defaults


class Rollout(NamedTuple):
    """A rollout of one group in the plain loop: B clips, T steps."""

    cond: list[Tensor]
    x: list[Tensor]  # T + 1 of (B, C, t, y, x)
    log_prob: list[Tensor]  # T of (B,)


@dataclass
class Outcome:
    """Times and results of one iteration of one loop."""

    seconds: dict[str, float]  # by phase, and "total"
    latents: Tensor  # (N, C, t, y, x)
    rewards: Tensor  # (N,)
    gradient: Tensor  # (P,) over all trained parameters, before clipping


@dataclass(frozen=True)
class Result:
    """What the page shows."""

    config: Config  # with model-dependent values filled in
    short: Padding
    outcomes: dict[str, list[Outcome]]  # per loop, without the warm-up
    agreement: list[str]  # of each plain loop with ours, one line each


class PlainLoop:
    """GRPO on stock diffusers: nothing packed, nothing shared, a second transformer as reference."""

    def __init__(self, trainer: Trainer, padding: Padding) -> None:
        c = trainer.config
        self.trainer = trainer
        self.config = c
        self.device = trainer.ranks.device

        root = c.pretrained_model_root
        kwargs = {"dtype": torch.float32, "local_files_only": True}
        transformer = StockTransformer.from_pretrained(root, subfolder="transformer", **kwargs)
        pipe = HunyuanVideo15Pipeline.from_pretrained(root, transformer=transformer, **kwargs)
        self.pipe = pipe.to(self.device)
        self.pipe.tokenizer_max_length = padding.text
        self.pipe.tokenizer_2_max_length = padding.glyph
        self.pipe.vision_num_semantic_tokens = padding.image
        self.pipe.vae.enable_slicing()  # the stock VAE decodes one clip at a time; a batch fails

        self.policy = self.pipe.transformer.eval()
        self.reference = copy.deepcopy(self.policy).requires_grad_(False)
        if c.use_lora:
            add_adapter(self.policy, c.lora_r, c.lora_alpha, c.lora_target_modules, torch.float32)
            init_adapter(self.policy, c.seed)
        if c.enable_gradient_checkpointing:
            self.policy.enable_gradient_checkpointing()
        self.parameters = trainable_parameters(self.policy, c.use_lora)
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(), lr=c.learning_rate, weight_decay=c.weight_decay
        )
        self.negative = self.encode([c.negative_prompt])[0]
        self.schedule = trainer.schedule.window(trainer.windows.steps)

    def iteration(self, step: int, batch: Sequence[Trajectory]) -> Outcome:
        """Regenerate the clips of the trainer's `batch` in iteration `step`, and train on them."""
        trainer = self.trainer
        watch = Stopwatch(self.device)
        micro_batches = [trajectory.micro_batch for trajectory in batch]
        texts = [trainer.requests[prompt].text for (prompt, _), *_ in micro_batches]
        with watch.phase("text encoding"):
            conditions = self.encode(texts)
        with watch.phase("rollout"):
            paths = [
                self.roll_out(micro_batch, cond, step)
                for micro_batch, cond in zip(micro_batches, conditions, strict=True)
            ]
        with watch.phase("decode"):
            clips = [clip for path in paths for clip in self.decode(path.x[-1])]
        with watch.phase("reward"):
            scores = trainer.reward.score(clips, trainer.requests_of(batch), self.config.fps)
        advantages = trainer.advantages(scores).values.to(self.device, torch.float32)
        gradient = self.update(paths, advantages, watch)
        seconds = with_other(watch.seconds, watch.record()["time/total"])
        latents = torch.cat([path.x[-1] for path in paths])
        return Outcome(seconds, latents, scores.total, gradient)

    @torch.no_grad()
    def encode(self, texts: list[str]) -> list[list[Tensor]]:
        """Embedding, mask, glyph embedding and glyph mask of each text, each with a batch dimension of 1."""
        parts = self.pipe.encode_prompt(
            texts, self.device, self.policy.dtype, batch_size=len(texts)
        )
        return [[part[i : i + 1] for part in parts] for i in range(len(texts))]

    def velocity(
        self, model: StockTransformer, x: Tensor, sigma: Tensor, cond: list[Tensor]
    ) -> Tensor:
        """Velocity as the stock pipeline computes it: one forward, or two with guidance."""
        positive = self.forward(model, x, sigma, cond)
        if self.config.guidance_scale == 1:
            return positive
        unguided = self.forward(model, x, sigma, self.negative)
        return unguided + self.config.guidance_scale * (positive - unguided)

    def forward(
        self, model: StockTransformer, x: Tensor, sigma: Tensor, cond: list[Tensor]
    ) -> Tensor:
        """One forward of the stock transformer, with its padded text and masks."""
        text, text_mask, glyph, glyph_mask = (part.expand(len(x), *part.shape[1:]) for part in cond)
        image_tokens = self.pipe.vision_num_semantic_tokens
        channels = self.pipe.prepare_cond_latents_and_mask(x, x.dtype, x.device)
        (velocity,) = model(
            hidden_states=torch.cat([x, *channels], dim=1),
            timestep=1000 * sigma.expand(len(x)),
            encoder_hidden_states=text,
            encoder_attention_mask=text_mask,
            encoder_hidden_states_2=glyph,
            encoder_attention_mask_2=glyph_mask,
            image_embeds=x.new_zeros(len(x), image_tokens, model.config.image_embed_dim),
            return_dict=False,
        )
        return velocity

    @torch.no_grad()
    def roll_out(self, micro_batch: MicroBatch, cond: list[Tensor], step: int) -> Rollout:
        """Sample one group with noise in all exploring steps."""
        schedule = self.schedule
        shape = self.trainer.shape
        prompts, samples = zip(*micro_batch, strict=True)
        first, noise = counter_noise(shape, self.config.seed, samples, "rollout", prompts, step)
        path = Rollout(cond, [first.to(self.device)], [])
        for i in tqdm(range(schedule.num_steps), "rollout", leave=False):
            velocity = self.velocity(self.policy, path.x[i], schedule.sigmas[i], cond)
            x_next, log_prob = schedule.step(i, path.x[i], velocity, noise(i).to(self.device))
            path.x.append(x_next)
            path.log_prob.append(log_prob)
        return path

    @torch.no_grad()
    def decode(self, latents: Tensor) -> list[Tensor]:
        """Decode as the stock pipeline does, then convert to uint8 clips (F, H, W, 3)."""
        vae = self.pipe.vae
        decoded = vae.decode(latents / vae.config.scaling_factor, return_dict=False)[0]
        video = self.pipe.video_processor.postprocess_video(decoded, output_type="pt")
        pixels = (255 * video).round().to(torch.uint8)  # (B, F, 3, H, W)
        return list(pixels.permute(0, 1, 3, 4, 2).cpu())

    def update(self, paths: list[Rollout], advantages: Tensor, watch: Stopwatch) -> Tensor:
        """One optimizer step on all clips and steps; returns the gradient."""
        c = self.config
        schedule = self.schedule
        steps = list(self.trainer.windows.steps)
        scale = equalizer(self.trainer.schedule, c.use_grad_balancing)
        pairs = len(advantages) * len(steps)
        group_sizes = [len(path.x[0]) for path in paths]
        groups = list(zip(paths, advantages.split(group_sizes), strict=True))
        for i in tqdm(steps, "update", leave=False):
            sigma = schedule.sigmas[i]
            for path, advantage in groups:
                x = path.x[i]
                with watch.phase("reference/anchor"), torch.no_grad():
                    reference = self.velocity(self.reference, x, sigma, path.cond)
                with watch.phase("update"):
                    velocity = self.velocity(self.policy, x, sigma, path.cond)
                    log_prob = schedule.log_prob(i, x, velocity, path.x[i + 1])
                    policy = policy_loss(log_prob - path.log_prob[i], advantage, c.clip_range)
                    kl = schedule.kl(i, velocity, reference)
                    objective(policy, scale[i], kl, c.kl_weight, pairs).backward()
        with watch.phase("update"):
            gradient = flat_gradient(self.parameters)
            torch.nn.utils.clip_grad_norm_(self.parameters.values(), c.max_grad_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return gradient


def flat_gradient(parameters: Mapping[str, torch.nn.Parameter]) -> Tensor:
    """A flat copy (P,) of all gradients, ordered by name."""
    return torch.cat([parameters[name].grad.flatten() for name in sorted(parameters)])


def with_other(seconds: dict[str, float], total: float) -> dict[str, float]:
    """Seconds of every phase, 0 if a loop lacks it; the unaccounted rest is `other`."""
    named = {name: seconds.get(name, 0.0) for name in PHASES}
    return named | {"other": total - sum(named.values()), "total": total}


def watch_trainer(
    trainer: Trainer, then: Callable[[int, Sequence[Trajectory], Outcome], None]
) -> None:
    """Run `Trainer.train`, calling `then` after each iteration, outside its timings."""
    parameters = trainer.optimization.parameters
    clip = trainer.optimization.clip
    log = trainer.log
    results: dict[str, Any] = {}  # of the methods named below, in this iteration
    seconds: dict[str, float] = {}  # that they took

    def watch(owner: object, name: str) -> None:
        method = getattr(owner, name)

        def watched(*arguments: Any) -> Any:
            begin = time.perf_counter()
            results[name] = method(*arguments)
            seconds[name] = time.perf_counter() - begin
            return results[name]

        setattr(owner, name, watched)

    def clip_and_keep() -> float:
        results["gradient"] = flat_gradient(parameters)
        return clip()

    def log_and_continue(record: dict[str, Any], bar: tqdm) -> None:
        batch = results["roll_out"]
        ours = Outcome(
            seconds=logged_seconds(record, seconds["encode"]),
            latents=torch.cat([trajectory.data.latents for trajectory in batch]),
            rewards=results["score"].total,
            gradient=results["gradient"],
        )
        then(trainer.step - 1, batch, ours)
        log(record, bar)

    watch(trainer.backbone, "encode")
    watch(trainer, "roll_out")
    watch(trainer, "score")
    trainer.optimization.clip = clip_and_keep
    trainer.log = log_and_continue
    trainer.train()


def logged_seconds(record: dict[str, Any], encoding: float) -> dict[str, float]:
    """The trainer's phase times; its rollout includes fetching embeddings, computed once before the first step."""
    seconds = {phase: record[f"time/{LOGGED_NAMES.get(phase, phase)}"] for phase in PHASES[1:-1]}
    inside = {"text encoding": encoding, "rollout": seconds["rollout"] - encoding}
    return with_other(seconds | inside, record["time/total"])


def longest(trainer: Trainer) -> Padding:
    """The smallest padding that fits every training prompt and the negative prompt."""
    texts = {trainer.config.negative_prompt, *(prompt.text for prompt in trainer.requests)}
    conditions = trainer.backbone.encode([Request(text) for text in sorted(texts)])
    text = max(len(cond.text) for cond in conditions)
    glyph = max(1, *(len(cond.glyph) for cond in conditions))
    return Padding(text=text, glyph=glyph, image=1)


def check_equal(ours: Outcome, plain: Outcome) -> str:
    """One line on the agreement of two iterations from equal weights; a real difference is an error."""
    latents = (ours.latents - plain.latents).abs().max().item()
    rewards = (ours.rewards - plain.rewards).abs().max().item()
    gradient = ((ours.gradient - plain.gradient).norm() / ours.gradient.norm()).item()
    errors = {"latents": latents, "rewards": rewards, "gradient": gradient}
    line = f"latents differ by {latents:.1e}, rewards by {rewards:.1e}, the gradient by {gradient:.1e} of its norm"
    # Written so that NaN, which is not below any limit, fails.
    if not all(errors[name] <= limit for name, limit in TOLERANCES.items()):
        raise RuntimeError(
            f"the loops do not compute the same: {line}; allowed are at most {TOLERANCES}"
        )
    return line


def measure(config: Config, ranks: Ranks) -> Result:
    """Run the loops in alternation."""
    trainer = build_trainer(config, ranks)
    refuse_other_work(trainer.config)
    trainer.validation = None
    short = longest(trainer)
    loops = {PLAIN: PlainLoop(trainer, STOCK), SHORT: PlainLoop(trainer, short)}
    outcomes: dict[str, list[Outcome]] = {name: [] for name in (OURS, *loops)}
    agreement: list[str] = []

    def run_others(step: int, batch: Sequence[Trajectory], ours: Outcome) -> None:
        plain = {name: loop.iteration(step, batch) for name, loop in loops.items()}
        if step == 0:  # the warm-up
            agreement.extend(f"- {name}: {check_equal(ours, plain[name])}" for name in loops)
            return
        outcomes[OURS].append(ours)
        for name in loops:
            outcomes[name].append(plain[name])

    try:
        watch_trainer(trainer, run_others)
    finally:
        trainer.run.close()
    return Result(trainer.config, short, outcomes, agreement)


def refuse_other_work(config: Config) -> None:
    """Reject flags with which the plain loop would do other work than ours."""
    for name, value in FIXED.items():
        if getattr(config, name) != value:
            raise ConfigError(
                f"{name} is {getattr(config, name)}; the plain loop knows only {value}"
            )
    if config.trust_region.anchor is None:
        raise ConfigError(
            "the KL has no anchor, the plain loop has one; give kl_weight and its weights above 0"
        )


def medians(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Median seconds of each phase, and of the total."""
    return {
        name: statistics.median(outcome.seconds[name] for outcome in outcomes)
        for name in (*PHASES, "total")
    }


def table(outcomes: dict[str, list[Outcome]]) -> str:
    """Median seconds by phase, and the slowdown of the plain loops."""
    columns = {loop: medians(outcomes[loop]) for loop in (OURS, PLAIN, SHORT)}
    rows = [
        "| phase | ours, s | plain, s | ratio | plain, short, s | ratio |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for phase in (*PHASES, "total"):
        ours, plain, short = (columns[name][phase] for name in (OURS, PLAIN, SHORT))
        rows.append(
            f"| {phase} | {ours:.2f} | {plain:.2f} | {ratio(plain, ours)} "
            f"| {short:.2f} | {ratio(short, ours)} |"
        )
    return "\n".join(rows)


def ratio(other: float, ours: float) -> str:
    """How many times as long another loop takes; empty where one does nothing."""
    return f"{other / ours:.1f}" if other and ours >= 0.005 else ""


def differences(outcomes: dict[str, list[Outcome]], config: Config) -> str:
    """What each difference saves, in seconds per iteration."""
    ours, plain, short = (medians(outcomes[loop]) for loop in (OURS, PLAIN, SHORT))
    in_model = sum(short[phase] - ours[phase] for phase in IN_MODEL)
    encoding = short["text encoding"] - ours["text encoding"]
    saved = {
        "padding cut to the longest prompt": plain["total"] - short["total"],
        "packed: no padding, no masks, text shared by the group": in_model,
        "prompts encoded once, before the first iteration": encoding,
        "clips decoded in batches": short["decode"] - ours["decode"],
        "gold metrics, which only ours measures": -ours["gold metrics"],
    }
    if config.trust_region.anchor == "moving":
        every = config.update_ref_model_step
        name = f"anchor skipped while it is the policy, 1 iteration of {every} (not in the table)"
        saved[name] = ours["reference/anchor"] / every
    lines = [f"| {name} | {seconds:.2f} |" for name, seconds in saved.items()]
    return "\n".join(["| difference | saves, s |", "|---|---:|", *lines])


def by_iteration(outcomes: dict[str, list[Outcome]]) -> str:
    """How many times as long the plain loops take, iteration by iteration."""
    parts = []
    for ours, plain, short in zip(outcomes[OURS], outcomes[PLAIN], outcomes[SHORT], strict=True):
        total = ours.seconds["total"]
        parts.append(
            f"{plain.seconds['total'] / total:.1f} and {short.seconds['total'] / total:.1f}"
        )
    return "; ".join(parts)


def report(config: Config, ranks: Ranks, command: str) -> str:
    """Measure, and format the results as a Markdown page."""
    result = measure(config, ranks)
    c = result.config
    short = result.short
    outcomes = result.outcomes
    device = f"{os.cpu_count()} CPU cores"
    if ranks.device.type == "cuda":
        device = torch.cuda.get_device_name()
    trained = "LoRA" if c.use_lora else "all weights"
    agreement = ["From equal weights the first iteration computes the same as ours:"]
    agreement += result.agreement
    paragraphs = [
        f"# Time of an iteration, {time.strftime('%Y-%m-%d')}",
        f"{device} ({platform.machine()}), fp32, torch {torch.__version__}, diffusers {diffusers.__version__}, "
        f"Python {platform.python_version()}. {c.batch_size} clips in groups of {c.num_generations}, "
        f"{c.num_sampling_steps} steps, guidance {c.guidance_scale:g}, {trained} trained. "
        f"Median of {len(outcomes[OURS])} iteration(s) after a warm-up; the loops take turns.",
        f"    {command}",
        table(outcomes),
        f"Ratios of the totals by iteration, plain and plain with short padding: {by_iteration(outcomes)}.",
        differences(outcomes, c),
        f"Every prompt is padded to {STOCK.text} text, {STOCK.glyph} glyph and {STOCK.image} image tokens in `plain`, "
        f"the stock pipeline's defaults, and to {short.text}, {short.glyph} and {short.image} in `plain, short`.",
        "\n".join(agreement),
    ]
    return "\n\n".join(paragraphs) + "\n"


def read_flags(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The flags of this script, and all others."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form, allow_abbrev=False)
    add = parser.add_argument
    add("--config", default="configs/tiny_cpu.yaml", help="recipe of post_train.py")
    add("--iterations", type=int, default=3, help="iterations of each loop, after the warm-up")
    add("--output", type=Path, help="Markdown file for the result")
    flags, others = parser.parse_known_args(arguments)
    if flags.iterations < 1:
        parser.error(f"--iterations is {flags.iterations}; at least 1 is needed")
    return flags, others


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    flags, others = read_flags(arguments)
    command = shlex.join(["python", "-m", "research.benchmarks.iteration", *arguments])
    # Nothing but iterations; the plain loop has no averaged weights, and every iteration is logged.
    bare = "--validate_at_step0 False --validation_interval 0 --save_interval 0 --report_to none"
    bare += " --ema_decay 0 --log_interval 1 --validation_videos 0"
    with tempfile.TemporaryDirectory() as folder:
        run = ["--output_dir", folder, "--max_steps", str(flags.iterations + 1), *bare.split()]
        config = parse(["--config", flags.config, *others, *run])
        with join_ranks(config.start_timeout) as ranks:
            page = report(config, ranks, command)
    print(page)
    if flags.output:
        flags.output.parent.mkdir(parents=True, exist_ok=True)
        flags.output.write_text(page)


if __name__ == "__main__":
    main()
