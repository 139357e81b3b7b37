"""What several flags must agree on."""

from collections.abc import Iterator
from importlib.util import find_spec

from sage_grpo.config.fields import Config, ConfigError
from sage_grpo.plugins import in_file
from sage_grpo.rewards.registry import ALIASES, REWARDS


def check(config: Config, world_size: int = 1) -> None:
    """Reject flags that contradict each other."""
    for find in (_rewards, _batch, _others):
        for problem in find(config, world_size // config.sp_size):
            raise ConfigError(problem)
    try:  # the strategy and its controller validate themselves
        config.trust_region  # noqa: B018
        config.kl_controller()
    except ValueError as error:
        raise ConfigError(str(error)) from error


def warnings(c: Config, ranks: int) -> Iterator[str]:
    """Settings that run but do less than they seem to."""
    if c.gpus not in (None, ranks):
        own, meant = (c.batch_size * count // c.sp_size for count in (ranks, c.gpus))
        yield f"it is meant for {c.gpus} rank(s) and there are {ranks}: an iteration has {own} clips instead of {meant}"
    name = "tail_steps" if c.tail_steps else "outside_window"
    if c.algorithm == "grpo" and getattr(c, name) != "exact" and c.sde_window.startswith("all"):
        yield f"{name} is {getattr(c, name)}, but sde_window {c.sde_window} leaves no steps to make cheaper"


def _rewards(c: Config, ranks: int) -> Iterator[str]:
    named = [("reward_model", name) for name in c.reward_model or ()]
    for flag, name in (*named, ("holdout_reward", c.holdout_reward)):
        if name is not None and name not in {*REWARDS, *ALIASES} and not in_file(name):
            yield f"{flag} names {name!r}; choose one of {', '.join(REWARDS)}, or FILE.py:NAME"
    remote = [
        name for name in (*(c.reward_model or ()), c.holdout_reward) if name in ("remote", "judge")
    ]
    if remote and c.remote_reward_url is None:
        yield f"the reward {remote[0]} needs the address of its server: give remote_reward_url"
    if c.remote_reward_url is not None and not remote:
        yield f"remote_reward_url is {c.remote_reward_url}, but no reward_model or holdout_reward is remote or judge"
    if c.stop_on_hacking and c.holdout_reward is None:
        yield "stop_on_hacking is True, but there is nothing to compare with: give holdout_reward"


def _batch(c: Config, ranks: int) -> Iterator[str]:
    batch, group, kind = c.batch_size, c.num_generations, c.sde_window.partition(":")[0]
    sizes = range(1, 4 * max(batch, group))
    valid = [n for n in sizes if not (n * ranks) % group and not (n % group and group % n)]
    if batch not in valid:
        nearest = sorted(sorted(valid, key=lambda n: abs(n - batch))[:2])
        rule = "whole groups must fit, and a rank holds whole groups or an even part of one"
        shown = (
            f"batch_size is {batch} on {ranks} data-parallel rank(s) with num_generations {group}"
        )
        yield f"{shown}: {rule}; the nearest batch_size is {' or '.join(map(str, nearest))}"
    if kind in ("random", "slide") and c.enable_fsdp and not c.gather_for_rollout:
        reason = "ranks of a sharded model would run different numbers of forwards"
        yield f"sde_window is {c.sde_window}; {reason}: set gather_for_rollout True, or take {kind}_iteration"
    if c.prompts_per_forward > 1 and c.enable_fsdp:
        yield "prompts_per_forward is above 1; ranks of a sharded model would run different forwards"
    if c.algorithm != "grpo" and c.same_init_noise:
        yield f"algorithm is {c.algorithm}, which explores by the first noise alone: set same_init_noise False"
    whole = c.sp_size == c.guidance_scale == 1 and c.outside_window == "exact"
    if c.cuda_graphs and (not whole or c.enable_fsdp or c.compile):
        yield "cuda_graphs needs guidance_scale 1, sp_size 1, outside_window exact, enable_fsdp False, compile False"
    if c.micro_batch_size and min(batch, group) % c.micro_batch_size:
        yield f"micro_batch_size is {c.micro_batch_size}; it must divide the {min(batch, group)} videos of a prompt"


def _others(c: Config, ranks: int) -> Iterator[str]:
    updates, accumulation = c.updates_per_rollout, c.gradient_accumulation_steps
    if updates > 1 and accumulation > 1:
        yield f"updates_per_rollout is {updates} and gradient_accumulation_steps {accumulation}; one of them must be 1"
    for name in ("max_steps", "save_interval", "validation_interval"):
        if (value := getattr(c, name)) % accumulation:
            yield f"{name} is {value}; it must be a multiple of gradient_accumulation_steps ({accumulation})"
    if c.pretrained_lora_path and not c.use_lora:
        yield "pretrained_lora_path needs use_lora True"
    if c.pretrained_lora_path and c.init_from_checkpoint:
        yield "pretrained_lora_path and init_from_checkpoint both name the weights to start from"
    if c.dtype not in (None, c.master_weight_type) and not c.enable_fsdp:
        both = f"dtype {c.dtype} with master_weight_type {c.master_weight_type}"
        yield f"{both} needs enable_fsdp True, which works on one GPU too; else choose one of them for both"
    if unknown := sorted(set(c.report_to) - {"tensorboard", "wandb", "none"}):
        yield f"report_to names {unknown[0]}; choose from tensorboard, wandb, none"
    if missing := [name for name in c.report_to if name != "none" and find_spec(name) is None]:
        yield f"report_to names {missing[0]}, which is not installed: pip install {missing[0]}, or leave it out"
    if c.validation_videos != 0 and find_spec("imageio_ffmpeg") is None:
        yield "validation writes videos, which needs ffmpeg: pip install imageio-ffmpeg, or set validation_videos 0"
