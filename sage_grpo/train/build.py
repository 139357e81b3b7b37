"""From a configuration to a trainer. Everything that can be wrong is found here, before the run folder appears."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from sage_grpo.algo.equalizer import equalizer, gradient_scale
from sage_grpo.algo.sde import Schedule
from sage_grpo.config import Config, ConfigError, check, resolve
from sage_grpo.data.prompts import Prompt, read_prompts
from sage_grpo.models.hunyuan15 import Hunyuan15, check_exported
from sage_grpo.models.layout import sampling_defaults
from sage_grpo.models.lora import ANCHOR, LORA_FILE, POLICY, add_adapters, init_adapters, load_adapter
from sage_grpo.parallel.fsdp import shard
from sage_grpo.parallel.ranks import Ranks
from sage_grpo.rewards.base import Setup, build_rewards
from sage_grpo.rewards.composite import Composite
from sage_grpo.rewards.shapes import perfect_scores
from sage_grpo.train import checkpoint
from sage_grpo.train.anchor import Anchor, adapter_anchor, full_anchor
from sage_grpo.train.optimization import Optimization, trainable_parameters
from sage_grpo.train.rollout import Guidance, num_trained
from sage_grpo.train.run import Run
from sage_grpo.train.trainer import Trainer
from sage_grpo.train.validation import Validation
from sage_grpo.worlds import check_prompts, world_of
from sage_grpo.worlds.quality import gold, vae_floor

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
GOLD = {"shapes": gold}
PROMPTS = Path(__file__).parents[2] / "assets" / "prompts"


def build_trainer(config: Config, ranks: Ranks) -> Trainer:
    """A trainer whose run folder is open."""
    disable_progress_bar()  # that of loading weights
    trainer = assemble(config, ranks)
    trainer.run.open(trainer.step)
    if ranks.first:
        trainer.run.introduce(trainer.step, about(trainer, world_of(trainer.policy.folder)))
    return trainer


def assemble(config: Config, ranks: Ranks) -> Trainer:
    """Load the model, prompts and rewards, check them, resume if asked. Nothing is written."""
    folder, version = Path(config.pretrained_model_root), config.pretrained_transformer_version
    config = resolve(config, sampling_defaults(folder, version), ranks.device.type)
    check(config, ranks.world)
    run = Run(config, ranks)
    policy = Hunyuan15(folder, ranks.device, DTYPES[config.dtype], config.prompt_cache, version=version)
    world = world_of(folder)
    train = prompts_of(config.train_prompts, folder, "train")
    held_out = prompts_of(config.validation_prompts, folder, "valid")
    texts = [prompt.text for prompt in (*train, *held_out)]
    check_prompts(folder, texts)
    reward, holdout = ranks.on_leader(lambda: build_rewards_of(config, world, texts, ranks.device)) or (None, None)
    policy.prompt_encoder.prepare([config.negative_prompt, *texts], ranks.world_rank, ranks.world)
    policy.release_text_encoders()  # before the transformer needs their place
    guidance = Guidance(config.guidance_scale, policy.encode([config.negative_prompt])[0])
    parameters = prepare_transformer(policy, config, ranks)
    oracle = GOLD.get(world) and (lambda clips, texts: GOLD[world](clips.to(ranks.device), texts))
    seen = (policy, config, held_out, guidance, reward, holdout, oracle, ranks)
    trainer = Trainer(
        config=config,
        ranks=ranks,
        policy=policy,
        optimization=Optimization(parameters, config),
        anchor=build_anchor(policy, config, parameters),
        prompts=train,
        guidance=guidance,
        reward=reward,
        gold=oracle,
        validation=Validation(*seen) if held_out else None,
        run=run,
    )
    check_steps(config, trainer.schedule())
    if config.resume_from_checkpoint and (path := checkpoint.choose(run.folder, config.resume_from_checkpoint, ranks)):
        checkpoint.load(trainer, path)
        if path.parent == run.folder / "checkpoints":
            trainer.saved_step = trainer.step
    return trainer


def check_steps(config: Config, schedule: Schedule) -> None:
    """There must be steps to train, at least one for each update."""
    equalizer(schedule)
    steps = num_trained(schedule.stochastic, config.timestep_fraction)
    if config.updates_per_rollout > steps:
        raise ConfigError(
            f"updates_per_rollout is {config.updates_per_rollout}, but a rollout trains {steps} denoising step(s)"
        )


def prompts_of(files: Sequence[str] | None, folder: Path, kind: str) -> list[Prompt]:
    """The prompts of several files, else of the model's own file; ours where a model of the real world has none."""
    if files is None:
        own = folder / f"prompts_{kind}.txt"
        if not own.is_file() and world_of(folder):
            if kind == "valid":
                return []
            raise ConfigError(f"the model folder has no {own.name}; name a prompt file with --train_prompts")
        files = (str(own if own.is_file() else PROMPTS / f"{kind}.csv"),)
    prompts = [prompt for file in files for prompt in read_prompts(file)]
    return prompts if len(files) == 1 else [Prompt(p.text, i, p.seed) for i, p in enumerate(prompts)]


