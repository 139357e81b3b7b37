"""The studies: which runs answer which question, and what they cost.

A study is a question, its arms as flags that differ from configs/tiny_ablation.yaml, and a number of seeds. Runs are
paired by seed: seed 3 of every arm sees the same prompts and the same noise. A configuration shared by several studies
is one run, identified by a hash of its configuration. Studies are in order of importance.
"""

import dataclasses
import hashlib
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from sage_grpo.config.fields import FIELDS, Config, ConfigError
from sage_grpo.config.parse import from_values
from sage_grpo.config.yaml_files import yaml_mapping
from sage_grpo.train.checkpoint import LOCATION_FLAGS
from sage_grpo.train.windows import build_windows, num_trained

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RECORDS = (
    HERE / "records"
)  # one file of results per edition, written by research/studies/records.py
RECIPE = ROOT / "configs" / "tiny_ablation.yaml"
POINTS = 40  # per curve
Flags = Mapping[str, Any]


@dataclass(frozen=True)
class Study:
    """A question and the arms that answer it.

    flags: apply to all arms.
    against: the arm that an arm is compared with; if empty, all are compared with the first.
    measured: what is measured of the last weights of each run: `path_kl` (research/studies/path_kl.py) or `spread`
        (research/studies/spread.py).
    """

    question: str
    arms: Mapping[str, Flags]
    seeds: int = 3
    first_seed: int = 1
    flags: Flags = field(default_factory=dict)
    against: Mapping[str, str] = field(default_factory=dict)
    measured: tuple[str, ...] = ()

    def reference(self, arm: str) -> str | None:
        """The arm that this one is compared with; None for an arm that is not compared."""
        first = None if self.against else next(iter(self.arms))
        reference = self.against.get(arm, first)
        return None if reference == arm else reference


@dataclass(frozen=True)
class StudyRun:
    """One configuration with one seed."""

    study: str  # the first study that includes it
    arm: str
    seed: int
    config: Config
    measured: tuple[str, ...] = ()  # what the studies that include it ask for

    @property
    def name(self) -> str:
        """Name of the run folder, unique within an edition."""
        return run_name(self.study, self.arm, self.seed)


def run_name(study: str, arm: str, seed: int) -> str:
    """A run's name, safe as a file name."""
    safe_arm = "".join(letter if letter.isalnum() or letter in "._" else "_" for letter in arm)
    return f"{study}-{safe_arm}-{seed}"


def lasting(iterations: int) -> dict[str, int]:
    """Flags for a run of this length: validated at start, middle and end, with about 40 points per curve."""
    half = iterations // 2
    return {
        "max_steps": iterations,
        "validation_interval": half,
        "save_interval": half,
        "log_interval": math.ceil(iterations / POINTS),
    }


OFF = {"use_grad_balancing": False}
NO_KL = {"kl_weight": 0.0}
FIXED_KL = {"use_moving_KL": False, "use_dual_kl": False}
STEPWISE = {"dual_kl_moving_weight": 0.0, "dual_kl_step_weight": 1.0}
MOVING = {"use_dual_kl": False}
SETTING_A = {"reward_weights": {"VQ": 1.0, "MQ": 1.0, "TA": 1.0}}
SDES = {name: {"sde_type": f"{name}_grpo"} for name in ("sage", "dance", "flow")}
SDES |= {name: {"sde_type": name} for name in ("cps", "precise")}
# etas for which the sum of std^2 over the four exploring steps is 1
EQUAL_ENERGY = {"sage": 0.4623, "dance": 1.3229, "flow": 0.5410, "cps": 0.4778, "precise": 0.3623}
# an aggressive rate, and two updates so that the KL to the rollout's policy matters
PUSHED = {"learning_rate": 5e-4, "updates_per_rollout": 2}
WARMING = {"kl_schedule": "two_stage", "kl_warmup_steps": 60}
ADAPTIVE = {
    "kl_schedule": "adaptive",
    "kl_warmup_steps": 10,
    "kl_coef": 0.01,
    "kl_min_coef": 0.01,
    "kl_weight": 10.0,
}
PUBLISHED = {
    "sde_window": "all", "eta": 0.5, "kl_weight": 1e-5, "kl_coef": 1e-7, "kl_min_coef": 1e-7, "kl_target": 1e-5,
    "kl_schedule": "adaptive", "step_kl_estimator": "logprob",
}  # fmt: skip


