"""Builds a trainer from a configuration. All errors in it surface here, before the run folder is created."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from sage_grpo.algo.equalizer import equalizer, gradient_scale
from sage_grpo.config.fields import Config, ConfigError, default_dtype, resolve
from sage_grpo.config.rules import check
from sage_grpo.data.requests import Request
from sage_grpo.models import fp8
from sage_grpo.models.backbone import (
    Backbone,
    Guidance,
    Sampling,
    check_exported,
    holds_all_weights,
)
from sage_grpo.models.graphs import Graphs
from sage_grpo.models.lora import (
    LORA_FILE,
    adapted_experts,
    add_adapter,
    init_adapter,
    load_adapter,
    saved_adapters,
)
from sage_grpo.models.registry import device_for, open_backbone
from sage_grpo.parallel.fsdp import shard
from sage_grpo.parallel.ranks import Ranks, join_ranks
from sage_grpo.rewards.base import Composite
from sage_grpo.runs.folder import RunFolder
from sage_grpo.train import checkpoint, checkpoint_folders, inputs
from sage_grpo.train.algorithms.registry import build_algorithm
from sage_grpo.train.anchor import Anchor
from sage_grpo.train.clips import Gold
from sage_grpo.train.fingerprints import fingerprints, yardstick
from sage_grpo.train.optimization import Optimization, trainable_parameters
from sage_grpo.train.state import TrainState
from sage_grpo.train.trainer import Trainer
from sage_grpo.train.validation import Validation
from sage_grpo.train.windows import Windows, num_trained
from sage_grpo.worlds.registry import World, world_of

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def join_run(config: Config) -> AbstractContextManager[Ranks]:
    """Join the ranks of a run, on the device that it may use."""
    device = device_for(
        config.device, config.pretrained_model_root, config.pretrained_transformer_version
    )
    return join_ranks(
        config.start_timeout,
        sp_size=config.sp_size,
        sharded=config.enable_fsdp,
        replicas=config.dp_replicate,
        device_type=device,
    )


def build_trainer(config: Config, ranks: Ranks) -> Trainer:
    """Load a trainer, and open its run folder for writing."""
    disable_progress_bar()  # the one for loading weights
    trainer = load_trainer(config, ranks, lock=True)
    ranks.barrier()  # every rank has looked for an older run before the first one writes
    trainer.run.open(trainer.step)
    if ranks.is_first:
        checkpoint_folders.tidy(trainer.run.checkpoints, trainer.step, trainer.resumed_from)
        trainer.run.log_start(trainer.step, start_record(trainer))
    return trainer


def load_trainer(config: Config, ranks: Ranks, lock: bool = False) -> Trainer:
    """Open the model, check the configuration against it, take the run folder, and load everything else.

    Nothing is written, except a lock if asked.
    """
    backbone, config = open_model(config, ranks.device)
    check(config, ranks.world_size, len(backbone.experts))
    build_algorithm(config).schedule()  # refuses what cannot sample, before weights are loaded
    run = RunFolder(config, ranks)
    if lock:
        run.take()
    try:
        return assemble_trainer(run, backbone, config, ranks)
    except BaseException:
        run.close()
        raise


def open_model(config: Config, device: torch.device) -> tuple[Backbone, Config]:
    """The backbone of a configuration, and the configuration with what the model decides filled in."""
    backbone = open_backbone(
        config.pretrained_model_root,
        device,
        DTYPES[config.dtype or default_dtype(device.type)],
        config.prompt_cache,
        version=config.pretrained_transformer_version,
    )
    backbone.decode_gb = config.decode_gb
    backbone.compiled = config.compile
    return backbone, resolve(config, backbone, device.type)


def rollout_sampling(config: Config) -> Sampling:
    """How a resolved configuration samples rollouts, apart from the exploration noise."""
    return Sampling(
        frames=config.num_frames,
        height=config.height,
        width=config.width,
        fps=config.fps,
        shift=config.timestep_shift,
        guidance=config.guidance_scale,
        guidance_2=config.guidance_scale_2,
        num_steps=config.num_sampling_steps,
    )


def assemble_trainer(run: RunFolder, backbone: Backbone, config: Config, ranks: Ranks) -> Trainer:
    """A trainer of a checked configuration: load prompts, rewards and weights, and resume if asked."""
    # what is trained on and validated with
    world = world_of(config.pretrained_model_root)
    training_requests = inputs.train_requests(config)
    validation_requests = inputs.validation_requests(config)
    all_requests = [*training_requests, *validation_requests]
    backbone.check_requests(all_requests)
    if world:
        world.check([request.text for request in all_requests])

    # rewards live on the leader alone, because models cannot be sent
    rewards: list[Composite | None] = []
    ranks.from_leader(
        lambda: rewards.extend(
            inputs.build_rewards_of(config, training_requests, validation_requests, ranks.device)
        )
    )
    reward, holdout_reward = rewards or (None, None)

    negative = Request(config.negative_prompt)
    if backbone.encodes_ahead:
        backbone.prepare([negative, *all_requests], ranks.world_rank, ranks.world_size)
    guidance = Guidance(
        config.guidance_scale, backbone.encode([negative])[0], scale_2=config.guidance_scale_2
    )

    parameters = prepare_transformer(backbone, config, ranks)
    state = TrainState(
        optimization=Optimization(backbone.transformer, parameters, config),
        anchor=Anchor(parameters, backbone, config) if config.trust_region.anchor else None,
        controller=config.kl_controller(),
        gradient_accumulation_steps=config.gradient_accumulation_steps,
    )
    gold = gold_of(world, ranks.device) if world else None
    validation = None
    if validation_requests:
        validation = Validation(
            backbone=backbone,
            config=config,
            requests=validation_requests,
            guidance=guidance,
            reward=reward,
            holdout_reward=holdout_reward,
            gold=gold,
            ranks=ranks,
        )
    trainer = Trainer(
        config=config,
        ranks=ranks,
        backbone=backbone,
        algorithm=build_algorithm(config),
        state=state,
        requests=training_requests,
        guidance=replace(guidance, interval=config.guided_levels),
        reward=reward,
        gold=gold,
        validation=validation,
        run=run,
        fingerprints=fingerprints(
            config,
            backbone,
            training_requests=training_requests,
            validation_requests=validation_requests,
            reward=reward,
            holdout_reward=holdout_reward,
            ranks=ranks,
        ),
        world=world,
    )
    check_steps(config, trainer.windows)
    if config.resume_from_checkpoint:
        resume(trainer, config.resume_from_checkpoint)
    return trainer


def gold_of(world: World, device: torch.device) -> Gold:
    """The world's oracle, which measures clips on `device`."""

    def gold(clips: Tensor, requests: Sequence[Request]) -> dict[str, Tensor]:
        return world.gold(clips.to(device), requests)

    return gold