def build_composite(
    config: Config, names: Sequence[str], weights: dict[str, Any] | None, device: torch.device
) -> Composite:
    """The named rewards; without weights every score counts once."""
    path = Path(config.reward_path or Path(config.pretrained_model_root) / "VideoReward")
    timeout = config.collective_timeout / 2
    rewards = build_rewards(names, Setup(path, device, config.reward_fps, config.remote_reward_url, timeout))
    if weights is None:
        weights = {name: dict.fromkeys(reward.names, 1.0) for name, reward in rewards.items()}
    return Composite(rewards, weights, config.reward_batch_size, timeout)


def build_rewards_of(
    config: Config, world: str | None, texts: Sequence[str], device: torch.device
) -> tuple[Composite, Composite | None]:
    """The reward that is trained on, and the one that is held out."""
    names = config.reward_model or (world or "videoalign",)
    reward = build_composite(config, names, config.reward_weights, device)
    reward.check(texts)
    return reward, build_composite(config, (config.holdout_reward,), None, device) if config.holdout_reward else None


def prepare_transformer(policy: Hunyuan15, config: Config, ranks: Ranks) -> dict[str, torch.nn.Parameter]:
    """The transformer with adapters, checkpointing, sharding and, at last, weights; returns what is trained."""
    source = starting_point(config)
    transformer, master = policy.empty_transformer(), DTYPES[config.master_weight_type]
    for parameter in transformer.parameters():
        parameter.data = parameter.data.to(DTYPES[config.dtype] if config.use_lora else master)
    held = config.trust_region.anchor is not None
    if config.use_lora:
        add_adapters(transformer, config.lora_r, config.lora_alpha, config.lora_target_modules, master, held)
    trainable_parameters(transformer, config.use_lora)
    transformer.split_sequence(ranks.sequence_group)
    recomputed = config.checkpointing_fraction if config.enable_gradient_checkpointing else 0.0
    transformer.prepare_blocks(recomputed, config.keep_attention, config.compile)
    if ranks.shards is not None:
        shard(transformer, transformer.transformer_blocks, ranks.shards, DTYPES[config.dtype])
    policy.fill_transformer(transformer, None if config.use_lora else source)
    if config.use_lora:
        init_adapters(transformer, config.seed)
        for adapter in (POLICY, ANCHOR)[: 1 + held] if source else ():
            load_adapter(transformer, source, adapter)
    return trainable_parameters(transformer, config.use_lora)


def starting_point(config: Config) -> Path | None:
    """The folder of trained weights that a run begins with, if it is not the model's own."""
    name = "init_from_checkpoint" if config.init_from_checkpoint else "pretrained_lora_path"
    if (value := getattr(config, name)) is None:
        return None
    needed = LORA_FILE if config.use_lora else "transformer"
    if not (Path(value) / needed).exists():
        raise ConfigError(f"{name} {value} has no {needed}, with which a run with use_lora {config.use_lora} begins")
    check_exported(Path(value))
    return Path(value)


def build_anchor(policy: Hunyuan15, config: Config, parameters: dict[str, torch.nn.Parameter]) -> Anchor | None:
    kind = config.trust_region.anchor
    if kind is None:
        return None
    every = config.update_ref_model_step if kind == "moving" else None
    if config.use_lora:
        return adapter_anchor(policy.transformer, every)
    home = torch.device("cpu") if config.reference_mode_offload else policy.device
    return full_anchor(parameters, every, DTYPES[config.dtype], home)


def about(trainer: Trainer, world: str | None) -> dict[str, Any]:
    """What the report needs to know of a run beside its configuration."""
    schedule, reward = trainer.schedule(), trainer.reward
    perfect = perfect_scores() if list(reward.rewards) == ["shapes"] else None
    return {
        "world": world,
        "perfect": perfect | {"total": reward.total(perfect)} if perfect else None,
        "vae_floor": {"distance": vae_floor(trainer.policy)} if world else None,
        "trainable_parameters": sum(p.numel() for p in trainer.optimization.parameters.values()),
        "schedule": {
            "sigmas": schedule.sigmas.tolist(),
            "std": schedule.std.tolist(),
            "equalizer": equalizer(schedule, trainer.config.use_grad_balancing, trainer.config.ratio_norm).tolist(),
            "gradient_scale": gradient_scale(schedule, trainer.config.ratio_norm).tolist(),
        },
    }