def table2_arms() -> dict[str, Flags]:
    """The rows of the paper's Table 2 below the base model."""
    arms = {}
    for setting, weights in (("A", SETTING_A), ("B", {})):
        for name in ("dance", "flow", "cps", "sage"):
            arms[f"{setting} {name}, no KL"] = SDES[name] | NO_KL | weights
            arms[f"{setting} {name}, fixed KL"] = SDES[name] | FIXED_KL | weights
        arms[f"{setting} sage, dual moving KL"] = weights
    return arms


STUDIES: dict[str, Study] = {
    "last_step": Study(
        "Does noise in the last denoising step, which nothing removes again, help or harm?",
        {"all but last": {}, "all": {"sde_window": "all"}},
        seeds=8,
    ),
    "equalizer": Study("What does the gradient equalizer change?", {"on": {}, "off": OFF}, seeds=8),
    "updates": Study(
        "How many optimizer steps per rollout?",
        {"1": {}, "2": {"updates_per_rollout": 2}, "4": {"updates_per_rollout": 4}},
        seeds=8,
    ),
    "kl_weight": Study(
        "At which weight does the KL do anything at all?",
        {"0": NO_KL} | {f"{weight:g}": {"kl_weight": weight} for weight in (1e-5, 0.03, 0.3, 3.0)},
        seeds=8,
    ),
    "kl_steps": Study(
        "Should a change of velocity cost the same KL at every step?",
        {
            f"{weight:g}{word}": {"kl_weight": weight} | flags
            for weight in (0.3, 3.0)
            for word, flags in (("", {}), (" balanced", {"use_kl_balancing": True}))
        },
        against={"0.3 balanced": "0.3", "3 balanced": "3"},
    ),
    "controls": Study(
        "Do the first answers hold without a KL, and at an equal total of the learning rate?",
        {
            "no KL": NO_KL,
            "no KL, equalizer off": NO_KL | OFF,
            "no KL, noise in all steps": NO_KL | {"sde_window": "all"},
            "1 update": {},
            "2 updates at half the rate": {"updates_per_rollout": 2, "learning_rate": 1e-4},
        },
        seeds=5,
        against={
            "no KL, equalizer off": "no KL",
            "no KL, noise in all steps": "no KL",
            "2 updates at half the rate": "1 update",
        },
    ),
    "sde": Study("Which exploration SDE, at equal eta?", SDES),
    "energy": Study(
        "Which exploration SDE, at equal injected energy?",
        {name: flags | {"eta": EQUAL_ENERGY[name]} for name, flags in SDES.items()},
    ),
    "balancing": Study(
        "Does the equalizer help every SDE (Figure 3)?",
        {f"{name}{word}": flags | off for name, flags in SDES.items() for word, off in (("", {}), (" off", OFF))},
        against={f"{name} off": name for name in SDES},
    ),
    "strategies": Study(
        "Which KL strategy holds the gold metrics longest when the proxy is pushed hard (Figure 8)?",
        {"dual moving": {}, "none": NO_KL, "fixed": FIXED_KL, "step-wise": STEPWISE, "moving": MOVING},
        flags=PUSHED | lasting(300),
    ),
    "anchor": Study(
        "When the proxy is pushed hard: how far may the anchor move, and at which weight?",
        {
            "fixed": FIXED_KL,
            "moved every 10 updates": {},
            "moved every 40 updates": {"update_ref_model_step": 40},
            "moved every 160 updates": {"update_ref_model_step": 160},
            "moved every 10 updates, weight 3": {"kl_weight": 3.0},
        },
        seeds=5,
        flags=PUSHED | lasting(300),
    ),
    "feedback": Study(
        "Which feedback rule holds the KL at its target?",
        {"constant": {}, "paper": ADAPTIVE, "trust region": ADAPTIVE | {"kl_feedback": "trust_region"}},
        flags=PUSHED | {"kl_target": 1e-4},
    ),
    "schedules": Study(
        "Which schedule of the KL weight (Figure 7), at the published scale and at one that acts here?",
        {
            "two-stage 1e-7 to 1e-5": {"kl_weight": 1e-5, "kl_coef": 1e-7} | WARMING,
            "fixed 1e-5": {"kl_weight": 1e-5},
            "two-stage 1e-7 to 1e-6": {"kl_weight": 1e-6, "kl_coef": 1e-7} | WARMING,
            "two-stage 0.003 to 0.3": {"kl_weight": 0.3, "kl_coef": 0.003} | WARMING,
            "fixed 0.3": {},
            "two-stage 0.003 to 0.03": {"kl_weight": 0.03, "kl_coef": 0.003} | WARMING,
        },
        against={
            "fixed 1e-5": "two-stage 1e-7 to 1e-5",
            "two-stage 1e-7 to 1e-6": "two-stage 1e-7 to 1e-5",
            "fixed 0.3": "two-stage 0.003 to 0.3",
            "two-stage 0.003 to 0.03": "two-stage 0.003 to 0.3",
        },
    ),
    "rates": Study(
        "At which learning rate does the equalizer matter?",
        {
            f"{rate:g}{word}": {"learning_rate": rate} | off
            for rate in (1e-4, 5e-4)
            for word, off in (("", {}), (" off", OFF))
        },
        against={"0.0001 off": "0.0001", "0.0005 off": "0.0005"},
    ),
    "estimators": Study(
        "The exact velocity KL or the published estimator?",
        {
            f"{name}, {updates} updates": {"updates_per_rollout": updates, "step_kl_estimator": name}
            for updates in (1, 2)
            for name in ("exact", "logprob")
        },
        against={f"logprob, {updates} updates": f"exact, {updates} updates" for updates in (1, 2)},
    ),
    "ratio_norm": Study(
        "Does normalizing the log-ratio matter?",
        {"off": {}, "on": {"ratio_norm": True}},
        flags={"updates_per_rollout": 2},
    ),
    "fraction": Study(
        "A quarter of the steps, or all, in the same time?",
        {
            "all": {},
            "25 %, as many iterations": {"timestep_fraction": 0.25},
            "25 %, as much time": {"timestep_fraction": 0.25} | lasting(220),
        },
    ),
    "eta": Study("How much exploration?", {"0.7": {}, "0.3": {"eta": 0.3}, "1": {"eta": 1.0}}),
    "window": Study(
        "Fewer exploring steps?",
        {"all but last": {}, "random 2": {"sde_window": "random:2"}, "sliding 2": {"sde_window": "slide:2"}},
    ),
    "lora": Study(
        "All weights or LoRA?",
        {"all weights": {}, "LoRA": {"use_lora": True, "lora_r": 8, "lora_alpha": 16.0, "learning_rate": 1e-3}},
    ),
    "advantage": Study(
        "Divide advantages by the spread of the group or of the batch?",
        {"group": {}, "batch": {"advantage_std": "batch"}},
    ),
    "published": Study(
        "The published settings of exploration and KL, at the learning rate and batch of the others?",
        {"ours": {}, "published": PUBLISHED},
    ),
    "table2": Study(
        "The paper's Table 2: reward settings, SDEs, with and without KL",
        table2_arms(),
        against=dict.fromkeys(table2_arms(), "B sage, dual moving KL"),
    ),
    "fixed_anchor": Study(
        "At the ordinary pace: the fixed anchor at smaller weights, or the moving one?",
        {"dual moving, 0.3": {}}
        | {f"fixed, {weight:g}": FIXED_KL | {"kl_weight": weight} for weight in (0.3, 0.1, 0.03)},
        seeds=5,
    ),
}  # fmt: skip


