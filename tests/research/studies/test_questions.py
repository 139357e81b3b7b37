"""The table of studies: valid configurations, each once, that do what their names say."""

import pytest

from research.studies.questions import (
    EQUAL_ENERGY,
    RECIPE,
    ROOT,
    SDES,
    STUDIES,
    StudyPlan,
    core_seconds,
    lasting,
)
from sage_grpo.algo.sde import build_schedule, flow_sigmas
from sage_grpo.config.rules import check
from sage_grpo.models.registry import open_backbone
from sage_grpo.train.build import check_steps
from sage_grpo.train.windows import build_windows

PLAN = StudyPlan()
SHIFT = open_backbone(ROOT / "assets" / "tiny").sampling.shift


def configs(name):
    return {arm: PLAN.runs[PLAN.keys[name, arm, 1]].config for arm in STUDIES[name].arms}


def test_every_run_is_sound_and_has_a_name_of_its_own():
    for config in (run.config for run in PLAN.runs.values()):
        check(config)
        sampler = build_schedule(
            config.sde_type, flow_sigmas(config.num_sampling_steps, SHIFT), config.eta
        )
        check_steps(config, build_windows(config.window_form, sampler.stochastic, config.seed))
    names = [run.name for run in PLAN.runs.values()]
    assert len(set(names)) == len(names) and all(set(name) <= set(NAME_LETTERS) for name in names)
    assert len(PLAN.runs) < len(PLAN.keys)


NAME_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-"


def test_the_four_first_questions_have_eight_seeds_and_the_others_three_at_least():
    seeds = [study.seeds for study in STUDIES.values()]
    assert seeds[:4] == [8] * 4 and min(seeds) == 3


@pytest.mark.parametrize("name", STUDIES)
def test_arms_differ_and_are_compared_with_arms_that_exist(name):
    study = STUDIES[name]
    assert len({PLAN.keys[name, arm, 1] for arm in study.arms}) == len(study.arms)
    references = {arm: study.reference(arm) for arm in study.arms}
    assert set(references.values()) <= {*study.arms, None} and any(references.values())
    assert all(arm != reference for arm, reference in references.items())


def test_arms_of_a_pair_differ_in_nothing_but_the_equalizer():
    for arm, config in configs("balancing").items():
        assert config.use_grad_balancing == (not arm.endswith(" off"))
        assert config.sde_type == SDES[arm.removesuffix(" off")]["sde_type"] and config.eta == 0.7


def test_equal_energy_is_equal():
    for name, config in configs("energy").items():
        schedule = build_schedule(
            config.sde_type, flow_sigmas(config.num_sampling_steps, SHIFT), EQUAL_ENERGY[name]
        )
        assert config.eta == EQUAL_ENERGY[name] and config.sde_window == "all_but_last"
        assert schedule.std[:-1].square().sum() == pytest.approx(1.0, abs=5e-4)


def test_strategies_are_the_papers():
    found = {arm: config.trust_region for arm, config in configs("strategies").items()}
    assert {arm: (region.anchor, region.velocity_weight > 0) for arm, region in found.items()} == {
        "dual moving": ("moving", True),
        "none": (None, False),
        "fixed": ("fixed", False),
        "step-wise": (None, True),
        "moving": ("moving", False),
    }
    assert all(
        config.max_steps == 300 and config.updates_per_rollout == 2
        for config in configs("strategies").values()
    )


@pytest.mark.parametrize("iterations", [120, 220, 300])
def test_runs_are_validated_at_start_middle_and_end(iterations):
    flags = lasting(iterations)
    assert (
        flags["max_steps"]
        == 2 * flags["validation_interval"]
        == 2 * flags["save_interval"]
        == iterations
    )
    assert 35 <= iterations / flags["log_interval"] <= 40


def test_fewer_seeds_and_studies():
    plan = StudyPlan(["equalizer"], 2)
    assert set(plan.keys) == {("equalizer", arm, seed) for arm in ("on", "off") for seed in (1, 2)}
    assert [run.name for run in plan.runs.values()] == [
        "last_step-all_but_last-1", "equalizer-off-1", "last_step-all_but_last-2", "equalizer-off-2",
    ]  # fmt: skip


def test_the_cost_follows_the_work():
    full, quarter = (configs("fraction")[arm] for arm in ("all", "25 %, as many iterations"))
    assert 300 < core_seconds(full) < 600 and core_seconds(quarter) < 0.7 * core_seconds(full)
    assert core_seconds(configs("fraction")["25 %, as much time"]) == pytest.approx(
        core_seconds(full), rel=0.1
    )
    assert core_seconds(configs("kl_weight")["0"]) < core_seconds(full)


def test_the_recipe_is_the_base_of_all():
    assert RECIPE.is_file() and configs("last_step")["all but last"] == configs("equalizer")["on"]
