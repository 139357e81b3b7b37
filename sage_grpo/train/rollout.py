"""Rollouts: which clips a rank samples, in which steps with exploration noise, and what training keeps.

Every group of clips has noise in a window of consecutive denoising steps, and trains on these. Outside its window a
clip follows the ODE, which has no log-probability: there it may be computed in any way that is cheap.

All clips in one forward share a prompt (packed text), or have prompts of equal length. Training runs the same
micro-batches through the same function, which is why the first ratio is exactly 1.

Shapes: B clips of a micro-batch, W denoising steps of a window, ... the latent shape (C, t, y, x).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sage_grpo import rng
from sage_grpo.algo.matching import noised
from sage_grpo.algo.sde import Schedule, flow_sigmas
from sage_grpo.config.fields import Config
from sage_grpo.models.backbone import Backbone, Conditioning, Guidance
from sage_grpo.models.embeddings import alike, together
from sage_grpo.models.sample import Noise, counter_noise, integrate

ClipId = tuple[
    int, int
]  # position of its prompt in the list, and index among the prompt's clips in this iteration
MicroBatch = tuple[ClipId, ...]  # clips that run through the model together
Group = tuple[int, int]  # position of the prompt, and which of its groups
FORMS = "all, all_but_last, random:SIZE, slide:SIZE[:EVERY], random_iteration:SIZE or slide_iteration:SIZE[:EVERY]"


@dataclass(frozen=True)
class Windows:
    """The windows of a run; `parse_windows` makes them from `sde_window`."""

    kind: str
    size: int  # denoising steps
    every: int  # iterations after which a sliding window advances
    first: int  # step
    places: int  # where the window may begin, from `first` on
    seed: int

    @property
    def steps(self) -> range:
        """All steps that may be in a window."""
        return range(self.first, self.first + self.places - 1 + self.size)

    def start(self, step: int, prompt: int, group: int) -> int:
        """First denoising step of the window of a prompt's group in iteration `step`."""
        kind, *of_all = self.kind.split("_")
        own = {} if of_all else {"prompt": prompt, "sample": group}
        if kind == "random":
            return self.first + rng.integer(self.places, self.seed, "window", step=step, **own)
        phase = rng.integer(self.places, self.seed, "window", prompt=prompt) if own else 0
        return self.first + (phase + step // self.every) % self.places


def parse_windows(text: str, stochastic: Tensor, seed: int) -> Windows:
    """Windows within the steps that can have noise, `stochastic` (T,) bool, which follow each other in every sampler.

    `all`; `all_but_last`; `random:SIZE`, drawn for each group of clips; `slide:SIZE:EVERY`, which begins at another
    place for each prompt, advances by one every EVERY (25) iterations and wraps around (MixGRPO). With `_iteration` all
    groups of an iteration have the same window, and one that slides begins at the first step.
    """
    noisy = stochastic.nonzero().flatten().tolist()
    kind, *numbers = text.split(":")
    if kind == "all_but_last":
        noisy = [step for step in noisy if step < len(stochastic) - 1]
    if not noisy:
        raise ValueError(
            "the schedule has no stochastic step to train: choose an sde_type other than ode, or eta > 0"
        )
    if not numbers and kind in ("all", "all_but_last"):
        return Windows("all", len(noisy), 1, noisy[0], 1, seed)
    name = kind.removesuffix("_iteration")
    if (
        name not in ("random", "slide")
        or not 1 <= len(numbers) <= 1 + (name == "slide")
        or "" in numbers
    ):
        raise ValueError(f"sde_window is {text!r}; write {FORMS}")
    if not all(number.isdigit() and int(number) for number in numbers) or int(numbers[0]) > len(
        noisy
    ):
        raise ValueError(
            f"sde_window is {text!r}; its numbers must be whole, and SIZE at most {len(noisy)} steps"
        )
    size, every = int(numbers[0]), int(numbers[1]) if len(numbers) > 1 else 25
    return Windows(kind, size, every, noisy[0], len(noisy) - size + 1, seed)


@dataclass
class Trajectory:
    """A micro-batch and its way from noise to latents, fp32; of the ODE outside its windows, only the end is kept."""

    micro_batch: MicroBatch
    cond: Conditioning
    steps: Tensor  # (B, W) the denoising steps of each clip's window, or those that it trains
    x: Tensor  # (B, W, ...) states before them
    x_next: Tensor  # (B, W, ...) what has the log-probability: the states after them, or targets to match
    velocity: Tensor  # (B, W, ...) predicted by the policy that sampled it
    log_prob: Tensor  # (B, W)
    latents: Tensor  # (B, ...) the result
    is_finite: Tensor  # (B,) bool: all of the above is finite
    order: Tensor  # (B, K) the places in the window to train, in training order
    anchor_velocity: Tensor | None = None  # (B, W, ...) at the places to train


def prompt_positions(step: int, per_step: int, count: int, seed: int) -> list[int]:
    """Prompt positions for iteration `step`: each epoch goes through all `count` prompts in a new order."""
    numbers = range(step * per_step, (step + 1) * per_step)
    epochs = {n // count for n in numbers}
    orders = {epoch: rng.permutation(count, seed, "prompt_order", step=epoch) for epoch in epochs}
    return [int(orders[n // count][n % count]) for n in numbers]


def plan_micro_batches(
    positions: Sequence[int],
    group_size: int,
    batch_size: int,
    rank: int,
    micro_batch_size: int | None,
) -> list[MicroBatch]:
    """The micro-batches of one rank: its `batch_size` rows of the list of all clips, group by group.

    If a prompt appears twice in an iteration, its sample numbers continue, so no noise is used twice.
    """
    rows, seen = [], dict.fromkeys(positions, 0)
    for prompt in positions:
        rows += [(prompt, seen[prompt] + number) for number in range(group_size)]
        seen[prompt] += group_size
    mine = rows[rank * batch_size : (rank + 1) * batch_size]
    size = micro_batch_size or min(batch_size, group_size)
    return [tuple(mine[start : start + size]) for start in range(0, len(mine), size)]


def num_trained(window: int, fraction: float) -> int:
    """How many of a window's denoising steps each clip trains."""
    return max(1, round(fraction * window))


@dataclass
class Rollouts:
    """Samples the micro-batches of iteration `step` on one rank: the ODE, noise in each clip's window, the ODE again.

    With `same_init_noise` the clips of a group are one until their window, and the way there is computed once.
    """

    backbone: Backbone
    sampler: Schedule
    windows: Windows
    guidance: Guidance
    shape: Sequence[int]
    config: Config
    step: int
    conditions: Mapping[int, Conditioning]  # by position in the prompt list
    begun: dict[Group, Tensor] = field(
        default_factory=dict
    )  # states in which groups enter their windows

    def joined(self, micro_batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """Join up to `prompts_per_forward` micro-batches whose prompts are alike; clips of a prompt stay together."""
        if (most := self.config.prompts_per_forward) == 1:
            return micro_batches
        parts = alike([self.conditions[one[0][0]] for one in micro_batches], most)
        return [tuple(clip for i in part for clip in micro_batches[i]) for part in parts]

    @torch.no_grad()
    def __call__(self, micro_batch: MicroBatch) -> Trajectory:
        """Non-finite trajectories are zeroed and flagged: they must not turn other clips' gradients into NaN."""
        cond, device = (
            self.conditioning([prompt for prompt, _ in micro_batch]),
            self.sampler.sigmas.device,
        )
        steps, order = self.places(micro_batch)
        parts = self.sampled(micro_batch, cond, steps)
        is_finite = torch.stack([values.isfinite().flatten(1).all(1) for values in parts]).all(0)
        for values in parts:
            values[~is_finite] = 0.0
        return Trajectory(micro_batch, cond, steps.to(device), *parts, is_finite, order.to(device))

    def sampled(
        self, micro_batch: MicroBatch, cond: Conditioning, steps: Tensor
    ) -> tuple[Tensor, ...]:
        """A trajectory's x, x_next, velocity, log_prob and latents; x and x_next share their memory."""
        device, (x, noise) = self.sampler.sigmas.device, self.noise(micro_batch)
        x = self.begin(x.to(device), micro_batch, steps[:, 0], cond)
        path, velocities, log_probs = [x], [], []
        for i in steps.T:
            at = i.to(device)
            velocities.append(
                self.backbone.velocity(x, self.sampler.sigmas[at], cond, self.guidance)
            )
            x, log_prob = self.sampler.step(at, x, velocities[-1], noise(i).to(device))
            path.append(x)
            log_probs.append(log_prob)
        states, *others = (torch.stack(parts, 1) for parts in (path, velocities, log_probs))
        return states[:, :-1], states[:, 1:], *others, self.finish(x, steps[:, -1] + 1, cond)

    def noise(self, micro_batch: MicroBatch) -> tuple[Tensor, Noise]:
        """The clips' initial noise, and that of their steps."""
        c, (prompts, samples) = self.config, zip(*micro_batch, strict=True)
        first = [s - s % c.num_generations for s in samples] if c.same_init_noise else None
        return counter_noise(self.shape, c.seed, samples, "rollout", prompts, self.step, first)

    def places(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """A trajectory's steps (B, W) and order (B, K), one for each clip."""
        c, size = self.config, self.windows.size
        starts = [self.windows.start(self.step, *group) for group in self.groups(micro_batch)]
        kept, steps = (
            num_trained(size, c.timestep_fraction),
            torch.tensor(starts)[:, None] + torch.arange(size),
        )
        if not c.enable_timestep_permutation:
            return steps, torch.arange(kept).expand(len(micro_batch), -1)
        keys = [
            {"step": self.step, "prompt": prompt, "sample": sample}
            for prompt, sample in micro_batch
        ]
        return steps, torch.stack(
            [rng.permutation(size, c.seed, "permutation", **key)[:kept] for key in keys]
        )

    def groups(self, micro_batch: MicroBatch) -> list[Group]:
        """Each clip's group: its prompt, and which of the prompt's groups."""
        return [(prompt, sample // self.config.num_generations) for prompt, sample in micro_batch]

    def conditioning(self, prompts: Sequence[int]) -> Conditioning:
        return together([self.conditions[prompt] for prompt in prompts])

    def begin(
        self, x: Tensor, micro_batch: MicroBatch, start: Tensor, cond: Conditioning
    ) -> Tensor:
        """The states (B, ...) in which the clips enter their windows, from the noise `x`."""
        if not self.config.same_init_noise:
            return self.integrate(self.levels_before(start), x, cond)
        groups = self.groups(micro_batch)
        rows = {
            group: row
            for row, group in reversed(list(enumerate(groups)))
            if group not in self.begun
        }
        if rows:
            chosen = list(rows.values())
            of_groups = self.conditioning([prompt for prompt, _ in rows])
            found = self.integrate(self.levels_before(start[chosen]), x[chosen], of_groups)
            self.begun |= dict(zip(rows, found, strict=True))
        return torch.stack([self.begun[group] for group in groups])

    def integrate(
        self, sigmas: Tensor, x: Tensor, cond: Conditioning, solver: str = "euler"
    ) -> Tensor:
        """Follow the ODE outside the windows, where no log-probability is taken."""
        with self.backbone.transformer.lossy():
            return integrate(self.backbone, sigmas, x, cond, self.guidance, solver)

    def levels_before(self, start: Tensor) -> Tensor:
        """Noise levels (B, n+1) up to the windows that begin at `start` (B,); short rows end with repetitions."""
        return self.sampler.sigmas.cpu()[torch.arange(int(start.max()) + 1).minimum(start[:, None])]

    def finish(self, x: Tensor, end: Tensor, cond: Conditioning) -> Tensor:
        """Follow the ODE to the clips, from windows that end before step `end` (B,); short rows of levels get zeros."""
        sigmas, c, few = self.sampler.sigmas.cpu().double(), self.config, self.config.tail_steps
        rows = [sigmas[i:] for i in end.tolist()]
        if few:  # unless fewer are left
            rows = [
                flow_sigmas(few, c.timestep_shift, r[0].item()) if len(r) > few + 1 else r
                for r in rows
            ]
        return self.integrate(
            pad_sequence(rows, batch_first=True), x, cond, "dpm" if few else "euler"
        )


class NoisedRollouts(Rollouts):
    """Samples by the ODE, in `tail_steps` of second order if given; clips are noised again to the levels they train."""

    def places(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        steps, order = super().places(micro_batch)
        return steps.gather(1, order), torch.arange(order.shape[1]).expand_as(
            order
        )  # of others nothing is kept

    def sampled(
        self, micro_batch: MicroBatch, cond: Conditioning, steps: Tensor
    ) -> tuple[Tensor, ...]:
        device, (x, noise) = self.sampler.sigmas.device, self.noise(micro_batch)
        latents, found = self.finish(x.to(device), torch.zeros_like(steps[:, 0]), cond), []
        for i in steps.T:
            at = i.to(device)
            state, target = noised(latents, self.sampler.sigmas[at], noise(i).to(device))
            velocity = self.backbone.velocity(state, self.sampler.sigmas[at], cond, Guidance())
            found.append(
                (state, target, velocity, self.sampler.log_prob(at, state, velocity, target))
            )
        return *(torch.stack(parts, 1) for parts in zip(*found, strict=True)), latents


def at_steps(values: Tensor, steps: Tensor) -> Tensor:
    """Row b of `values` (B, S, ...) at steps[b]: (B, ...)."""
    return values[torch.arange(len(values), device=values.device), steps]