def identity(config: Config) -> dict[str, Any]:
    """Everything that determines what a run computes, after a JSON round trip."""
    values = {name: getattr(config, name) for name in FIELDS if name not in LOCATION_FLAGS}
    return json.loads(json.dumps(values))


DEFAULTS = identity(Config(adam_eps=1e-8))  # value of a newer flag in older results
# Former defaults that appear in results: the model now names its layers and its negative prompt, and two other flags,
# which had one legal value each, were removed. They mean the same as the defaults now, so the results stay valid.
FORMER_DEFAULTS = {
    "lora_target_modules": [
        "to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out",
    ],
    "lora_dropout": 0.0,
    "kl_compute_mode": "rollout_phase",
    "negative_prompt": "",
    "reward_fps": 2.0,  # that of VideoAlign's folder
}  # fmt: skip


def updated(values: Flags) -> dict[str, Any]:
    """Update an older identity: flags that are missing or at a former default get today's default."""
    at_former_default = {
        name for name, value in FORMER_DEFAULTS.items() if name in values and values[name] == value
    }
    current = {name: value for name, value in values.items() if name not in at_former_default}
    return DEFAULTS | current


def digest(values: Flags) -> str:
    """A hash of the non-default flags, so that adding or removing flags changes nothing."""
    changed = {
        name: value
        for name, value in updated(values).items()
        if name not in DEFAULTS or value != DEFAULTS[name]
    }
    return hashlib.sha256(json.dumps(changed, sort_keys=True).encode()).hexdigest()[:12]