def resume(trainer: Trainer, wanted: str) -> None:
    """Load the checkpoint that `resume_from_checkpoint` names, if there is one."""
    path = checkpoint_folders.choose(trainer.run.path, wanted, trainer.ranks)
    if path is None:
        return
    checkpoint.load(
        trainer.state,
        config=trainer.config,
        fingerprints=trainer.fingerprints,
        ranks=trainer.ranks,
        path=path,
    )
    trainer.resumed_from = path
    check_remaining(trainer)
    if path.parent == trainer.run.checkpoints:
        trainer.saves.note_resume(trainer.step)


def check_remaining(trainer: Trainer) -> None:
    """Refuse a checkpoint from beyond the end of the run, and say so if it is the end."""
    max_steps = trainer.config.max_steps
    if trainer.step > max_steps:
        raise ConfigError(
            f"max_steps is {max_steps}, but {trainer.resumed_from} has completed {trainer.step} iterations; "
            f"raise max_steps above {trainer.step}, or resume from an earlier checkpoint"
        )
    if trainer.step == max_steps:
        trainer.ranks.log_once(
            f"all {max_steps} iterations are done; to train on, raise max_steps above that"
        )


def check_steps(config: Config, windows: Windows) -> None:
    """Require steps to train, at least one per update."""
    num_steps = num_trained(windows.size, config.timestep_fraction)
    if config.updates_per_rollout > num_steps:
        raise ConfigError(
            f"updates_per_rollout is {config.updates_per_rollout}, "
            f"but a rollout trains {num_steps} denoising step(s)"
        )


