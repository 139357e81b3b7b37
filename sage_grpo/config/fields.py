"""Every flag of `post_train.py`: its default, its meaning and its range, one class per section.

`values.py` converts raw values to these types, `rules.py` checks what several flags must agree on, and `parse.py` reads
flags from a YAML file and a command line. Nothing heavy is imported here, so that `--help` and flag errors are instant.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import yaml

from sage_grpo.config.windows import WindowForm, parse_window
from sage_grpo.models.versions import DEFAULT_VERSION
from sage_grpo.rewards.registry import REWARDS

if TYPE_CHECKING:
    from sage_grpo.algo.trust_region import KLController, TrustRegion
    from sage_grpo.models.backbone import Backbone

# Choices of the algorithm; a test compares them with the tables in `algo/`, which import torch.
ALGORITHMS = ("grpo", "awm", "nft")
SDE_TYPES = ("sage_grpo", "dance_grpo", "flow_grpo", "cps", "precise")
ADVANTAGE_STDS = ("group", "batch", "none")
KL_SCHEDULES = ("fixed", "two_stage", "adaptive")
KL_FEEDBACKS = ("paper", "trust_region")
KL_ESTIMATORS = ("exact", "logprob")
SOLVERS = ("euler", "dpm", "dpm3", "unipc")

# Upper limits, far above any real use: a typo is rejected before it allocates memory.
MAX_CLIPS = 65_536
MAX_FRAMES = 10_000
MAX_SIDE = 65_536  # pixels
MAX_SAMPLING_STEPS = 10_000
MAX_LORA_RANK = 4096
MAX_SEED = 2**63 - 1
MAX_NUMBER = 10**9  # of all other numbers: seconds, iterations, factors

MODEL_DEFAULT = "set by the model"


class ConfigError(ValueError):
    """Why a configuration cannot run, in one sentence; line breaks and control characters are escaped."""

    def __init__(self, text: str) -> None:
        printable = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
        super().__init__("".join(printable))


@dataclass(frozen=True)
class FlagInfo:
    """What the parser knows about a flag besides its type and default."""

    help: str
    choices: Sequence[str] | None = None
    minimum: float = -math.inf
    maximum: float = MAX_NUMBER
    above: float = -math.inf  # exclusive lower bound
    default_text: str | None = None  # what the help shows for a default of None
    is_path: bool = False
    allows_code: bool = False  # a command line may give FILE.py:NAME instead of a choice


def flag(default: Any, help: str, **info: Any) -> Any:
    """A dataclass field with this default and a `FlagInfo` as its metadata."""
    metadata = dataclasses.asdict(FlagInfo(help, **info))
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: dict(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class ModelFlags:
    pretrained_model_root: str = flag(
        "assets/tiny",
        "model folder, in the layout of diffusers or of Tencent's release",
        is_path=True,
    )
    pretrained_transformer_version: str = flag(
        DEFAULT_VERSION,
        "model version: a published name, a subfolder of transformer/, or i2v",
    )
    output_dir: str = flag("./outputs", "run folder to create or resume", is_path=True)
    overwrite: bool = flag(False, "replace an existing run in output_dir")
    train_prompts: tuple[str, ...] | None = flag(
        None,
        "prompt files to train on: .txt, .csv or .jsonl",
        default_text="prompts_train.txt in the model folder, else assets/prompts/train_long.csv",
        is_path=True,
    )
    prompt_cache: str | None = flag(
        None,
        "folder that caches prompt embeddings across runs",
        default_text="host memory",
        is_path=True,
    )


@dataclass(frozen=True)
class OptimizationFlags:
    learning_rate: float = flag(1e-5, "learning rate after the warm-up", minimum=0)
    weight_decay: float = flag(0.01, "decoupled weight decay", minimum=0)
    adam_eps: float = flag(
        1e-15,
        "epsilon of AdamW and Muon; gradients far below it have no effect",
        minimum=1e-30,
        maximum=1,
    )
    max_grad_norm: float = flag(1.0, "maximum gradient norm; larger gradients are clipped", above=0)
    warmup_steps: int = flag(0, "optimizer steps of linear learning-rate warm-up", minimum=0)
    optimizer: str = flag(
        "adamw",
        "optimizer; muon applies Muon to the matrices of the blocks and AdamW to the rest",
        choices=("adamw", "muon"),
    )
    max_steps: int = flag(10000, "training iterations, one rollout batch each", minimum=0)
    batch_size: int = flag(
        2,
        "clips per rollout batch on each data-parallel rank",
        minimum=1,
        maximum=MAX_CLIPS,
    )
    num_generations: int = flag(4, "clips per prompt (group size)", minimum=2, maximum=MAX_CLIPS)
    train_clips: int | None = flag(
        None,
        "clips of each group to train on, the best and the worst ones; the others are only sampled and scored",
        minimum=2,
        maximum=MAX_CLIPS,
        default_text="all",
    )
    center_trained: bool = flag(
        True,
        "with train_clips: subtract the mean advantage of a group's trained clips, so that they add up to 0; "
        "without it, training may push the model away from all of its own clips",
    )
    gradient_accumulation_steps: int = flag(1, "rollout batches per optimizer step", minimum=1)
    updates_per_rollout: int = flag(1, "optimizer steps per rollout batch", minimum=1)
    gpus: int | None = flag(
        None,
        "number of ranks that the configuration was written for; another number prints a warning",
        minimum=1,
        maximum=MAX_CLIPS,
        default_text="any",
    )
    seed: int = flag(42, "seed of every random draw", minimum=0, maximum=MAX_SEED)


@dataclass(frozen=True)
class ParallelismFlags:
    device: str = flag(
        "auto",
        "device to use; auto requires a GPU unless the model has at most 100 M parameters",
        choices=("auto", "cuda", "cpu"),
    )
    sp_size: int = flag(
        1,
        "sequence-parallel degree: number of ranks that share each clip",
        minimum=1,
    )
    dp_replicate: int = flag(1, "number of replicas of the sharded model (HSDP)", minimum=1)
    enable_fsdp: bool = flag(
        False,
        "shard the model over all ranks (FSDP); needed for bf16 with fp32 master weights",
    )
    reduce_once: bool | None = flag(
        None,
        "reduce sharded gradients once per rollout batch and update, not in each backward pass; "
        "takes 4 bytes per parameter more if all weights are trained",
        default_text="True with LoRA, else False",
    )
    gather_for_rollout: bool = flag(
        False,
        "keep sharded weights gathered during a rollout; faster, but takes 2 bytes per parameter more (bf16)",
    )
    enable_gradient_checkpointing: bool = flag(
        True,
        "recompute the transformer blocks in the backward pass",
    )
    checkpointing_fraction: float = flag(
        1.0,
        "fraction of the blocks to recompute",
        minimum=0,
        maximum=1,
    )
    keep_attention: bool = flag(
        False,
        "store the attention outputs of recomputed blocks; faster, but takes more memory",
    )
    dtype: str | None = flag(
        None,
        "compute precision",
        choices=("fp32", "bf16"),
        default_text="fp32 on a CPU, else bf16",
    )
    master_weight_type: str = flag(
        "fp32",
        "precision of the trained parameters",
        choices=("fp32", "bf16"),
    )
    compile: bool = flag(False, "compile the transformer blocks and, on a GPU, the VAE decoder")
    cuda_graphs: bool = flag(
        False,
        "replay forward and backward as CUDA graphs; speeds up small models on a GPU",
    )
    decode_gb: float = flag(
        0,
        "decode clips without tiling, which is faster, if that takes at most this many GB",
        minimum=0,
    )
    collective_timeout: float = flag(
        600,
        "seconds that ranks wait for each other; a reward call may take half of it",
        above=0,
    )
    start_timeout: float = flag(
        1800,
        "seconds that ranks wait for each other during startup",
        above=0,
    )


@dataclass(frozen=True)
class LoraFlags:
    use_lora: bool = flag(False, "train a LoRA adapter instead of all weights")
    lora_r: int = flag(32, "rank of the adapter", minimum=1, maximum=MAX_LORA_RANK)
    lora_alpha: float = flag(64, "numerator of the adapter's scale, lora_alpha / lora_r", above=0)
    lora_target_modules: tuple[str, ...] | None = flag(
        None,
        "layers to adapt in each block",
        default_text="all attention layers",
    )
    lora_experts: str = flag(
        "both",
        "transformers to adapt in a model that has one for high and one for low noise levels",
        choices=("both", "high", "low"),
    )
    pretrained_lora_path: str | None = flag(
        None,
        "adapter folder to start from",
        default_text="a new adapter",
        is_path=True,
    )


@dataclass(frozen=True)
class RolloutFlags:
    sde_type: str = flag(
        "sage_grpo",
        "exploration SDE, or FILE.py:NAME",
        choices=SDE_TYPES,
        allows_code=True,
    )
    eta: float = flag(0.5, "noise scale of the exploration SDE", above=0)
    num_sampling_steps: int = flag(
        20,
        "denoising steps of a rollout",
        minimum=1,
        maximum=MAX_SAMPLING_STEPS,
    )
    timestep_shift: float | None = flag(
        None,
        "timestep shift of the noise schedule",
        above=0,
        default_text=MODEL_DEFAULT,
    )
    guidance_scale: float | None = flag(
        None,
        "classifier-free guidance scale, in rollouts and in training",
        minimum=0,
        default_text=MODEL_DEFAULT,
    )
    guidance_scale_2: float | None = flag(
        None,
        "guidance scale of the low-noise transformer, in a model that has two",
        minimum=0,
        default_text="guidance_scale if given, else set by the model",
    )
    num_frames: int | None = flag(
        None,
        "frames per clip",
        minimum=1,
        maximum=MAX_FRAMES,
        default_text=MODEL_DEFAULT,
    )
    height: int | None = flag(
        None,
        "height of a clip in pixels",
        minimum=1,
        maximum=MAX_SIDE,
        default_text=MODEL_DEFAULT,
    )
    width: int | None = flag(
        None,
        "width of a clip in pixels",
        minimum=1,
        maximum=MAX_SIDE,
        default_text=MODEL_DEFAULT,
    )
    fps: int | None = flag(
        None,
        "frames per second of a clip",
        minimum=1,
        maximum=MAX_FRAMES,
        default_text=MODEL_DEFAULT,
    )
    negative_prompt: str | None = flag(
        None,
        "negative prompt for guidance",
        default_text=MODEL_DEFAULT,
    )
    micro_batch_size: int | None = flag(
        None,
        "clips per forward pass",
        minimum=1,
        default_text="all clips of a prompt on the rank",
    )
    prompts_per_forward: int = flag(
        1,
        "number of prompts of equal token count that may share a forward pass",
        minimum=1,
    )
    same_init_noise: bool = flag(False, "start all clips of a group from the same noise")
    sde_window: str = flag(
        "all",
        "steps that explore: all, all_but_last, [random|slide][_iteration]:SIZE[:EVERY][:all_but_last][:even]",
    )
    tail_steps: int = flag(
        0,
        "solver steps after the window, higher-order except the first and the last and, from pure noise (awm, nft), "
        "the second; 0 takes the remaining steps as they are",
        minimum=0,
        maximum=MAX_SAMPLING_STEPS,
    )
    tail_solver: str = flag(
        "dpm",
        "solver of tail_steps: dpm is second-order, dpm3 third-order, unipc second-order with a corrector",
        choices=SOLVERS[1:],
    )
    guidance_interval: str = flag(
        "0:1",
        "noise levels LOW:HIGH at which rollouts of awm and nft are guided; unguided steps cost half",
    )
    outside_window: str = flag(
        "exact",
        "precision of linear layers in steps without exploration",
        choices=("exact", "fp8"),
    )
    timestep_fraction: float = flag(
        1.0,
        "fraction of the exploring steps that each rollout trains on",
        above=0,
        maximum=1,
    )
    enable_timestep_permutation: bool = flag(
        True,
        "train on the steps of each rollout in a random order",
    )


@dataclass(frozen=True)
class LossFlags:
    algorithm: str = flag(
        "grpo",
        "training algorithm; awm and nft need no SDE (sage_grpo/algo/matching.py)",
        choices=ALGORITHMS,
    )
    nft_beta: float = flag(
        1.0,
        "distance of nft's two implicit policies from the old policy",
        above=0,
    )
    nft_decay: float = flag(
        0.5,
        "maximum decay of nft's old policy, which samples; 0 samples with the trained policy",
        minimum=0,
        maximum=0.99999,
    )
    nft_decay_growth: float = flag(0.001, "growth of nft's decay per update, from 0", minimum=0)
    use_grad_balancing: bool = flag(True, "use the temporal gradient equalizer")
    clip_range: float = flag(1e-4, "PPO clip range around ratio 1", above=0)
    adv_clip_max: float = flag(5.0, "maximum absolute advantage; larger ones are clipped", above=0)
    advantage_std: str = flag(
        "group",
        "standard deviation by which advantages are divided",
        choices=ADVANTAGE_STDS,
    )
    advantage_per_score: bool = flag(
        False,
        "normalize each score separately and add advantages instead of scores",
    )
    ratio_norm: bool = flag(False, "center and rescale the log-ratio of each step (GRPO-Guard)")


@dataclass(frozen=True)
class TrustRegionFlags:
    kl_weight: float = flag(1e-5, "maximum KL coefficient; 0 turns the KL off", minimum=0)
    kl_coef: float = flag(1e-7, "KL coefficient at the start of its warm-up", minimum=0)
    kl_min_coef: float = flag(1e-7, "minimum KL coefficient", minimum=0)
    kl_target: float = flag(1e-4, "target KL of the adaptive schedule", above=0)
    kl_schedule: str = flag("adaptive", "schedule of the KL coefficient", choices=KL_SCHEDULES)
    kl_warmup_steps: int = flag(100, "optimizer steps of KL-coefficient warm-up", minimum=0)
    kl_feedback: str = flag(
        "paper",
        "adaptive response to a KL above the target: paper lowers the coefficient, trust_region raises it",
        choices=KL_FEEDBACKS,
    )
    use_moving_KL: bool = flag(True, "let the anchor follow the policy")
    update_ref_model_step: int = flag(
        10,
        "optimizer steps between refreshes of a moving anchor",
        minimum=1,
    )
    use_dual_kl: bool = flag(True, "add the KL to the rollout policy")
    dual_kl_moving_weight: float = flag(1.0, "weight of the KL to the anchor", minimum=0)
    dual_kl_step_weight: float = flag(0.1, "weight of the KL to the rollout policy", minimum=0)
    use_kl_balancing: bool = flag(
        False,
        "scale the KL so that a given change of velocity costs the same at every step",
    )
    step_kl_estimator: str = flag(
        "exact",
        "estimator of the KL to the rollout policy",
        choices=KL_ESTIMATORS,
    )
    reference_mode_offload: bool = flag(
        False,
        "when training all weights, keep the anchor in host memory while it is not in use",
    )


@dataclass(frozen=True)
class RewardFlags:
    reward_model: tuple[str, ...] | None = flag(
        None,
        f"one or more of {', '.join(REWARDS)}, or FILE.py:NAME",
        default_text=MODEL_DEFAULT,
        allows_code=True,
    )
    reward_weights: dict[str, Any] = flag(  # noqa: RUF009 - `flag` turns it into a default factory
        {"VQ": 0.5, "MQ": 0.5, "TA": 1.0},
        "JSON object of score weights; with several rewards, one such object per reward",
    )
    reward_path: str | None = flag(
        None,
        "VideoReward folder; the weights of other rewards are in folders next to it",
        default_text="in the model folder",
        is_path=True,
    )
    remote_reward_url: str | None = flag(
        None,
        "http://HOST:PORT of a reward server or a judge",
        default_text="none",
    )
    judge_model: str | None = flag(
        None,
        "name of the judge's model",
        default_text="the only model on its server",
    )
    judge_rubric: str | None = flag(
        None,
        "file with the instructions to the judge",
        default_text="sage_grpo/rewards/rubric.txt",
        is_path=True,
    )
    judge_cache: str | None = flag(
        None,
        "folder that caches the judge's scores across runs",
        default_text="host memory",
        is_path=True,
    )
    holdout_reward: str | None = flag(
        None,
        "reward that is used in validation only",
        default_text="none",
        allows_code=True,
    )
    stop_on_hacking: bool = flag(
        False,
        "stop if, in validation, the reward rises and the held-out reward falls",
    )
    max_reward_failures: float = flag(
        0.25,
        "stop if more than this fraction of a batch's rewards failed",
        minimum=0,
        maximum=1,
    )
    reward_fps: float | None = flag(
        None,
        "frames per second that videoalign, clipscore, pickscore, ocr and judge see",
        above=0,
        default_text="the rate in VideoAlign's folder; 2 for the others",
    )
    reward_batch_size: int = flag(4, "clips per reward call", minimum=1)


@dataclass(frozen=True)
class ValidationFlags:
    ema_decay: float = flag(
        0.0,
        "decay of the averaged weights for validation and export; 0 turns averaging off",
        minimum=0,
        maximum=0.99999,
    )
    validation_interval: int = flag(
        100,
        "iterations between validations; 0 validates at the end only",
        minimum=0,
    )
    validate_at_step0: bool = flag(False, "also validate before training")
    validation_prompts: tuple[str, ...] | None = flag(
        None,
        "prompt files to validate with",
        default_text="prompts_valid.txt in the model folder, else assets/prompts/valid_long.csv",
        is_path=True,
    )
    num_validation_prompts: int | None = flag(
        None,
        "validate with only the first N prompts",
        minimum=1,
        default_text="all",
    )
    validate_video_length: int | None = flag(
        None,
        "frames per validation clip",
        minimum=1,
        maximum=MAX_FRAMES,
        default_text=MODEL_DEFAULT,
    )
    validation_timestep_shift: float | None = flag(
        None,
        "timestep shift of the noise schedule in validation",
        above=0,
        default_text=MODEL_DEFAULT,
    )
    validation_num_inference_steps: int | None = flag(
        None,
        "denoising steps in validation",
        minimum=1,
        maximum=MAX_SAMPLING_STEPS,
        default_text=MODEL_DEFAULT,
    )
    validation_solver: str = flag(
        "euler",
        "ODE solver in validation; dpm and unipc are second-order, dpm3 is third-order",
        choices=SOLVERS,
    )
    validation_fixed_size: str | None = flag(
        None,
        "size of a validation clip, HEIGHTxWIDTH",
        default_text=MODEL_DEFAULT,
    )
    validation_global_seed: int = flag(
        930,
        "seed of validation prompts that specify none",
        minimum=0,
        maximum=MAX_SEED,
    )
    validation_videos: int | None = flag(
        None,
        "number of validation clips to save as videos",
        minimum=0,
        default_text="all",
    )
    rollout_videos: int = flag(
        24,
        "number of logged iterations for which a group's best and worst clips are kept as small videos; 0 keeps none",
        minimum=0,
    )


@dataclass(frozen=True)
class CheckpointFlags:
    save_interval: int = flag(
        100,
        "iterations between checkpoints; 0 saves at the end only",
        minimum=0,
    )
    save_minutes: float = flag(
        0,
        "also save when the last checkpoint is this many minutes old; 0 turns this off",
        minimum=0,
    )
    async_save: bool = flag(True, "write checkpoints during training, from a copy in host memory")
    export_interval: int = flag(
        0,
        "iterations between checkpoints that diffusers can read; 0 exports the last one only",
        minimum=0,
    )
    keep_checkpoints: int = flag(
        3,
        "checkpoints to keep: the newest, then those of validated iterations, then others",
        minimum=1,
    )
    resume_from_checkpoint: str | None = flag(
        None,
        "checkpoint to resume; auto: the newest intact one, if any; "
        "last_good: the newest one from before the run diverged",
        default_text="a new run",
        is_path=True,
    )
    init_from_checkpoint: str | None = flag(
        None,
        "checkpoint whose weights (and nothing else) a new run starts from",
        default_text="none",
        is_path=True,
    )
    log_interval: int = flag(1, "iterations between lines of metrics", minimum=1)
    report_to: tuple[str, ...] = flag(("tensorboard",), "trackers: tensorboard, wandb, none")


SECTIONS = {  # of the help, in this order
    "Model and data": ModelFlags,
    "Optimization": OptimizationFlags,
    "Parallelism and precision": ParallelismFlags,
    "LoRA": LoraFlags,
    "Rollout": RolloutFlags,
    "Loss": LossFlags,
    "Trust region": TrustRegionFlags,
    "Reward": RewardFlags,
    "Validation": ValidationFlags,
    "Checkpoints and logging": CheckpointFlags,
}


@dataclass(frozen=True)
class Config(  # a dataclass lists the fields of its last base first
    CheckpointFlags,
    ValidationFlags,
    RewardFlags,
    TrustRegionFlags,
    LossFlags,
    RolloutFlags,
    LoraFlags,
    ParallelismFlags,
    OptimizationFlags,
    ModelFlags,
):
    """Settings of a run. None means the default described in the help; `resolve` fills in what the model decides."""

    @property
    def trust_region(self) -> "TrustRegion":
        from sage_grpo.algo.trust_region import trust_region  # imports torch

        return trust_region(
            kl_weight=self.kl_weight,
            use_moving_KL=self.use_moving_KL,
            use_dual_kl=self.use_dual_kl,
            dual_kl_moving_weight=self.dual_kl_moving_weight,
            dual_kl_step_weight=self.dual_kl_step_weight,
        )

    @property
    def window_form(self) -> WindowForm:
        return parse_window(self.sde_window)

    @property
    def guided_levels(self) -> tuple[float, float]:
        """The noise levels at which rollouts are guided, the lowest and the highest."""
        low, _, high = self.guidance_interval.partition(":")
        try:
            levels = float(low), float(high)
        except ValueError:
            levels = (1.0, 0.0)
        if not 0 <= levels[0] <= levels[1] <= 1:
            raise ValueError(
                f"guidance_interval is {self.guidance_interval!r}; write LOW:HIGH with noise levels "
                "from 0 to 1, such as 0.2:0.9"
            )
        return levels

    @property
    def adapted_experts(self) -> str:
        """The transformers that are trained, `high`, `low` or `both`, in a model that has two."""
        return self.lora_experts if self.use_lora else "both"

    @property
    def group_trained(self) -> int:
        """Clips of each group that are trained."""
        return self.num_generations if self.train_clips is None else self.train_clips

    @property
    def rank_trained(self) -> int:
        """Clips that each rank trains in an iteration."""
        return self.batch_size * self.group_trained // self.num_generations

    @property
    def rollout_micro_batch(self) -> int:
        """Clips that are sampled together."""
        return self.micro_batch_size or min(self.batch_size, self.num_generations)

    @property
    def trained_micro_batch(self) -> int:
        """Clips that are trained together, all of one prompt, before `prompts_per_forward` joins prompts."""
        return min(self.rollout_micro_batch, self.rank_trained, self.group_trained)

    @property
    def trains_in_new_batches(self) -> bool:
        """Whether clips are trained beside other clips than those that they were sampled with."""
        alone = self.rollout_micro_batch == self.prompts_per_forward == 1
        return self.group_trained < self.num_generations and not alone

    @property
    def samples_with_old_policy(self) -> bool:
        """Whether clips are sampled by an older policy than the trained one."""
        return self.algorithm == "nft" and self.nft_decay > 0 and self.nft_decay_growth > 0

    @property
    def reduces_gradients_once(self) -> bool:
        """Whether sharded gradients are reduced once per rollout batch and update instead of in each backward pass."""
        return self.use_lora if self.reduce_once is None else self.reduce_once

    def kl_controller(self) -> "KLController":
        from sage_grpo.algo.trust_region import KLController  # imports torch

        return KLController(
            kl_weight=self.kl_weight,
            kl_coef=self.kl_coef,
            kl_min_coef=self.kl_min_coef,
            kl_target=self.kl_target,
            kl_warmup_steps=self.kl_warmup_steps,
            kl_schedule=self.kl_schedule,
            kl_feedback=self.kl_feedback,
        )

    def to_yaml(self) -> str:
        """YAML text that `--config` can read."""
        values = dataclasses.asdict(self)
        for name, value in values.items():
            if isinstance(value, tuple):
                values[name] = list(value)
        return yaml.safe_dump(values, sort_keys=False)


FIELDS = {field.name: field for field in dataclasses.fields(Config)}


def flag_info(name: str) -> FlagInfo:
    """Help, choices and range of a flag."""
    return FlagInfo(**FIELDS[name].metadata)


def default_dtype(device: str) -> str:
    """Compute precision on a type of device."""
    return "fp32" if device == "cpu" else "bf16"


def resolve(config: Config, backbone: "Backbone", device: str) -> Config:
    """Fill in defaults that depend on the model (sampling, LoRA layers) or on the device."""
    sampling = backbone.sampling
    num_frames, height, width = backbone.rollout_size
    defaults = {
        "num_frames": num_frames,
        "height": height,
        "width": width,
        "fps": sampling.fps,
        "timestep_shift": sampling.shift,
        "guidance_scale": sampling.guidance,
        # one scale that is given serves both transformers, as in stock pipelines
        "guidance_scale_2": sampling.guidance_2 if config.guidance_scale is None else None,
        "negative_prompt": backbone.negative_prompt,
        "validate_video_length": sampling.frames,
        "validation_fixed_size": f"{sampling.height}x{sampling.width}",
        "validation_timestep_shift": sampling.shift,
        "validation_num_inference_steps": sampling.num_steps,
        "lora_target_modules": backbone.lora_targets,
        "dtype": default_dtype(device),
    }
    missing = {name: value for name, value in defaults.items() if getattr(config, name) is None}
    return dataclasses.replace(config, **missing)