class StudyPlan:
    """The runs of some studies, each configuration once; seeds outermost, so that a partial study is still paired."""

    def __init__(
        self,
        names: Sequence[str] = (),
        seeds: int | None = None,
        recipe: Path = RECIPE,
        studies: Mapping[str, Study] = STUDIES,
    ) -> None:
        """names: studies to include, all if empty; seeds: maximum per study."""
        unknown = [name for name in names if name not in studies]
        if unknown:
            raise ConfigError(f"there is no study {unknown[0]}; choose from {', '.join(studies)}")
        base = yaml_mapping(recipe.read_text(encoding="utf-8"), str(recipe))
        owners: dict[str, StudyRun] = {}
        self.keys: dict[tuple[str, str, int], str] = {}  # (study, arm, seed) -> digest

        # All studies, even those not requested: the first study owns a run that several share.
        for name, study in studies.items():
            count = min(seeds or study.seeds, study.seeds)
            study_seeds = range(study.first_seed, study.first_seed + count)
            for seed, (arm, flags) in itertools.product(study_seeds, study.arms.items()):
                config = from_values(base, study.flags, flags, {"seed": seed})
                key = digest(identity(config))
                owner = owners.get(key) or StudyRun(name, arm, seed, config)
                measured = tuple(dict.fromkeys((*owner.measured, *study.measured)))
                owners[key] = dataclasses.replace(owner, measured=measured)
                if not names or name in names:
                    self.keys[name, arm, seed] = key
        self.runs = {key: owners[key] for key in self.keys.values()}  # by digest, in study order


# Core-seconds on one core of 2026: of the start, then by phase for 16 clips of the embedded model
STARTUP = 10.0
ROLLOUT_STEP = 0.13
DECODE = 0.55
GOLD_METRICS = 0.55
ANCHOR_STEP = 0.13
UPDATE_STEP = 0.4
# of a validation: for a clip, for each of its denoising steps, and the number of clips
VALIDATION_CLIP = 0.1
VALIDATION_STEP = 0.03
VALIDATION_CLIPS = 64


def core_seconds(config: Config) -> float:
    """Approximate cost of a run on one core: for planning, not for results."""
    every_step = torch.ones(config.num_sampling_steps)
    explored = build_windows(config.window_form, every_step, config.seed).size
    trained = num_trained(explored, config.timestep_fraction)
    trained *= config.group_trained / config.num_generations
    anchor = ANCHOR_STEP if config.trust_region.anchor else 0.0
    iteration = config.num_sampling_steps * ROLLOUT_STEP + DECODE + trained * (UPDATE_STEP + anchor)
    iteration += GOLD_METRICS / config.log_interval
    iteration *= config.batch_size / 16

    clip = VALIDATION_CLIP + VALIDATION_STEP * config.validation_num_inference_steps
    after_start = (
        config.max_steps // config.validation_interval if config.validation_interval else 1
    )
    validations = 1 + after_start
    return STARTUP + config.max_steps * iteration + validations * VALIDATION_CLIPS * clip
