"""Every flag of `post_train.py`: its default, its meaning, its range, and what several of them must agree on.

`flags.py` reads them from a YAML file and the command line.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import yaml

from sage_grpo.algo.grpo import ADVANTAGE_STDS
from sage_grpo.algo.sde import SDES
from sage_grpo.algo.trust_region import ESTIMATORS, FEEDBACKS, SCHEDULES, KLController, TrustRegion, trust_region
from sage_grpo.models.layout import DEFAULT_VERSION
from sage_grpo.models.policy import Sampling
from sage_grpo.rewards.base import ALIASES, REWARDS

ATTENTION = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
MOST_VIDEOS = 65536


class ConfigError(ValueError):
    """A configuration that cannot run, in one sentence; what would break the line or the terminal is escaped."""

    def __init__(self, text: str) -> None:
        super().__init__("".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text))


def flag(
    default: Any,
    help: str,
    *,
    choices: Sequence[str] | None = None,
    low: float = -math.inf,
    high: float = math.inf,
    above: float = -math.inf,
) -> Any:
    """A field of `Config`: `low` and `high` are allowed values, `above` is not."""
    metadata = {"help": help, "choices": choices, "low": low, "high": high, "above": above}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: dict(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Config:
    """What a run is. None means: the model's own value, filled in by `resolve`, unless the help says otherwise."""

    # model and data
    pretrained_model_root: str = flag("assets/tiny", "model folder in the layout of diffusers or of Tencent")
    pretrained_transformer_version: str = flag(DEFAULT_VERSION, "sub-folder of transformer/ in Tencent's layout")
    output_dir: str = flag("./outputs", "run folder")
    overwrite: bool = flag(False, "replace the run that output_dir holds")
    train_prompts: tuple[str, ...] | None = flag(None, "prompt files, .txt, .csv or .jsonl (alias train_video_csv)")
    prompt_cache: str | None = flag(None, "folder that keeps prompt embeddings between runs; default: host memory")
    # optimization
    learning_rate: float = flag(1e-5, "after the warm-up", low=0)
    weight_decay: float = flag(0.01, "decoupled", low=0)
    max_grad_norm: float = flag(1.0, "the gradient is clipped to this norm", above=0)
    warmup_steps: int = flag(0, "linear warm-up of the learning rate, in optimizer steps", low=0)
    optimizer: str = flag(
        "adamw", "muon: 2-D weights of the blocks by Muon, the rest by AdamW", choices=("adamw", "muon")
    )
    max_steps: int = flag(10000, "GRPO iterations, one rollout batch each", low=0)
    batch_size: int = flag(2, "videos per data-parallel rank and rollout", low=1, high=MOST_VIDEOS)
    num_generations: int = flag(4, "videos per prompt: the group", low=2, high=MOST_VIDEOS)
    gradient_accumulation_steps: int = flag(1, "rollout batches per optimizer step", low=1)
    updates_per_rollout: int = flag(1, "optimizer steps per rollout batch", low=1)
    seed: int = flag(42, "every random draw follows from it", low=0)
    # parallelism and precision
    sp_size: int = flag(1, "sequence-parallel degree", low=1)
    dp_replicate: int = flag(1, "replicas of the sharded model", low=1)
    enable_fsdp: bool = flag(False, "shard the model over all ranks; bf16 with fp32 master weights needs it")
    reduce_once: bool | None = flag(
        None, "sum gradients over ranks once per optimizer step; default: with LoRA. All weights: 33 GB more"
    )
    gather_for_rollout: bool = flag(False, "weights stay gathered during a rollout: faster, 17 GB more")
    enable_gradient_checkpointing: bool = flag(True, "recompute blocks in the backward pass")
    checkpointing_fraction: float = flag(1.0, "share of the blocks that are recomputed", low=0, high=1)
    keep_attention: bool = flag(False, "of recomputed blocks, keep the attention: faster, more memory")
    dtype: str | None = flag(None, "of the computation; bf16 on a GPU, fp32 on a CPU", choices=("fp32", "bf16"))
    master_weight_type: str = flag("fp32", "of the trained parameters", choices=("fp32", "bf16"))
    compile: bool = flag(False, "compile the transformer blocks")
    collective_timeout: float = flag(
        600, "seconds that ranks wait for each other, and twice what a reward may take", above=0
    )
    start_timeout: float = flag(1800, "seconds that ranks wait for each other at the start", above=0)
    # LoRA
    use_lora: bool = flag(False, "train an adapter instead of all weights")
    lora_r: int = flag(32, "rank of the adapter", low=1)
    lora_alpha: float = flag(64, "the adapter is scaled by lora_alpha / lora_r", above=0)
    lora_dropout: float = flag(0.0, "only 0: the first ratio must be 1", low=0, high=0)
    lora_target_modules: tuple[str, ...] = flag(ATTENTION, "linear layers of the transformer blocks")
    pretrained_lora_path: str | None = flag(None, "start from this adapter; default: a new one")
    # rollout
    sde_type: str = flag("sage_grpo", "exploration sampler", choices=tuple(name for name in SDES if name != "ode"))
    eta: float = flag(0.5, "exploration scale", above=0)
    num_sampling_steps: int = flag(20, "denoising steps", low=1)
    timestep_shift: float | None = flag(None, "of the noise schedule", above=0)
    guidance_scale: float | None = flag(None, "classifier-free guidance, in rollout and training", low=0)
    num_frames: int | None = flag(None, "of a clip", low=1)
    height: int | None = flag(None, "of a clip, in pixels", low=1)
    width: int | None = flag(None, "of a clip, in pixels", low=1)
    fps: int | None = flag(None, "of a clip", low=1)
    negative_prompt: str = flag("", "of guidance")
    micro_batch_size: int | None = flag(None, "videos per forward; default: all of one prompt on the rank", low=1)
    same_init_noise: bool = flag(False, "one initial noise for a whole group")
    sde_window: str = flag("all", "which steps explore: all, all_but_last, random:SIZE or slide:SIZE[:EVERY]")
    timestep_fraction: float = flag(1.0, "share of the exploring steps that each rollout trains", above=0, high=1)
    enable_timestep_permutation: bool = flag(True, "each rollout trains its steps in its own order")
    # loss
    use_grad_balancing: bool = flag(True, "the temporal gradient equalizer")
    clip_range: float = flag(1e-4, "of the ratio", above=0)
    adv_clip_max: float = flag(5.0, "of the advantage", above=0)
    advantage_std: str = flag("group", "what advantages are divided by", choices=ADVANTAGE_STDS)
    ratio_norm: bool = flag(False, "centre and rescale the log-ratio of each step")
    # trust region
    kl_weight: float = flag(1e-5, "largest coefficient of the KL; 0: no KL", low=0)
    kl_coef: float = flag(1e-7, "coefficient at the start of the warm-up", low=0)
    kl_min_coef: float = flag(1e-7, "smallest coefficient", low=0)
    kl_target: float = flag(1e-4, "KL that the feedback aims at", above=0)
    kl_schedule: str = flag("adaptive", "of the coefficient", choices=SCHEDULES)
    kl_warmup_steps: int = flag(100, "of the coefficient, in optimizer steps", low=0)
    kl_feedback: str = flag("paper", "which way the coefficient follows the KL", choices=tuple(FEEDBACKS))
    use_moving_KL: bool = flag(True, "the anchor follows the policy")
    update_ref_model_step: int = flag(10, "optimizer steps between refreshes of a moving anchor", low=1)
    use_dual_kl: bool = flag(True, "add the KL to the rollout's policy")
    dual_kl_moving_weight: float = flag(1.0, "of the KL to the anchor", low=0)
    dual_kl_step_weight: float = flag(0.1, "of the KL to the rollout's policy", low=0)
    kl_compute_mode: str = flag("rollout_phase", "anchor velocities come once per rollout", choices=("rollout_phase",))
    use_kl_balancing: bool = flag(False, "a change of velocity costs the same KL at every step")
    step_kl_estimator: str = flag("exact", "of the KL to the rollout's policy", choices=ESTIMATORS)
    reference_mode_offload: bool = flag(False, "a full anchor waits in host memory while unused")
    # reward
    reward_model: tuple[str, ...] | None = flag(None, f"one or several of {', '.join(REWARDS)}")
    reward_weights: dict[str, Any] = flag(  # noqa: RUF009 - flag makes a default factory of it
        {"VQ": 0.5, "MQ": 0.5, "TA": 1.0}, "JSON; with several rewards one object (or number) for each"
    )
    reward_path: str | None = flag(
        None, "VideoReward folder, other rewards' weights beside it; default: in the model folder"
    )
    remote_reward_url: str | None = flag(None, "http://HOST:PORT of a reward server; its token is in the environment")
    holdout_reward: str | None = flag(None, "reward that validation reports and training never sees")
    stop_on_hacking: bool = flag(False, "stop when validation finds the reward risen and the held-out one fallen")
    max_reward_failures: float = flag(0.25, "share of failed rewards in a batch that stops the run", low=0, high=1)
    reward_fps: float = flag(2.0, "frames of each second that videoalign, clipscore, pickscore and ocr see", above=0)
    reward_batch_size: int = flag(4, "clips per reward call", low=1)
    # validation, saving, logging
    ema_decay: float = flag(0.0, "of averaged weights for validation and export; 0: none", low=0, high=0.99999)
    validation_interval: int = flag(100, "iterations; 0: only at the end", low=0)
    validate_at_step0: bool = flag(False, "before training too")
    validation_prompts: tuple[str, ...] | None = flag(None, "prompt files (alias valid_video_csv)")
    validate_video_length: int | None = flag(None, "frames", low=1)
    validation_timestep_shift: float | None = flag(None, "of the noise schedule", above=0)
    validation_num_inference_steps: int = flag(40, "denoising steps, by the ODE", low=1)
    validation_fixed_size: str | None = flag(None, "HEIGHTxWIDTH")
    validation_global_seed: int = flag(930, "of prompts that name none", low=0)
    validation_videos: int | None = flag(None, "clips of a validation kept as videos, its first; default: all", low=0)
    save_interval: int = flag(100, "iterations; 0: only at the end", low=0)
    keep_checkpoints: int = flag(3, "the newest that are kept", low=1)
    resume_from_checkpoint: str | None = flag(
        None, "a checkpoint folder, or auto: the newest good one, the beginning where there is none"
    )
    init_from_checkpoint: str | None = flag(None, "start a run from the weights of another run's checkpoint, no more")
    log_interval: int = flag(1, "iterations between lines of metrics", low=1)
    report_to: tuple[str, ...] = flag(("tensorboard",), "tensorboard, wandb, none")

    @property
    def trust_region(self) -> TrustRegion:
        names = ("kl_weight", "use_moving_KL", "use_dual_kl", "dual_kl_moving_weight", "dual_kl_step_weight")
        return trust_region(**{name: getattr(self, name) for name in names})

    @property
    def reduces_once(self) -> bool:
        return self.use_lora if self.reduce_once is None else self.reduce_once

    def kl_controller(self) -> KLController:
        names = ("kl_weight", "kl_coef", "kl_min_coef", "kl_target", "kl_warmup_steps", "kl_schedule", "kl_feedback")
        return KLController(**{name: getattr(self, name) for name in names})

    def to_yaml(self) -> str:
        """What `--config` reads."""
        values = {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()}
        return yaml.safe_dump(values, sort_keys=False)


