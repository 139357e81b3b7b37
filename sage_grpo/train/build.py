"""From a configuration to a trainer. Everything that can be wrong is found here, before the run folder appears."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from sage_grpo.algo.equalizer import equalizer, gradient_scale
from sage_grpo.algo.sde import Schedule
from sage_grpo.config import Config, ConfigError, check, resolve
from sage_grpo.data.prompts import Prompt, read_prompts
from sage_grpo.models.hunyuan15 import Hunyuan15
from sage_grpo.models.layout import sampling_defaults
from sage_grpo.models.lora import ANCHOR, POLICY, add_adapters, load_adapter
from sage_grpo.models.policy import Conditioning
from sage_grpo.parallel.ranks import Ranks
from sage_grpo.rewards.base import build_rewards, perfect_scores
from sage_grpo.rewards.composite import Composite
from sage_grpo.train import checkpoint
from sage_grpo.train.anchor import AdapterAnchor, Anchor, FullAnchor
from sage_grpo.train.optimization import Optimization, trainable_parameters
from sage_grpo.train.rollout import Guidance, num_trained
from sage_grpo.train.run import Run
from sage_grpo.train.trainer import Trainer
from sage_grpo.train.validation import Validation
from sage_grpo.worlds import check_prompts, world_of
from sage_grpo.worlds.quality import gold, vae_floor

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
GOLD = {"shapes": gold}


def build_trainer(config: Config, ranks: Ranks) -> Trainer:
    """A trainer whose run folder is open."""
    trainer = assemble(config, ranks)
    trainer.run.open()
    trainer.run.introduce(trainer.step, about(trainer, world_of(trainer.policy.folder)))
    return trainer


def assemble(config: Config, ranks: Ranks) -> Trainer:
    """Load the model, prompts and rewards, check them, resume if asked. Nothing is written."""
    folder = Path(config.pretrained_model_root)
    config = resolve(config, sampling_defaults(folder), ranks.device.type)
    check(config, ranks.count)
    run = Run(config, ranks)
    policy = Hunyuan15(folder, ranks.device, DTYPES[config.dtype])
    world = world_of(folder)
    train = prompts_of(config.train_prompts, folder / "prompts_train.txt", "train_prompts")
    held_out = prompts_of(config.validation_prompts, folder / "prompts_valid.txt", None)
    texts = [prompt.text for prompt in (*train, *held_out)]
    check_prompts(folder, texts)
    reward = build_composite(config, config.reward_model or (world or "videoalign",), config.reward_weights)
    reward.check(texts)
    parameters = prepare_transformer(policy, config)
    conditions = encode(policy, [config.negative_prompt, *(prompt.text for prompt in held_out)], ranks)
    holdout = build_composite(config, (config.holdout_reward,), None) if config.holdout_reward else None
    seen = (policy, config, held_out, conditions, reward, holdout, GOLD.get(world), ranks)
    trainer = Trainer(
        config=config,
        ranks=ranks,
        policy=policy,
        optimization=Optimization(parameters, config),
        anchor=build_anchor(policy, config),
        prompts=train,
        guidance=Guidance(config.guidance_scale, conditions[config.negative_prompt]),
        reward=reward,
        gold=GOLD.get(world),
        validation=Validation(*seen) if held_out else None,
        run=run,
    )
    check_steps(config, trainer.schedule())
    if config.resume_from_checkpoint:
        checkpoint.load(trainer, checkpoint.choose(run.folder, config.resume_from_checkpoint))
    return trainer


def check_steps(config: Config, schedule: Schedule) -> None:
    """There must be steps to train, at least one for each update."""
    equalizer(schedule)
    steps = num_trained(schedule.stochastic, config.timestep_fraction)
    if config.updates_per_rollout > steps:
        raise ConfigError(
            f"updates_per_rollout is {config.updates_per_rollout}, but a rollout trains {steps} denoising step(s)"
        )


def prompts_of(files: Sequence[str] | None, own: Path, needed_by: str | None) -> list[Prompt]:
    """The prompts of several files, else of the model's own file, which may be absent unless a flag needs it."""
    if files is None:
        if not own.is_file():
            if needed_by is None:
                return []
            raise ConfigError(f"the model folder has no {own.name}; name a prompt file with --{needed_by}")
        files = (str(own),)
    prompts = [prompt for file in files for prompt in read_prompts(file)]
    return prompts if len(files) == 1 else [Prompt(p.text, i, p.seed) for i, p in enumerate(prompts)]


def build_composite(config: Config, names: Sequence[str], weights: dict[str, Any] | None) -> Composite:
    """The named rewards; without weights every score counts once."""
    rewards = build_rewards(names)
    if weights is None:
        weights = {name: dict.fromkeys(reward.names, 1.0) for name, reward in rewards.items()}
    return Composite(rewards, weights, config.reward_batch_size, config.collective_timeout / 2)


def prepare_transformer(policy: Hunyuan15, config: Config) -> dict[str, torch.nn.Parameter]:
    """Adapters, checkpointing, precision; returns what is trained."""
    transformer, master = policy.transformer, DTYPES[config.master_weight_type]
    if config.use_lora:
        held = config.trust_region.anchor is not None
        add_adapters(
            transformer, config.lora_r, config.lora_alpha, config.lora_target_modules, config.seed, master, held
        )
        if config.pretrained_lora_path:
            for adapter in (POLICY, ANCHOR)[: 1 + held]:
                load_adapter(transformer, Path(config.pretrained_lora_path), adapter)
    elif transformer.dtype != master:
        transformer.to(master)
    if config.enable_gradient_checkpointing:
        transformer.checkpoint_blocks(config.checkpointing_fraction)
    return trainable_parameters(transformer, config.use_lora)


def build_anchor(policy: Hunyuan15, config: Config) -> Anchor | None:
    kind = config.trust_region.anchor
    if kind is None:
        return None
    every = config.update_ref_model_step if kind == "moving" else None
    return AdapterAnchor(policy, every) if config.use_lora else FullAnchor(policy, every, config.reference_mode_offload)


def encode(policy: Hunyuan15, texts: Sequence[str], ranks: Ranks) -> dict[str, Conditioning]:
    """The conditioning of each distinct text."""
    distinct = list(dict.fromkeys(texts))
    return {text: cond.to(ranks.device) for text, cond in zip(distinct, policy.encode(distinct), strict=True)}


def about(trainer: Trainer, world: str | None) -> dict[str, Any]:
    """What the report needs to know of a run beside its configuration."""
    schedule, reward = trainer.schedule(), trainer.reward
    perfect = {name: perfect_scores(name) for name in reward.rewards}
    whole = perfect[next(iter(perfect))] if len(perfect) == 1 else None
    return {
        "world": world,
        "perfect": whole | {"total": reward.total(whole)} if whole else None,
        "vae_floor": {"distance": vae_floor(trainer.policy)} if world else None,
        "trainable_parameters": sum(p.numel() for p in trainer.optimization.parameters.values()),
        "schedule": {
            "sigmas": schedule.sigmas.tolist(),
            "std": schedule.std.tolist(),
            "equalizer": equalizer(schedule, trainer.config.use_grad_balancing, trainer.config.ratio_norm).tolist(),
            "gradient_scale": gradient_scale(schedule, trainer.config.ratio_norm).tolist(),
        },
    }
