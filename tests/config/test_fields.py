"""The table of flags: its sections, its choices, and that no flag is without effect."""

import ast
import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest

from sage_grpo.algo import grpo, sde, solver, trust_region
from sage_grpo.config import fields
from sage_grpo.config.fields import FIELDS, SECTIONS, Config, flag_info, resolve
from sage_grpo.config.parse import from_values
from sage_grpo.models.backbone import Sampling
from sage_grpo.train.algorithms import registry

ROOT = Path(__file__).parents[2]
SAMPLING = Sampling(frames=9, height=32, width=48, fps=8, shift=3.0, guidance=2.0, num_steps=20)
BACKBONE = SimpleNamespace(
    sampling=SAMPLING,
    rollout_size=(5, 16, 24),
    lora_targets=("to_q", "to_k"),
    negative_prompt="dull",
)


def test_sections_hold_every_flag_once_in_the_order_of_a_stored_configuration():
    in_sections = [
        field.name for section in SECTIONS.values() for field in dataclasses.fields(section)
    ]
    assert in_sections == list(FIELDS) == list(dataclasses.asdict(Config()))


@pytest.mark.parametrize("name", FIELDS)
def test_a_default_of_none_is_explained(name):
    assert (getattr(Config(), name) is None) == (flag_info(name).default_text is not None)


def test_every_flag_for_a_file_or_folder_is_a_path():
    endings = ("_dir", "_root", "_path", "_cache", "_prompts", "_checkpoint", "_rubric")
    named_like_paths = {name for name in FIELDS if name.endswith(endings)}
    paths = {name for name in FIELDS if flag_info(name).is_path}
    assert named_like_paths - {"num_validation_prompts"} == paths


def test_the_model_fills_in_what_was_not_given():
    """Rollouts are smaller than what the model is meant for; validation takes the latter, whatever the rollout has."""
    config = resolve(from_values({"height": 64, "timestep_shift": 7.0}), BACKBONE, "cpu")
    assert (config.num_frames, config.height, config.width, config.fps) == (5, 64, 24, 8)
    assert (config.timestep_shift, config.guidance_scale, config.dtype) == (7.0, 2.0, "fp32")
    assert (config.validate_video_length, config.validation_fixed_size) == (9, "32x48")
    assert (config.validation_num_inference_steps, config.validation_timestep_shift) == (20, 3.0)
    assert config.lora_target_modules == ("to_q", "to_k")
    assert config.negative_prompt == "dull"


def test_what_was_given_stays():
    given = from_values({"negative_prompt": "", "lora_target_modules": "to_v"})
    config = resolve(given, BACKBONE, "cuda")
    assert config.negative_prompt == ""
    assert config.lora_target_modules == ("to_v",)
    assert config.dtype == "bf16"


CHOICES = {  # flag: the table in the code that computes
    "sde_type": sde.SDES.keys() - {"ode"},  # which explores nothing
    "advantage_std": grpo.ADVANTAGE_STDS,
    "kl_schedule": trust_region.SCHEDULES,
    "kl_feedback": trust_region.FEEDBACKS,
    "step_kl_estimator": trust_region.ESTIMATORS,
    "validation_solver": solver.SOLVERS,
    "tail_solver": set(solver.SOLVERS) - {"euler"},
    "algorithm": registry.ALGORITHMS,
}


@pytest.mark.parametrize("name", CHOICES)
def test_choices_are_those_of_the_math(name):
    """Written down a second time, because `--help` does not wait for torch."""
    choices = flag_info(name).choices
    assert len(choices) == len(set(choices))
    assert set(choices) == set(CHOICES[name])


def test_programs_that_offer_samplers_and_solvers_offer_those_of_the_flags():
    assert flag_info("sde_type").choices == fields.SDE_TYPES
    assert flag_info("validation_solver").choices == fields.SOLVERS


def names_in(tree: ast.AST) -> set[str]:
    """Names of attributes and strings: `config.eta`, or "eta" in a list that getattr walks through."""
    nodes = list(ast.walk(tree))
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return attributes | {
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def test_every_flag_is_read_somewhere():
    files = [*(ROOT / "sage_grpo").rglob("*.py"), ROOT / "post_train.py"]
    readers = [ast.parse(path.read_text()) for path in files if path.parent.name != "config"]
    table = ast.parse((ROOT / "sage_grpo" / "config" / "fields.py").read_text())
    readers += [node for node in ast.walk(table) if isinstance(node, ast.FunctionDef)]
    used = set().union(*map(names_in, readers))
    assert not sorted(set(FIELDS) - used)
