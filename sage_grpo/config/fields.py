"""Every flag of `post_train.py`: its default, its meaning and its range, in sections.

`rules.py` checks what several of them must agree on, `parse.py` reads them from a YAML file and a command line.
Nothing heavy is imported here, so that `--help` and flag errors are instant.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from sage_grpo.models.versions import DEFAULT_VERSION
from sage_grpo.rewards.registry import REWARDS

if TYPE_CHECKING:
    from sage_grpo.algo.trust_region import KLController, TrustRegion
    from sage_grpo.models.backbone import Backbone

# Choices of the algorithm; a test compares them with the tables in `algo/`, which import torch.
ALGORITHMS = ("grpo", "awm", "nft")
SDE_TYPES = ("sage_grpo", "dance_grpo", "flow_grpo", "cps", "precise")
ADVANTAGE_STDS = ("group", "batch", "none")
KL_SCHEDULES, KL_FEEDBACKS = ("fixed", "two_stage", "adaptive"), ("paper", "trust_region")
KL_ESTIMATORS, SOLVERS = ("exact", "logprob"), ("euler", "dpm")
MOST_VIDEOS, MOST_FRAMES, MOST_PIXELS, MOST_STEPS, MOST_RANK = (
    65536,
    10000,
    65536,
    10000,
    4096,
)  # far above any use
LARGEST = 10**9  # of all other numbers: seconds, steps, factors
OWN = "the model's own"


class ConfigError(ValueError):
    """Why a configuration cannot run, in one sentence; line breaks and control characters are escaped."""

    def __init__(self, text: str) -> None:
        super().__init__(
            "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
        )


class About(NamedTuple):
    """What the parser knows about a flag besides its type and default."""

    help: str
    choices: Sequence[str] | None = None
    low: float = -math.inf  # inclusive
    high: float = LARGEST  # inclusive
    above: float = -math.inf  # exclusive
    shown: str | None = None  # in the help, for a default of None
    code: bool = False  # a command line may name `FILE.py:NAME` instead of a choice


def flag(default: Any, help: str, **about: Any) -> Any:
    """A field of `Config`, with `About` as its metadata."""
    value = (
        {"default_factory": lambda: dict(default)}
        if isinstance(default, dict)
        else {"default": default}
    )
    return dataclasses.field(**value, metadata=About(help, **about)._asdict())


@dataclass(frozen=True)
class Config:
    """Settings of a run. None means the default described in the help; `resolve` fills in what the model decides."""

    # Model and data
    pretrained_model_root: str = flag(
        "assets/tiny", "model folder in the layout of diffusers or of Tencent"
    )
    pretrained_transformer_version: str = flag(
        DEFAULT_VERSION, "published model, sub-folder of transformer/, or i2v"
    )
    output_dir: str = flag("./outputs", "run folder to create, or to resume")
    overwrite: bool = flag(False, "replace the run that output_dir holds")
    train_prompts: tuple[str, ...] | None = flag(
        None, "prompt files to train on: .txt, .csv or .jsonl", shown=OWN
    )
    prompt_cache: str | None = flag(
        None, "folder that keeps prompt embeddings between runs", shown="host memory"
    )

    # Optimization
    learning_rate: float = flag(1e-5, "learning rate after the warm-up", low=0)
    weight_decay: float = flag(0.01, "decoupled weight decay", low=0)
    adam_eps: float = flag(
        1e-15, "eps of AdamW and Muon: far smaller gradients have no effect", low=1e-30, high=1
    )
    max_grad_norm: float = flag(1.0, "norm to which the gradient is clipped", above=0)
    warmup_steps: int = flag(0, "linear warm-up of the learning rate, in optimizer steps", low=0)
    optimizer: str = flag(
        "adamw",
        "muon: Muon for the blocks' matrices, AdamW for the rest",
        choices=("adamw", "muon"),
    )
    max_steps: int = flag(10000, "GRPO iterations, one rollout batch each", low=0)
    batch_size: int = flag(2, "videos per data-parallel rank and rollout", low=1, high=MOST_VIDEOS)
    num_generations: int = flag(
        4, "videos per prompt: the size of a group", low=2, high=MOST_VIDEOS
    )
    gradient_accumulation_steps: int = flag(1, "rollout batches per optimizer step", low=1)
    updates_per_rollout: int = flag(1, "optimizer steps per rollout batch", low=1)
    gpus: int | None = flag(
        None, "ranks that this configuration is meant for", low=1, high=MOST_VIDEOS, shown="any"
    )
    seed: int = flag(42, "seed from which every random draw follows", low=0, high=2**63 - 1)

    # Parallelism and precision
    device: str = flag(
        "auto",
        "auto: a GPU; for at most 100 M parameters also a CPU",
        choices=("auto", "cuda", "cpu"),
    )
    sp_size: int = flag(1, "sequence-parallel degree: ranks that share each clip", low=1)
    dp_replicate: int = flag(1, "replicas of the sharded model (HSDP)", low=1)
    enable_fsdp: bool = flag(
        False, "shard the model over all ranks; bf16 with fp32 master weights needs it"
    )
    reduce_once: bool | None = flag(
        None, "sum gradients once per step; all weights: 33 GB more", shown="with LoRA"
    )
    gather_for_rollout: bool = flag(
        False, "keep weights gathered during a rollout: faster, 17 GB more"
    )
    enable_gradient_checkpointing: bool = flag(True, "recompute blocks in the backward pass")
    checkpointing_fraction: float = flag(
        1.0, "share of the blocks that are recomputed", low=0, high=1
    )
    keep_attention: bool = flag(
        False, "keep the attention of recomputed blocks: faster, more memory"
    )
    dtype: str | None = flag(
        None, "compute precision", choices=("fp32", "bf16"), shown="fp32 on a CPU, else bf16"
    )
    master_weight_type: str = flag(
        "fp32", "precision of the trained parameters", choices=("fp32", "bf16")
    )
    compile: bool = flag(False, "compile the transformer blocks and, on a GPU, the decoder")
    cuda_graphs: bool = flag(
        False, "on a GPU, replay forward and backward as CUDA graphs: for small models"
    )
    decode_gb: float = flag(
        0, "clips whose decode fits into so many GB are not tiled: faster", low=0
    )
    collective_timeout: float = flag(
        600, "seconds that ranks wait for each other; a reward may take half", above=0
    )
    start_timeout: float = flag(
        1800, "seconds that ranks wait for each other at the start", above=0
    )

    # LoRA
    use_lora: bool = flag(False, "train an adapter instead of all weights")
    lora_r: int = flag(32, "rank of the adapter", low=1, high=MOST_RANK)
    lora_alpha: float = flag(64, "scale of the adapter: lora_alpha / lora_r", above=0)
    lora_target_modules: tuple[str, ...] | None = flag(
        None, "layers of a block to adapt", shown="all of attention"
    )
    pretrained_lora_path: str | None = flag(
        None, "adapter folder to start from", shown="a new adapter"
    )

    # Rollout
    sde_type: str = flag(
        "sage_grpo", "exploration sampler, or FILE.py:NAME", choices=SDE_TYPES, code=True
    )
    eta: float = flag(0.5, "exploration scale", above=0)
    num_sampling_steps: int = flag(20, "denoising steps of a rollout", low=1, high=MOST_STEPS)
    timestep_shift: float | None = flag(None, "shift of the noise schedule", above=0, shown=OWN)
    guidance_scale: float | None = flag(
        None, "classifier-free guidance, in training too", low=0, shown=OWN
    )
    num_frames: int | None = flag(None, "frames of a clip", low=1, high=MOST_FRAMES, shown=OWN)
    height: int | None = flag(
        None, "height of a clip in pixels", low=1, high=MOST_PIXELS, shown=OWN
    )
    width: int | None = flag(None, "width of a clip in pixels", low=1, high=MOST_PIXELS, shown=OWN)
    fps: int | None = flag(None, "frames per second of a clip", low=1, high=MOST_FRAMES, shown=OWN)
    negative_prompt: str | None = flag(None, "prompt of the negative branch of guidance", shown=OWN)
    micro_batch_size: int | None = flag(
        None, "videos per forward", low=1, shown="all of one prompt on the rank"
    )
    prompts_per_forward: int = flag(
        1, "prompts that share a forward if their texts are equally long", low=1
    )
    same_init_noise: bool = flag(False, "start all clips of a group from the same noise")
    sde_window: str = flag(
        "all", "steps that explore: all, all_but_last, [random|slide][_iteration]:SIZE[:EVERY]"
    )
    tail_steps: int = flag(
        0, "second-order steps after the window; 0: the steps that are left", low=0, high=MOST_STEPS
    )
    outside_window: str = flag(
        "exact", "linear layers in steps without noise", choices=("exact", "fp8")
    )
    timestep_fraction: float = flag(
        1.0, "share of the exploring steps that each rollout trains", above=0, high=1
    )
    enable_timestep_permutation: bool = flag(
        True, "train the steps of each rollout in an order of its own"
    )

    # Loss
    algorithm: str = flag(
        "grpo", "grpo; without an SDE: awm, nft (algo/matching.py)", choices=ALGORITHMS
    )
    nft_beta: float = flag(1.0, "how far nft's two policies are from the old one", above=0)
    nft_decay: float = flag(
        0.5, "largest decay of nft's old policy, which samples; 0: none", low=0, high=0.99999
    )
    nft_decay_growth: float = flag(0.001, "growth of this decay per update, from 0", low=0)
    use_grad_balancing: bool = flag(True, "use the temporal gradient equalizer")
    clip_range: float = flag(1e-4, "PPO clip range around ratio 1", above=0)
    adv_clip_max: float = flag(5.0, "largest absolute advantage", above=0)
    advantage_std: str = flag(
        "group", "standard deviation that advantages are divided by", choices=ADVANTAGE_STDS
    )
    advantage_per_score: bool = flag(
        False, "normalize each score by itself, then add advantages instead of scores"
    )
    ratio_norm: bool = flag(False, "center and rescale the log-ratio of each step (GRPO-Guard)")

    # Trust region
    kl_weight: float = flag(1e-5, "largest KL coefficient; 0 turns the KL off", low=0)
    kl_coef: float = flag(1e-7, "KL coefficient at the start of the warm-up", low=0)
    kl_min_coef: float = flag(1e-7, "smallest KL coefficient", low=0)
    kl_target: float = flag(1e-4, "KL that the adaptive schedule aims at", above=0)
    kl_schedule: str = flag("adaptive", "schedule of the KL coefficient", choices=KL_SCHEDULES)
    kl_warmup_steps: int = flag(100, "warm-up of the KL coefficient, in optimizer steps", low=0)
    kl_feedback: str = flag(
        "paper", "direction in which the coefficient follows the KL", choices=KL_FEEDBACKS
    )
    use_moving_KL: bool = flag(True, "let the anchor follow the policy")
    update_ref_model_step: int = flag(
        10, "optimizer steps between refreshes of a moving anchor", low=1
    )
    use_dual_kl: bool = flag(True, "add the KL to the rollout's policy")
    dual_kl_moving_weight: float = flag(1.0, "weight of the KL to the anchor", low=0)
    dual_kl_step_weight: float = flag(0.1, "weight of the KL to the rollout's policy", low=0)
    use_kl_balancing: bool = flag(False, "make a change of velocity cost the same KL at every step")
    step_kl_estimator: str = flag(
        "exact", "estimator of the KL to the rollout's policy", choices=KL_ESTIMATORS
    )
    reference_mode_offload: bool = flag(
        False, "keep a full anchor in host memory while it is unused"
    )

    # Reward
    reward_model: tuple[str, ...] | None = flag(
        None, f"one or several of {', '.join(REWARDS)}, or FILE.py:NAME", shown=OWN, code=True
    )
    reward_weights: dict[str, Any] = flag(  # noqa: RUF009 - flag makes a default factory of it
        {"VQ": 0.5, "MQ": 0.5, "TA": 1.0},
        "JSON object of score weights; with several rewards one object for each",
    )
    reward_path: str | None = flag(
        None, "VideoReward folder, other rewards beside it", shown="in the model folder"
    )
    remote_reward_url: str | None = flag(
        None, "http://HOST:PORT of a reward server or a judge", shown="none"
    )
    judge_model: str | None = flag(
        None, "model that judges", shown="the only one that its server has"
    )
    judge_rubric: str | None = flag(
        None, "file of what the judge is asked", shown="sage_grpo/rewards/rubric.txt"
    )
    judge_cache: str | None = flag(
        None, "folder that keeps a judge's scores between runs", shown="host memory"
    )
    holdout_reward: str | None = flag(
        None, "reward for validation, unseen in training", shown="none", code=True
    )
    stop_on_hacking: bool = flag(
        False, "stop when validation finds the reward up and the held-out one down"
    )
    max_reward_failures: float = flag(
        0.25, "share of failed rewards in a batch that stops the run", low=0, high=1
    )
    reward_fps: float = flag(2.0, "frames per second that rewards other than shapes see", above=0)
    reward_batch_size: int = flag(4, "clips per reward call", low=1)

    # Validation
    ema_decay: float = flag(
        0.0, "decay of averaged weights for validation and export; 0: none", low=0, high=0.99999
    )
    validation_interval: int = flag(
        100, "iterations between validations; 0: only at the end", low=0
    )
    validate_at_step0: bool = flag(False, "validate before training too")
    validation_prompts: tuple[str, ...] | None = flag(
        None, "prompt files to validate with", shown=OWN
    )
    num_validation_prompts: int | None = flag(
        None, "how many of them are used, the first ones", low=1, shown="all"
    )
    validate_video_length: int | None = flag(
        None, "frames of a validation clip", low=1, high=MOST_FRAMES, shown=OWN
    )
    validation_timestep_shift: float | None = flag(
        None, "shift of validation's noise schedule", above=0, shown=OWN
    )
    validation_num_inference_steps: int | None = flag(
        None, "steps of its ODE", low=1, high=MOST_STEPS, shown=OWN
    )
    validation_solver: str = flag(
        "euler", "solver of its ODE, dpm is of second order", choices=SOLVERS
    )
    validation_fixed_size: str | None = flag(
        None, "size of a validation clip, HEIGHTxWIDTH", shown=OWN
    )
    validation_global_seed: int = flag(
        930, "seed of validation prompts that name none", low=0, high=2**63 - 1
    )
    validation_videos: int | None = flag(
        None, "clips of a validation that are kept as videos", low=0, shown="all"
    )

    # Checkpoints and logging
    save_interval: int = flag(100, "iterations between checkpoints; 0: only at the end", low=0)
    save_minutes: float = flag(
        0, "also save when the last checkpoint is this many minutes old; 0: never", low=0
    )
    async_save: bool = flag(True, "write checkpoints during training, from a copy in host memory")
    export_interval: int = flag(
        0, "iterations between checkpoints that diffusers can read; 0: only the last", low=0
    )
    keep_checkpoints: int = flag(3, "number of newest checkpoints that are kept", low=1)
    resume_from_checkpoint: str | None = flag(
        None,
        "checkpoint; auto: newest intact one, if any; last_good: newest before it diverged",
        shown="a new run",
    )
    init_from_checkpoint: str | None = flag(
        None, "checkpoint whose weights alone start a new run", shown="none"
    )
    log_interval: int = flag(1, "iterations between lines of metrics", low=1)
    report_to: tuple[str, ...] = flag(("tensorboard",), "trackers: tensorboard, wandb, none")

    @property
    def trust_region(self) -> "TrustRegion":
        from sage_grpo.algo.trust_region import trust_region  # imports torch

        names = (
            "kl_weight",
            "use_moving_KL",
            "use_dual_kl",
            "dual_kl_moving_weight",
            "dual_kl_step_weight",
        )
        return trust_region(**{name: getattr(self, name) for name in names})

    @property
    def lags(self) -> bool:
        """Whether an older policy than the trained one samples."""
        return self.algorithm == "nft" and min(self.nft_decay, self.nft_decay_growth) > 0

    @property
    def reduces_once(self) -> bool:
        return self.use_lora if self.reduce_once is None else self.reduce_once

    def kl_controller(self) -> "KLController":
        from sage_grpo.algo.trust_region import KLController  # imports torch

        names = (
            "kl_weight",
            "kl_coef",
            "kl_min_coef",
            "kl_target",
            "kl_warmup_steps",
            "kl_schedule",
            "kl_feedback",
        )
        return KLController(**{name: getattr(self, name) for name in names})

    def to_yaml(self) -> str:
        """YAML text that `--config` can read."""
        values = {
            k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()
        }
        return yaml.safe_dump(values, sort_keys=False)


FIELDS = {field.name: field for field in dataclasses.fields(Config)}
SECTIONS = {  # of the help, by the first flag of each
    "pretrained_model_root": "Model and data", "learning_rate": "Optimization", "device": "Parallelism and precision",
    "use_lora": "LoRA", "sde_type": "Rollout", "algorithm": "Loss", "kl_weight": "Trust region",
    "reward_model": "Reward", "ema_decay": "Validation", "save_interval": "Checkpoints and logging",
}  # fmt: skip


def default_dtype(device: str) -> str:
    """Precision of the computation on a type of device."""
    return "fp32" if device == "cpu" else "bf16"


def resolve(config: Config, backbone: "Backbone", device: str) -> Config:
    """Fill in defaults that depend on the model (sampling, LoRA layers) or on the device."""
    sampling = backbone.sampling
    own = dict(zip(("num_frames", "height", "width"), backbone.rollout_size, strict=True)) | {
        "fps": sampling.fps,
        "timestep_shift": sampling.shift,
        "guidance_scale": sampling.guidance,
        "negative_prompt": backbone.negative_prompt,
        "validate_video_length": sampling.frames,
        "validation_fixed_size": f"{sampling.height}x{sampling.width}",
        "validation_timestep_shift": sampling.shift,
        "validation_num_inference_steps": sampling.num_steps,
        "lora_target_modules": backbone.lora_targets,
        "dtype": default_dtype(device),
    }
    return dataclasses.replace(
        config, **{k: v for k, v in own.items() if getattr(config, k) is None}
    )
