"""KL strategies at matched weights: the search, the rule that ends it, and the comparison that follows."""

import json
import math

import pytest

from research.studies import kl_strategies, records, second_edition
from research.studies.kl_strategies import (
    COMPARED,
    SEARCH,
    STRATEGIES,
    WEIGHTS,
    choose,
    matching_weight,
)
from research.studies.questions import StudyPlan
from research.studies.result_tables import arms_of, reached
from research.studies.second_edition import RECIPE, config_of, page, studies
from sage_grpo.config.rules import check
from sage_grpo.exit_codes import DONE, WRONG_INPUT
from tests.research.studies.invented_results import invented

# of training without a KL 0.04, so the target is 0.02
REACHED = {
    "dual moving": (0.04, 0.02, 0.01),
    "fixed": (0.04, 0.01, 0.005),
    "step-wise": (0.039, 0.03, 0.025),
    "moving": (0.01, 0.005, 0.001),
    "dual fixed": (0.04, math.nan, 0.01),
}


@pytest.fixture
def places(tmp_path, monkeypatch):
    """The folders and files of the second edition, in a temporary folder."""
    names = {
        "RESULTS": "second.jsonl",
        "CHOSEN": "rates.json",
        "WEIGHTS": "kl_weights.json",
        "SUMMARY": "second.md",
    }
    for name, file in names.items():
        monkeypatch.setattr(second_edition, name, tmp_path / file)
    return tmp_path


def write_results(path, study, path_kl, **others):
    """Invented results of all runs of a study: path_kl(arm, seed) and other measures by `invented`."""
    plan = StudyPlan([study], None, RECIPE, studies())
    for run in plan.runs.values():
        record = invented(run, **{name: value(run.arm, run.seed) for name, value in others.items()})
        kl = path_kl(run.arm, run.seed)
        record["path_kl"] = {"mean": None if math.isnan(kl) else kl, "stderr": 1e-4, "clips": 64}
        records.append(path, record)


def write_search(path):
    def kl(arm, seed):
        strategy, _, weight = arm.rpartition(", ")
        return REACHED[strategy][WEIGHTS[strategy].index(float(weight))] if strategy else 0.04

    write_results(path, SEARCH, kl)


def test_strategies_are_the_papers():
    regions = {name: config_of(flags).trust_region for name, flags in STRATEGIES.items()}
    assert {name: (one.anchor, one.velocity_weight) for name, one in regions.items()} == {
        "dual moving": ("moving", 0.1), "none": (None, 0.0), "fixed": ("fixed", 0.0), "step-wise": (None, 1.0),
        "moving": ("moving", 0.0), "dual fixed": ("fixed", 0.1),
    }  # fmt: skip


@pytest.mark.parametrize("name, runs", [(SEARCH, 16), (COMPARED, 48)])
def test_runs_are_sound_and_end_with_their_distance(name, runs):
    plan = StudyPlan([name], None, RECIPE, studies())
    assert len(plan.runs) == runs and all(
        run.measured == ("path_kl",) for run in plan.runs.values()
    )
    for config in (run.config for run in plan.runs.values()):
        check(config)
        assert config.batch_size // config.num_generations == 16 and config.updates_per_rollout == 2
        assert config.max_steps == config.validation_interval == 30 and config.validate_at_step0
    assert not any(
        run.measured for run in StudyPlan(["settings"], None, RECIPE, studies()).runs.values()
    )


def test_arms_differ_in_nothing_but_the_kl():
    for flags in (*studies()[SEARCH].arms.values(), *studies()[COMPARED].arms.values()):
        assert set(flags) <= {
            "kl_weight", "use_moving_KL", "use_dual_kl", "dual_kl_moving_weight", "dual_kl_step_weight"
        }  # fmt: skip
    assert next(iter(studies()[COMPARED].arms)) == "dual moving"
    assert (
        config_of().kl_weight in WEIGHTS["dual moving"]
    )  # the recipe's own weight is one of those searched


@pytest.mark.parametrize(
    "kls, weight",
    [
        ({0.1: 0.04, 1.0: 0.02, 10.0: 0.01}, 1.0),  # exactly there
        ({0.1: 0.04, 10.0: 0.01}, 1.0),  # half way in the logarithms of both
        ({10.0: 0.01, 0.1: 0.04}, 1.0),
        ({0.1: 0.08, 10.0: 0.01}, 2.2),  # 0.1 * 100^(2/3) = 2.15
        ({0.1: 0.04, 1.0: 0.03, 10.0: 0.025}, 10.0),  # all too far: the nearest
        ({0.1: 0.018, 1.0: 0.01}, 0.1),  # all too close
        ({0.1: 0.1, 1.0: 0.019, 10.0: 0.0189}, 0.93),  # between neighbours, not from end to end
        ({0.1: 0.019, 1.0: 0.019}, 0.1),
        ({0.1: 0.04, 1.0: math.nan, 10.0: 0.01}, 1.0),  # a run without a KL is left out
    ],
)
def test_the_weight_is_the_one_that_meets_the_target(kls, weight):
    assert matching_weight(kls, 0.02) == weight


