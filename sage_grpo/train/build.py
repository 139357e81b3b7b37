"""Builds a trainer from a configuration. All errors in it surface here, before the run folder is created."""

import hashlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from sage_grpo.algo.equalizer import equalizer, gradient_scale
from sage_grpo.config.fields import Config, ConfigError, default_dtype, resolve
from sage_grpo.config.rules import check
from sage_grpo.data.requests import Request, read_requests
from sage_grpo.files.manifest import file_sha256
from sage_grpo.models import fp8
from sage_grpo.models.backbone import (
    Backbone,
    Guidance,
    Sampling,
    check_exported,
    holds_all_weights,
)
from sage_grpo.models.graphs import Graphs
from sage_grpo.models.lora import LORA_FILE, add_adapter, init_adapter, load_adapter
from sage_grpo.models.registry import device_for, open_backbone
from sage_grpo.parallel.fsdp import shard
from sage_grpo.parallel.ranks import Ranks, join_ranks
from sage_grpo.plugins import in_file
from sage_grpo.rewards.base import Composite, Setup
from sage_grpo.rewards.build import build_rewards
from sage_grpo.rewards.registry import DEFAULT as DEFAULT_REWARD
from sage_grpo.runs.folder import RunFolder
from sage_grpo.train import checkpoint
from sage_grpo.train.optimization import Anchor, Optimization, trainable_parameters
from sage_grpo.train.rollout import Windows, num_trained
from sage_grpo.train.trainer import Trainer
from sage_grpo.train.update import sampler_of
from sage_grpo.train.validation import Validation, validation_sampling
from sage_grpo.worlds.registry import World, drawn, world_of

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
DRAWN = 64  # rendered clips whose scores are the goal
PROMPTS = Path(__file__).parents[2] / "assets" / "prompts"


def join_run(config: Config) -> AbstractContextManager[Ranks]:
    """Join the ranks of a run, on the device that it may use."""
    device = device_for(
        config.device, config.pretrained_model_root, config.pretrained_transformer_version
    )
    return join_ranks(
        config.start_timeout, config.sp_size, config.enable_fsdp, config.dp_replicate, device
    )


def build_trainer(config: Config, ranks: Ranks) -> Trainer:
    """Assemble a trainer and open its run folder."""
    disable_progress_bar()  # the one for loading weights
    trainer = assemble(config, ranks, lock=True)
    ranks.barrier()  # every rank has looked for an older run before the first one writes
    trainer.run.open(trainer.step)
    if ranks.first:
        checkpoint.tidy(trainer.run.checkpoints, trainer.step, trainer.resumed_from)
        trainer.run.log_start(trainer.step, about(trainer, world_of(config.pretrained_model_root)))
    return trainer


def rollout_sampling(c: Config) -> Sampling:
    """How a resolved configuration samples rollouts, but for the exploration noise."""
    size = {"frames": c.num_frames, "height": c.height, "width": c.width, "fps": c.fps}
    return Sampling(
        **size, shift=c.timestep_shift, guidance=c.guidance_scale, num_steps=c.num_sampling_steps
    )


def open_model(config: Config, device: torch.device) -> tuple[Backbone, Config]:
    """The backbone of a configuration, and the configuration with what the model decides filled in."""
    dtype, version = (
        DTYPES[config.dtype or default_dtype(device.type)],
        config.pretrained_transformer_version,
    )
    backbone = open_backbone(
        config.pretrained_model_root, device, dtype, config.prompt_cache, version=version
    )
    backbone.decode_gb, backbone.compiled = config.decode_gb, config.compile
    return backbone, resolve(config, backbone, device.type)


def assemble(config: Config, ranks: Ranks, lock: bool = False) -> Trainer:
    """Load the model, prompts and rewards, check them, resume if asked. Nothing is written, except a lock if asked."""
    backbone, config = open_model(config, ranks.device)
    check(config, ranks.world)
    sampler_of(config)  # refuses what cannot sample, before weights are loaded
    run = RunFolder(config, ranks)
    if lock:
        run.take()
    try:
        return fill(run, backbone, config, ranks)
    except BaseException:
        run.close()
        raise