FIELDS = {field.name: field for field in dataclasses.fields(Config)}


def resolve(config: Config, sampling: Sampling, device: str) -> Config:
    """Fill in what the model says about its own sampling, and what the device decides."""
    own = {
        "num_frames": sampling.frames,
        "height": sampling.height,
        "width": sampling.width,
        "fps": sampling.fps,
        "timestep_shift": sampling.shift,
        "guidance_scale": sampling.guidance,
        "dtype": "fp32" if device == "cpu" else "bf16",
    }
    config = dataclasses.replace(config, **{k: v for k, v in own.items() if getattr(config, k) is None})
    later = {"validate_video_length": config.num_frames, "validation_timestep_shift": config.timestep_shift}
    return dataclasses.replace(config, **{k: v for k, v in later.items() if getattr(config, k) is None})


def check(config: Config, world_size: int = 1) -> None:
    """What several flags must agree on."""
    _check_rewards(config)
    _check_batch(config, world_size // config.sp_size)
    updates, accumulation = config.updates_per_rollout, config.gradient_accumulation_steps
    if updates > 1 and accumulation > 1:
        raise ConfigError(
            f"updates_per_rollout is {updates} and gradient_accumulation_steps {accumulation}; one of them must be 1"
        )
    for name in ("max_steps", "save_interval", "validation_interval"):
        value = getattr(config, name)
        if value % accumulation:
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
    unknown = sorted(set(config.report_to) - {"tensorboard", "wandb", "none"})
    if unknown:
        raise ConfigError(f"report_to names {unknown[0]}; choose of tensorboard, wandb, none")
    missing = [name for name in config.report_to if name != "none" and find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"report_to names {missing[0]}, which is not installed: pip install {missing[0]}, or leave it out"
        )
    try:  # the strategy and its controller know their own rules
        config.trust_region  # noqa: B018
        config.kl_controller()
    except ValueError as error:
        raise ConfigError(str(error)) from error


def warnings(config: Config) -> list[str]:
    """Settings that run but do less than they seem to."""
    found = []
    if config.updates_per_rollout == 1 and config.trust_region.velocity_weight:
        found.append(
            "updates_per_rollout is 1: the policy still equals the rollout's when it is compared with it, so the "
            "step-wise KL has no effect (its logprob estimator only adds noise), nor has the clip; 2 makes them act"
        )
    return found


def _check_rewards(config: Config) -> None:
    named = [("reward_model", name) for name in config.reward_model or ()]
    for flag, name in (*named, ("holdout_reward", config.holdout_reward)):
        if name is not None and name not in {*REWARDS, *ALIASES}:
            raise ConfigError(f"{flag} names {name!r}; choose one of {', '.join(REWARDS)}")
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
    if config.micro_batch_size and slice_size % config.micro_batch_size:
        raise ConfigError(
            f"micro_batch_size is {config.micro_batch_size}; it must divide the {slice_size} videos of a prompt"
        )