def prepare_transformer(
    backbone: Backbone, config: Config, ranks: Ranks
) -> dict[str, torch.nn.Parameter]:
    """Add an adapter, checkpointing and sharding to the transformer, then load weights; returns what is trained."""
    source = starting_point(config)
    transformer = backbone.empty_transformer()
    compute_dtype = DTYPES[config.dtype]
    master_dtype = DTYPES[config.master_weight_type]
    for parameter in transformer.parameters():
        # with LoRA the base is frozen and needs no master precision
        parameter.data = parameter.data.to(compute_dtype if config.use_lora else master_dtype)
    if config.use_lora:
        for expert in adapted_experts(transformer, config.lora_experts):
            add_adapter(
                expert,
                rank=config.lora_r,
                alpha=config.lora_alpha,
                layers=config.lora_target_modules,
                dtype=master_dtype,
            )
    trainable_parameters(transformer, config.use_lora)

    transformer.split_sequence(ranks.sequence_group)
    if config.outside_window == "fp8":
        fp8.check(backbone.device)
    recomputed = config.checkpointing_fraction if config.enable_gradient_checkpointing else 0.0
    transformer.prepare_blocks(
        recomputed=recomputed,
        keep_attention=config.keep_attention,
        compiled=config.compile,
        lossy=config.outside_window,
    )
    if ranks.shard_mesh is not None:
        shard(transformer, transformer.all_blocks, ranks.shard_mesh, compute_dtype)

    if config.use_lora:
        backbone.fill_transformer(transformer, None)
        init_adapter(transformer, config.seed)
        if source:
            load_adapter(transformer, source)
    else:
        backbone.fill_transformer(transformer, source)
    parameters = trainable_parameters(transformer, config.use_lora)
    if config.cuda_graphs and backbone.device.type == "cuda":
        Graphs(transformer)
    return parameters


def starting_point(config: Config) -> Path | None:
    """Folder of post-trained weights to start from; None to start from the model's weights."""
    flag = "init_from_checkpoint" if config.init_from_checkpoint else "pretrained_lora_path"
    value = getattr(config, flag)
    if value is None:
        return None
    folder = Path(value)
    fits = bool(saved_adapters(folder)) if config.use_lora else holds_all_weights(folder)
    if not fits:
        needed = LORA_FILE if config.use_lora else "transformer"
        raise ConfigError(
            f"{flag} {value} has no {needed}, with which a run with use_lora {config.use_lora} begins"
        )
    check_exported(folder)
    return folder


def start_record(trainer: Trainer) -> dict[str, Any]:
    """What the report needs to know about a run besides its configuration, as far as it takes no time to find out."""
    c = trainer.config
    world = trainer.world
    schedule = trainer.schedule
    exploration_std = schedule.window(trainer.windows.steps).std
    if not trainer.algorithm.explores:
        exploration_std = torch.zeros_like(exploration_std)
    kl_gradient_scale = gradient_scale(schedule) * equalizer(schedule, c.use_kl_balancing).square()
    return {
        "world": world.name if world else None,
        "perfect_is_best": bool(world) and perfect_is_best(c, trainer.reward, world),
        "fingerprints": trainer.fingerprints,
        "yardstick": yardstick(c, trainer.fingerprints),
        "trainable_parameters": sum(p.numel() for p in trainer.optimization.parameters.values()),
        "schedule": {
            "sigmas": schedule.sigmas.tolist(),
            "std": exploration_std.tolist(),
            "equalizer": equalizer(schedule, c.use_grad_balancing, c.ratio_norm).tolist(),
            "gradient_scale": gradient_scale(schedule, c.ratio_norm).tolist(),
            "kl_gradient_scale": kl_gradient_scale.tolist(),
        },
    }


def perfect_is_best(config: Config, reward: Composite, world: World) -> bool:
    """Whether no clip can score more than a perfect one: not so for rewards that the world does not know.

    A reward that is measured in another folder than the model's may come from another world.
    """
    bounded = set(getattr(world, "bounded_rewards", ()))
    of_this_world = config.reward_path is None and set(reward.rewards) <= bounded
    return of_this_world and min(reward.weights.values()) >= 0
