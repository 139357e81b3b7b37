"""The distance of a trained policy to the base model: the KL between their sampling paths.

    path KL = E [ sum over exploring steps of |mean - mean_base|^2 / (2 std^2) ],   mean over the elements of a clip

Training logs the KL to its anchor, and a moving anchor leaves the base model together with the policy: those numbers
cannot be compared between strategies. This one can. Both samplers start from the same noise and add noise of the same
std, so by the chain rule the expectation over the policy's own paths is exactly the KL between the two distributions of
paths, up to the state after the last exploring step. A deterministic step after it has no density and is not counted.

The expectation is over one path for each held-out prompt. Its noise is drawn by counter from `validation_global_seed`,
so every run of a study is measured with the same prompts and noise, and a run can be measured again. The weights are
those that the last validation sampled: the averaged ones, if there is an average. The base model has exactly 0.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from sage_grpo.config.fields import Config, ConfigError
from sage_grpo.data.requests import Request
from sage_grpo.models.backbone import Backbone, Guidance
from sage_grpo.models.registry import device_for
from sage_grpo.train.algorithms.grpo import ExploringSampler
from sage_grpo.train.algorithms.registry import ALGORITHMS, build_algorithm
from sage_grpo.train.batches import ClipId, join_micro_batches
from sage_grpo.train.build import open_model
from sage_grpo.train.checkpoint_folders import list_checkpoints
from sage_grpo.train.inputs import validation_requests
from sage_grpo.train.update import anchor_velocities
from sage_grpo.train.windows import build_windows


def measured_config(config: Config) -> Config:
    """The configuration of the measured paths: the run's sampler, other noise than in training, all exploring steps."""
    explores = ALGORITHMS[config.algorithm].explores
    if not explores or config.sde_window not in ("all", "all_but_last"):
        raise ConfigError(
            f"the path KL needs a sampler that explores from the first step on, not algorithm {config.algorithm} with "
            f"sde_window {config.sde_window}: use grpo and all or all_but_last, or a study without path_kl"
        )
    seed = config.validation_global_seed
    return replace(config, seed=seed, timestep_fraction=1.0, enable_timestep_permutation=False)


def path_kls(
    policy: Backbone, base: Backbone, config: Config, prompts: Sequence[Request]
) -> Tensor:
    """Path KL (N,) of one clip for each of N prompts, fp64; NaN where a path is not finite. config: a resolved one."""
    c = measured_config(config)
    schedule = build_algorithm(c).schedule().to(policy.device)
    windows = build_windows(c.window_form, schedule.stochastic, c.seed)
    negative, *conditions = policy.encode([Request(c.negative_prompt), *prompts])
    conditions_by_index = dict(enumerate(conditions))
    sampler = ExploringSampler(
        backbone=policy,
        schedule=schedule,
        windows=windows,
        guidance=Guidance(c.guidance_scale, negative),
        shape=policy.latent_shape(c.num_frames, c.height, c.width),
        config=c,
        iteration=0,
        conditions=conditions_by_index,
    )
    micro_batches = join_micro_batches(
        [(ClipId(index, 0),) for index in conditions_by_index],
        conditions_by_index,
        c.prompts_per_forward,
    )
    kls = torch.full((len(prompts),), torch.nan, dtype=torch.float64)
    for micro_batch in micro_batches:
        trajectory = sampler.roll_out(micro_batch)
        base_velocity = anchor_velocities(base, sampler.guidance, schedule, trajectory)
        velocity = trajectory.data.velocity
        columns = zip(trajectory.steps.T, velocity.unbind(1), base_velocity.unbind(1), strict=True)
        step_kls = [schedule.kl(step, v, v_base).double() for step, v, v_base in columns]
        sums = torch.stack(step_kls).sum(0)
        positions = torch.tensor([position for position, _ in micro_batch])
        kls[positions] = sums.where(trajectory.is_finite, torch.nan).cpu()
    return kls


def measure(config: Config) -> dict[str, float]:
    """Path KL of a finished run: its mean over the held-out prompts, the standard error, and how many they are."""
    checkpoint = last_checkpoint(config)
    device = device_for(
        config.device, config.pretrained_model_root, config.pretrained_transformer_version
    )
    policy, resolved = open_model(config, torch.device(device))
    base, _ = open_model(config, torch.device(device))
    prompts = validation_requests(resolved)
    if len(prompts) < 2:
        raise ConfigError(
            f"there are {len(prompts)} validation_prompts; the path KL is a mean over at least 2"
        )
    policy.prepare([Request(resolved.negative_prompt), *prompts])  # frees the encoders
    policy.load_weights(checkpoint)
    kls = path_kls(policy, base, resolved, prompts)
    error = kls.std().item() / len(kls) ** 0.5
    return {"mean": kls.mean().item(), "stderr": error, "clips": len(kls)}


def last_checkpoint(config: Config) -> Path:
    """The checkpoint of the last iteration of a finished run."""
    checkpoints = list_checkpoints(Path(config.output_dir) / "checkpoints")
    if not checkpoints or checkpoints[-1].name != f"step-{config.max_steps:06d}":
        raise ConfigError(
            f"{config.output_dir} has no checkpoint of its last iteration, {config.max_steps}"
        )
    return checkpoints[-1]