def test_no_weight_without_a_measured_kl():
    assert math.isnan(matching_weight({0.1: math.nan, 1.0: 0.0}, 0.02))


def test_weights_are_chosen_from_a_finished_search(places):
    write_search(places / "second.jsonl")
    found = choose(places / "second.jsonl")
    assert found["target"] == pytest.approx(0.02) and found["reached"]["fixed"] == {
        "0.003": 0.04,
        "0.03": 0.01,
        "0.3": 0.005,
    }
    assert found["weights"] == {
        "dual moving": 0.06, "fixed": 0.0095, "step-wise": 30.0, "moving": 0.01, "dual fixed": 0.03
    }  # fmt: skip
    leave_out(places / "second.jsonl", "fixed, 0.03")
    weights = choose(places / "second.jsonl")["weights"]
    assert "fixed" not in weights and len(weights) == 4
    leave_out(places / "second.jsonl", "none")
    assert choose(places / "second.jsonl")["weights"] == {}


def leave_out(path, arm):
    """Remove the runs of an arm from a file of results."""
    runs = records.read_lines(path)
    records.write_lines(path, [record for record in runs if record["arm"] != arm])
    assert len(records.read_lines(path)) == len(runs) - 1


@pytest.mark.slow
def test_nothing_is_compared_before_the_weights_are_chosen(places, monkeypatch, capsys):
    """Slow: draws the study's figures."""
    started = []
    monkeypatch.setattr(
        second_edition.ablate, "main", lambda arguments, found: started.append(found) or DONE
    )
    for arguments in (["--studies", COMPARED], []):
        assert second_edition.main(arguments) == WRONG_INPUT and not started
        assert f"has no weight for dual moving: run --studies {SEARCH}" in capsys.readouterr().err
    assert (
        second_edition.main(["--studies", SEARCH]) == DONE
        and second_edition.main(["--list"]) == DONE
    )
    before = page()
    write_search(places / "second.jsonl")
    assert (
        second_edition.main(["--choose"]) == DONE
        and second_edition.main(["--studies", COMPARED]) == DONE
    )
    weights = {arm: config_of(flags).kl_weight for arm, flags in started[-1][COMPARED].arms.items()}
    assert weights == choose(places / "second.jsonl")["weights"] | {"none": 0.0}
    assert page() == before  # what was registered does not depend on what was found


def test_a_search_that_is_not_finished_leaves_a_file_that_can_be_read(places):
    assert second_edition.main(["--choose"]) == DONE
    assert (
        json.loads((places / "kl_weights.json").read_text(), parse_constant=pytest.fail)["target"]
        is None
    )
    assert kl_strategies.missing(second_edition.kl_weights()) == list(WEIGHTS)


@pytest.mark.slow
def test_the_summary_tells_which_arms_are_matched(places):
    """Slow: draws the study's figures."""
    factors = {"none": 2.0, "fixed": 1.2, "step-wise": 1.3, "moving": 0.79}
    write_search(places / "second.jsonl")
    assert second_edition.main(["--choose"]) == DONE
    write_results(
        places / "second.jsonl", COMPARED,
        lambda arm, seed: 0.02 * factors.get(arm, 1.0) * (1 + 0.1 * seed),
        gain=lambda arm, seed: 0.3 + 0.2 * (arm == "fixed") + 0.01 * (-1) ** (seed + len(arm)),
    )  # fmt: skip
    plan = StudyPlan([COMPARED], None, RECIPE, studies())
    table = reached(
        studies()[COMPARED],
        arms_of(plan, COMPARED, studies()[COMPARED], records.read_all(places / "second.jsonl")),
    )
    cells = {
        line.split(" | ")[0][2:]: line[:-2].split(" | ")[1:]
        for line in table.splitlines()
        if line.startswith("| ")
    }
    assert cells["dual moving"] == ["8", "0.06", "0.0286", "–", ""]
    assert cells["none"] == ["8", "0", "0.0573", "2.00 (2.00 to 2.00)", "no"]
    assert cells["fixed"][1:] == ["0.0095", "0.0344", "1.20 (1.20 to 1.20)", "yes"]
    assert {arm: cells[arm][-1] for arm in ("step-wise", "moving", "dual fixed")} == {
        "step-wise": "no", "moving": "no", "dual fixed": "yes"
    }  # fmt: skip
    assert second_edition.main(["--summary"]) == DONE
    text = (places / "second.md").read_text()
    assert table in text and "Decided at the end: fixed minus dual moving: reward" in text