def fill(run: RunFolder, backbone: Backbone, config: Config, ranks: Ranks) -> Trainer:
    """A trainer with all its parts, for a checked configuration."""
    world, held_out = world_of(config.pretrained_model_root), held_out_prompts(config)
    train = prompts_of(config.train_prompts, Path(config.pretrained_model_root), "train")
    train = [prompt.sized(config.height, config.width) for prompt in train]
    requests = [*train, *held_out]
    backbone.check_requests(requests)
    if world:
        world.check([request.text for request in requests])
    built: list[Composite | None] = []  # on the leader alone: models cannot be sent
    ranks.from_leader(lambda: built.extend(build_rewards_of(config, requests, ranks.device)))
    reward, holdout = built or (None, None)
    negative = Request(config.negative_prompt)
    # frees the encoders before the transformer needs their memory
    backbone.prepare([negative, *requests], ranks.world_rank, ranks.world)
    guidance = Guidance(config.guidance_scale, backbone.encode([negative])[0])
    parameters = prepare_transformer(backbone, config, ranks)
    gold = world and (lambda clips, asked: world.gold(clips.to(ranks.device), asked))
    shared = {
        "config": config,
        "ranks": ranks,
        "backbone": backbone,
        "guidance": guidance,
        "gold": gold,
    }
    shared |= {"reward": reward}
    trainer = Trainer(
        **shared,
        optimization=Optimization(backbone.transformer, parameters, config),
        anchor=Anchor(parameters, backbone, config) if config.trust_region.anchor else None,
        prompts=train,
        validation=Validation(**shared, prompts=held_out, holdout=holdout) if held_out else None,
        run=run,
    )
    check_steps(config, trainer.windows)
    trainer.fingerprints = fingerprints(config, backbone, train, ranks)
    if config.resume_from_checkpoint and (
        path := checkpoint.choose(run.path, config.resume_from_checkpoint, ranks)
    ):
        checkpoint.load(trainer, path)
        trainer.resumed_from = path
        if path.parent == run.checkpoints:
            trainer.saves.resumed(trainer.step)
    return trainer


def fingerprints(
    config: Config, backbone: Backbone, prompts: Sequence[Request], ranks: Ranks
) -> dict[str, Any]:
    """What a run was started with and a resumed one must have too, or be told that it has not."""
    weights = ranks.together(lambda: backbone.fingerprint() if ranks.first else "")[0]
    texts = hashlib.sha256(
        repr([(str(prompt), prompt.seed) for prompt in prompts]).encode()
    ).hexdigest()[:8]
    names = [*(config.reward_model or ()), config.holdout_reward, config.sde_type]
    code = {
        file: file_sha256(Path(file))[:8]
        for file in (name.rpartition(":")[0] for name in names if in_file(name))
    }
    found = {
        "base weights": weights,
        "training prompts": f"{len(prompts)}, {texts}",
        "ranks": ranks.world,
    }
    return found | {"plug-ins": code}


def check_steps(config: Config, windows: Windows) -> None:
    """Require steps to train, at least one per update."""
    steps, updates = num_trained(windows.size, config.timestep_fraction), config.updates_per_rollout
    if updates > steps:
        raise ConfigError(
            f"updates_per_rollout is {updates}, but a rollout trains {steps} denoising step(s)"
        )


def prompts_of(files: Sequence[str] | None, folder: Path, kind: str) -> list[Request]:
    """Prompts from `files`, else from the model folder; for real-world models without any, from the bundled file."""
    if files is None:
        own = folder / f"prompts_{kind}.txt"
        if not own.is_file() and world_of(folder):
            if kind == "valid":
                return []
            raise ConfigError(
                f"the model folder has no {own.name}; name a prompt file with --train_prompts"
            )
        files = (str(own if own.is_file() else PROMPTS / f"{kind}_long.csv"),)
    prompts = [prompt for file in files for prompt in read_requests(file)]
    return prompts if len(files) == 1 else [replace(p, index=i) for i, p in enumerate(prompts)]


def held_out_prompts(config: Config) -> list[Request]:
    """The prompts of a validation."""
    own = validation_sampling(config)
    prompts = prompts_of(config.validation_prompts, Path(config.pretrained_model_root), "valid")
    return [
        prompt.sized(own.height, own.width) for prompt in prompts[: config.num_validation_prompts]
    ]


def build_composite(
    config: Config, names: Sequence[str], weights: dict[str, Any] | None, device: torch.device
) -> Composite:
    """Combine the named rewards; weights that nobody gave fit themselves to the scores."""
    timeout = config.collective_timeout / 2
    where = (config.remote_reward_url, timeout, config.start_timeout)
    where += ((config.judge_model, config.judge_rubric, config.judge_cache),)
    rewards = build_rewards(names, Setup(reward_folder(config), device, config.reward_fps, *where))
    if weights == (
        default := Config().reward_weights
    ):  # VideoAlign's; the single score of another reward counts 1
        weights = {
            name: {s: default[s] for s in r.names if s in default} or 1.0
            for name, r in rewards.items()
        }
    return Composite(rewards, weights, config.reward_batch_size, timeout)


