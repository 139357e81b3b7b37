"""Checks across flags of a configuration, and warnings about settings that do less than they seem to."""

from importlib.util import find_spec

from sage_grpo.config import Config, ConfigError
from sage_grpo.plugins import in_file
from sage_grpo.rewards import ALIASES, REWARDS


def check(config: Config, world_size: int = 1) -> None:
    """Reject flags that contradict each other."""
    _check_rewards(config)
    _check_batch(config, world_size // config.sp_size)
    updates, accumulation = config.updates_per_rollout, config.gradient_accumulation_steps
    if updates > 1 and accumulation > 1:
        raise ConfigError(
            f"updates_per_rollout is {updates} and gradient_accumulation_steps {accumulation}; one of them must be 1"
        )
    for name in ("max_steps", "save_interval", "validation_interval"):
        if (value := getattr(config, name)) % accumulation:
            raise ConfigError(
                f"{name} is {value}; it must be a multiple of gradient_accumulation_steps ({accumulation})"
            )
    if config.pretrained_lora_path and not config.use_lora:
        raise ConfigError("pretrained_lora_path needs use_lora True")
    if config.pretrained_lora_path and config.init_from_checkpoint:
        raise ConfigError("pretrained_lora_path and init_from_checkpoint both name the weights to start from")
    if config.dtype not in (None, config.master_weight_type) and not config.enable_fsdp:
        raise ConfigError(
            f"dtype {config.dtype} with master_weight_type {config.master_weight_type} needs enable_fsdp True, which "
            f"works on one GPU too; else choose one of them for both"
        )
    if unknown := sorted(set(config.report_to) - {"tensorboard", "wandb", "none"}):
        raise ConfigError(f"report_to names {unknown[0]}; choose from tensorboard, wandb, none")
    if missing := [name for name in config.report_to if name != "none" and find_spec(name) is None]:
        raise ConfigError(
            f"report_to names {missing[0]}, which is not installed: pip install {missing[0]}, or leave it out"
        )
    if config.validation_videos != 0 and find_spec("imageio_ffmpeg") is None:
        raise ConfigError(
            "validation writes videos, which needs ffmpeg: pip install imageio-ffmpeg, or set validation_videos 0"
        )
    try:  # the strategy and its controller validate themselves
        config.trust_region  # noqa: B018
        config.kl_controller()
    except ValueError as error:
        raise ConfigError(str(error)) from error


def warnings(config: Config, ranks: int) -> list[str]:
    """Settings that run but do less than they seem to."""
    found = []
    if config.gpus not in (None, ranks):
        found.append(
            f"the configuration is for {config.gpus} rank(s) and there are {ranks}: an iteration has "
            f"{config.batch_size * ranks // config.sp_size} clips instead of "
            f"{config.batch_size * config.gpus // config.sp_size}"
        )
    if (config.tail_steps or config.outside_window != "exact") and config.sde_window.startswith("all"):
        name = "tail_steps" if config.tail_steps else "outside_window"
        found.append(
            f"{name} is {getattr(config, name)}, but sde_window {config.sde_window} leaves no steps to make cheaper"
        )
    return found


def _check_rewards(config: Config) -> None:
    named = [("reward_model", name) for name in config.reward_model or ()]
    for flag, name in (*named, ("holdout_reward", config.holdout_reward)):
        if name is not None and name not in {*REWARDS, *ALIASES} and not in_file(name):
            raise ConfigError(f"{flag} names {name!r}; choose one of {', '.join(REWARDS)}, or FILE.py:NAME")
    remote = "remote" in (*(config.reward_model or ()), config.holdout_reward)
    if remote and config.remote_reward_url is None:
        raise ConfigError("the reward remote needs the address of its server: give remote_reward_url")
    if config.remote_reward_url is not None and not remote:
        raise ConfigError(
            f"remote_reward_url is {config.remote_reward_url}, but neither reward_model nor holdout_reward names remote"
        )
    if config.stop_on_hacking and config.holdout_reward is None:
        raise ConfigError("stop_on_hacking is True, but there is nothing to compare with: give holdout_reward")


def _check_batch(config: Config, ranks: int) -> None:
    batch, group = config.batch_size, config.num_generations
    if (batch * ranks) % group or (batch % group and group % batch):
        valid = [
            n for n in range(1, 4 * max(batch, group)) if not (n * ranks) % group and not (n % group and group % n)
        ]
        nearest = sorted(sorted(valid, key=lambda n: abs(n - batch))[:2])
        raise ConfigError(
            f"batch_size is {batch} on {ranks} data-parallel rank(s) with num_generations {group}: whole groups must "
            f"fit, and a rank holds whole groups or an even part of one; the nearest batch_size is "
            f"{' or '.join(map(str, nearest))}"
        )
    slice_size = min(batch, group)
    kind = config.sde_window.partition(":")[0]
    if kind in ("random", "slide") and config.enable_fsdp and not config.gather_for_rollout:
        raise ConfigError(
            f"sde_window is {config.sde_window}; ranks of a sharded model would run different numbers of forwards: set "
            f"gather_for_rollout True, or take {kind}_iteration"
        )
    if config.prompts_per_forward > 1 and config.enable_fsdp:
        raise ConfigError("prompts_per_forward is above 1; ranks of a sharded model would run different forwards")
    if config.micro_batch_size and slice_size % config.micro_batch_size:
        raise ConfigError(
            f"micro_batch_size is {config.micro_batch_size}; it must divide the {slice_size} videos of a prompt"
        )