def build_rewards_of(
    config: Config, requests: Sequence[Request], device: torch.device
) -> tuple[Composite, Composite | None]:
    """The training reward and the held-out reward, if any."""
    reward = build_composite(config, reward_names(config), config.reward_weights, device)
    reward.check(requests)
    return reward, build_composite(
        config, (config.holdout_reward,), None, device
    ) if config.holdout_reward else None


def reward_names(config: Config) -> tuple[str, ...]:
    """The rewards that were asked for; else the learned one, or without it that of the model's world."""
    world = None if reward_folder(config).is_dir() else world_of(config.pretrained_model_root)
    return config.reward_model or (world.reward if world else DEFAULT_REWARD,)


def reward_folder(config: Config) -> Path:
    return Path(config.reward_path or Path(config.pretrained_model_root) / "VideoReward")


def prepare_transformer(
    backbone: Backbone, config: Config, ranks: Ranks
) -> dict[str, torch.nn.Parameter]:
    """Add an adapter, checkpointing and sharding to the transformer, then load weights; returns what is trained."""
    source = starting_point(config)
    transformer, master = backbone.empty_transformer(), DTYPES[config.master_weight_type]
    for parameter in transformer.parameters():
        parameter.data = parameter.data.to(DTYPES[config.dtype] if config.use_lora else master)
    if config.use_lora:
        add_adapter(
            transformer, config.lora_r, config.lora_alpha, config.lora_target_modules, master
        )
    trainable_parameters(transformer, config.use_lora)
    transformer.split_sequence(ranks.sequence_group)
    if config.outside_window == "fp8":
        fp8.check(backbone.device)
    recomputed = config.checkpointing_fraction if config.enable_gradient_checkpointing else 0.0
    transformer.prepare_blocks(
        recomputed, config.keep_attention, config.compile, config.outside_window
    )
    if ranks.shards is not None:
        shard(transformer, transformer.all_blocks, ranks.shards, DTYPES[config.dtype])
    backbone.fill_transformer(transformer, None if config.use_lora else source)
    if config.use_lora:
        init_adapter(transformer, config.seed)
        if source:
            load_adapter(transformer, source)
    trained = trainable_parameters(transformer, config.use_lora)
    if config.cuda_graphs and backbone.device.type == "cuda":
        Graphs(transformer)
    return trained


def starting_point(config: Config) -> Path | None:
    """Folder of post-trained weights to start from; None to start from the model's weights."""
    name = "init_from_checkpoint" if config.init_from_checkpoint else "pretrained_lora_path"
    if (value := getattr(config, name)) is None:
        return None
    fits = (
        (Path(value) / LORA_FILE).is_file() if config.use_lora else holds_all_weights(Path(value))
    )
    if not fits:
        needed = LORA_FILE if config.use_lora else "transformer"
        raise ConfigError(
            f"{name} {value} has no {needed}, with which a run with use_lora {config.use_lora} begins"
        )
    check_exported(Path(value))
    return Path(value)


def perfect_scores(trainer: Trainer, world: World) -> dict[str, float]:
    """Mean scores of clips that show exactly what held-out prompts say: about the most that training can reach."""
    c, prompts = (
        trainer.config,
        trainer.validation.prompts if trainer.validation else trainer.prompts,
    )
    clips, requests = drawn(world, prompts[:DRAWN], c.num_frames, c.height, c.width, c.seed)
    found = trainer.reward.score(clips, requests, c.fps)
    return {
        name: values.mean().item()
        for name, values in (found.named | {"total": found.total}).items()
    }


def about(trainer: Trainer, world: World | None) -> dict[str, Any]:
    """What the report needs to know about a run besides its configuration."""
    schedule, c = trainer.sampler, trainer.config
    return {
        "world": world.name if world else None,
        "perfect": perfect_scores(trainer, world) if world else None,
        "vae_floor": world.vae_floor(trainer.backbone) if world else None,
        "fingerprints": trainer.fingerprints,
        "trainable_parameters": sum(p.numel() for p in trainer.optimization.parameters.values()),
        "schedule": {
            "sigmas": schedule.sigmas.tolist(),
            "std": (
                schedule.window(trainer.windows.steps).std * trainer.algorithm.explores
            ).tolist(),
            "equalizer": equalizer(schedule, c.use_grad_balancing, c.ratio_norm).tolist(),
            "gradient_scale": gradient_scale(schedule, c.ratio_norm).tolist(),
        },
    }
