"""Recorded runs with injected faults, healthy ones, and single rules on invented numbers.

Real runs made tests/fixtures/diagnosis.json.gz: python -m research.studies.diagnosis_check --record FILE
"""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from research.studies.diagnosis_check import healthy_runs, read_records, restore
from research.studies.faults import BY_WORLD, FAULTS, HEALTHY
from sage_grpo.config.fields import FIELDS, Config
from sage_grpo.config.parse import from_values
from sage_grpo.config.yaml_files import yaml_mapping
from sage_grpo.parallel.ranks import Ranks
from sage_grpo.runs.case import Case
from sage_grpo.runs.diagnosis import RULES, Finding, diagnose, settings_in
from sage_grpo.runs.folder import RunFolder
from sage_grpo.runs.history import read_run
from sage_grpo.tools.diagnose import SLOWER_THAN_PLANNED
from tests.tools.fake_run import make_run, read_lines, write_lines

ROOT = Path(__file__).parents[2]
RECORDED = read_records(ROOT / "tests" / "fixtures" / "diagnosis.json.gz")
RUNS = [(world, name) for world, runs in RECORDED.items() for name in runs]
HEALTHY_RUNS = [(world, name) for world, name in RUNS if name.startswith(HEALTHY)]
ALL_RULES = [*RULES.values(), SLOWER_THAN_PLANNED]


def names(folder):
    return [finding.name for finding in diagnose(read_run(folder))]


@pytest.fixture
def replay(tmp_path):
    """replay(name) -> the folder of a recorded run."""
    return lambda name, world="small": restore(RECORDED[world][name], tmp_path / "run")


def test_everything_was_recorded():
    assert set(FAULTS) <= set(RECORDED["small"])
    assert {name for world, name in HEALTHY_RUNS if world == "small"} == {*healthy_runs("small")}
    assert {fault.finding for fault in FAULTS.values()} == set(RULES)


@pytest.mark.parametrize(("world", "name"), [run for run in RUNS if run not in HEALTHY_RUNS])
def test_a_fault_is_named_first_or_second(replay, world, name):
    assert BY_WORLD[world][name].finding in names(replay(name, world))[:2]


@pytest.mark.parametrize("world", BY_WORLD)
def test_a_policy_that_runs_away_is_not_held_by_its_anchor(replay, world):
    """The KL of such a policy pulls hard, but it is not what is wrong."""
    assert names(replay("learning rate x 50", world))[0] == "learning rate too high"


@pytest.mark.parametrize(("world", "name"), HEALTHY_RUNS)
def test_a_healthy_run_raises_no_alarm(replay, world, name):
    """But for few clips: in 20 iterations of 24 clips the embedded model's reward does not rise for certain."""
    folder = replay(name, world)
    if world == "embedded":
        assert Case(read_run(folder)).direction == 0
        assert names(folder) in ([], ["too few clips"])
    else:
        assert Case(read_run(folder)).direction == 1
        assert names(folder) == []


@pytest.mark.parametrize(
    ("algorithm", "name"),
    [
        ("nft", "clip range 1e-8, 7 updates per rollout"),
        ("nft", "KL weight 3000, fixed anchor"),
        ("awm", "noise in the last step"),
        ("awm", "eta 4"),
    ],
)
def test_what_an_algorithm_does_not_have_is_not_its_fault(replay, algorithm, name):
    """nft neither clips nor has GRPO's gradient; neither of them explores by an SDE."""
    folder = replay(name)
    assert FAULTS[name].finding in names(folder)
    with (folder / "config.yaml").open("a") as config:
        config.write(f"algorithm: {algorithm}\n")
    assert FAULTS[name].finding not in names(folder)


@pytest.mark.parametrize(
    ("name", "direction"), [("learning rate x 50", -1), ("learning rate / 10,000", 0)]
)
def test_the_direction_of_the_reward(replay, name, direction):
    assert Case(read_run(replay(name))).direction == direction


@pytest.mark.parametrize(
    "prefix",
    ["signal/", "per_step", "policy/", "kl/", "reward/", "time/", "schedule", "updates", "lr"],
)
@pytest.mark.parametrize("name", ["healthy-1", "learning rate / 10,000"])
def test_what_was_not_recorded_raises_nothing(replay, prefix, name):
    folder = replay(name)
    before = names(folder)
    lines = [
        {k: v for k, v in line.items() if not k.startswith(prefix)} for line in read_lines(folder)
    ]
    write_lines(folder, lines)
    assert set(names(folder)) <= set(before)


@pytest.mark.parametrize("count", [0, 1, 2, 5, 12])
@pytest.mark.parametrize(
    "name", ["healthy-1", "learning rate x 50", "reward depends on the prompt only"]
)
def test_a_run_that_has_just_begun(replay, name, count):
    """A trend needs iterations: nothing is said about one before."""
    folder = replay(name)
    shutil.rmtree(folder / "validation")
    lines = [line for line in read_lines(folder) if line["kind"] != "validation"]
    write_lines(folder, lines[: 1 + count])
    assert count >= 8 or Case(read_run(folder)).direction is None
    assert count >= 8 or not [name for name in names(folder) if RULES[name].only_if_flat_or_falling]


def test_settings_decide_what_a_number_means(tmp_path):
    """Ratios other than 1 are a fault with one update per rollout; with two, the clip matters."""
    folder = make_run(tmp_path / "run", iterations=20, every=20, prompts=4)
    assert names(folder) == ["first ratio"]
    (folder / "config.yaml").write_text("updates_per_rollout: 2\n")
    assert names(folder) == ["clipped on one side"]
    (folder / "config.yaml").unlink()  # the settings are not known
    assert names(folder) == []


def test_a_run_that_stopped_says_why(replay):
    folder = replay("healthy-1")
    (folder / "status.json").write_text(
        json.dumps({"state": "failed", "message": "30% of the rewards failed: gone"})
    )
    (found,) = diagnose(read_run(folder))
    assert (found.name, found.evidence) == (
        "rewards fail",
        "the run stopped: 30% of the rewards failed: gone",
    )
    write_lines(folder, read_lines(folder)[:1])  # before the first iteration
    assert names(folder) == ["rewards fail"]


def test_the_reason_of_an_evidence_is_a_number(replay):
    (found, *_) = diagnose(read_run(replay("a fifth of the reward calls fails")))
    share = float(
        re.match(
            r"([\d.]+)% of the rewards failed, first with: walls: ConnectionError", found.evidence
        )[1]
    )
    assert 15 < share < 25


def test_the_page_has_every_finding_in_its_order():
    page = (ROOT / "docs" / "diagnosis.md").read_text()
    rows = page[page.index("|---|") : page.index("Three of")]
    order = re.findall(r"^\| ([\w ]+?)( \*)? \|", rows, re.MULTILINE)
    assert [(name, bool(star)) for name, star in order] == [
        (rule.name, rule.only_if_flat_or_falling) for rule in ALL_RULES
    ]


@pytest.mark.parametrize("rule", ALL_RULES, ids=lambda rule: rule.name)
def test_a_remedy_names_flags_that_exist(rule):
    assert rule.cause.endswith(".") and rule.remedy.endswith(".")
    flags = set(re.findall(r"--(\w+)", rule.remedy + rule.remedy_if_set))
    assert flags <= set(FIELDS) and (flags or rule.name in ("slow", "rewards repeat"))


@pytest.mark.parametrize("rule", ALL_RULES, ids=lambda rule: rule.name)
def test_a_remedy_is_never_a_setting_that_the_run_has(rule):
    for flag, word in settings_in(rule.remedy).items():
        try:
            config = from_values({flag: yaml_mapping(f"value: {word}", "a remedy")["value"]})
        except (TypeError, ValueError):  # a word of the sentence, not a value
            continue
        assert f"--{flag} {word}" not in Finding(rule, "", config).remedy


def test_a_run_with_the_equalizer_is_not_told_to_use_it(replay):
    folder = replay("equalizer off")
    (finding,) = [f for f in diagnose(read_run(folder)) if f.name == "one step dominates"]
    assert finding.remedy == "--use_grad_balancing True."
    config_file = folder / "config.yaml"
    settings = config_file.read_text()
    assert settings.count("use_grad_balancing: false") == 1
    config_file.write_text(settings.replace("grad_balancing: false", "grad_balancing: true"))
    (finding,) = [f for f in diagnose(read_run(folder)) if f.name == "one step dominates"]
    assert "--use_grad_balancing" not in str(finding) and "--sde_window" in finding.remedy


def test_the_kl_is_measured_against_advantages_of_their_size(replay):
    """With tiny advantages the gradient is the KL's, whose steps differ without the equalizer's doing."""
    folder = replay("equalizer off")
    assumed = Case(read_run(folder)).kl_pull
    assert 0 < assumed < 1
    lines = read_lines(folder)
    for line in lines:
        if line["kind"] == "train":
            line["signal/advantage_size"] = 1e-4
    write_lines(folder, lines)
    assert Case(read_run(folder)).kl_pull == pytest.approx(1e4 * assumed)
    assert "one step dominates" not in names(folder)


def test_only_clips_that_are_trained_count_in_an_update(replay):
    """The KL's pull grows with the square root of the pairs: a quarter of the clips, half of the pull."""
    folder = replay("equalizer off")
    case = Case(read_run(folder))
    train_clips = case.config.num_generations // 4
    config = folder / "config.yaml"
    config.write_text(f"{config.read_text()}\ntrain_clips: {train_clips}\n")
    chosen = Case(read_run(folder))
    assert chosen.clips_per_rollout == case.clips_per_rollout == 4 * chosen.trained_clips
    assert chosen.kl_pull == pytest.approx(case.kl_pull / 2)


def with_per_step(folder, key, number):
    """Add numbers by denoising step to the training lines: number(step) where the KL is known, else 0."""
    lines = read_lines(folder)
    for line in lines:
        if line["kind"] == "train":
            kl = line["per_step"]["kl_anchor"]
            line["per_step"][key] = [
                0.0 if value is None else number(step) for step, value in enumerate(kl)
            ]
    write_lines(folder, lines)


def test_pairs_count_at_the_steps_that_they_trained(replay):
    """The KL's pull grows with the square root of the pairs, which windows spread unevenly over the steps."""
    folder = replay("equalizer off")
    case = Case(read_run(folder))
    clips = case.trained_clips
    with_per_step(folder, "count", lambda step: clips)
    assert Case(read_run(folder)).kl_pull == pytest.approx(case.kl_pull)
    with_per_step(folder, "count", lambda step: clips / 4)
    assert Case(read_run(folder)).kl_pull == pytest.approx(case.kl_pull / 2)

    # two steps have all pairs: as if the others were not trained
    with_per_step(folder, "count", lambda step: clips if step in (2, 3) else 0)
    uneven = Case(read_run(folder)).kl_pull
    lines = read_lines(folder)
    for line in lines:
        if line["kind"] == "train":
            kl = line["per_step"]["kl_anchor"]
            line["per_step"] = {"kl_anchor": [None, None, *kl[2:4], *[None] * (len(kl) - 4)]}
    write_lines(folder, lines)
    assert uneven == pytest.approx(Case(read_run(folder)).kl_pull)
    assert uneven != pytest.approx(case.kl_pull, rel=0.1)


def test_the_kl_has_a_gradient_scale_of_its_own(replay):
    """With ratio_norm it is not that of the policy loss, with use_kl_balancing not that of its equalizer."""
    folder = replay("equalizer off")
    assumed = Case(read_run(folder)).kl_pull
    lines = read_lines(folder)
    schedule = lines[0]["schedule"]
    schedule["kl_gradient_scale"] = [3 * value for value in schedule["gradient_scale"]]
    write_lines(folder, lines)
    change(folder, {"use_kl_balancing": True})
    assert Case(read_run(folder)).kl_pull == pytest.approx(3 * assumed)


def change(folder, settings=(), **metrics):
    """Replace settings of a restored run, and metrics of all its iterations."""
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | dict(settings)))
    lines = read_lines(folder)
    for line in lines:
        if line["kind"] == "train":
            line.update({name.replace("__", "/"): value for name, value in metrics.items()})
    write_lines(folder, lines)


@pytest.mark.parametrize(("weight_decay", "is_wrong"), [(0.01, True), (500.0, False)])
def test_weight_decay_may_move_weights_away_from_the_anchor(replay, weight_decay, is_wrong):
    """In 2 updates at a learning rate of 1e-3, a decay of 500 halves weights of 0.1 twice."""
    folder = replay("healthy-1")
    moved = {
        "signal__anchor_moved": 0.05,
        "signal__weight_rms": 0.1,
        "kl__anchor_age": 2,
        "lr": 1e-3,
    }
    change(folder, {"weight_decay": weight_decay}, **moved)
    assert ("wrong anchor" in names(folder)) == is_wrong


BREAK = {"kind": "break", "step": 9, "series": ["train"], "changed": {}}


@pytest.mark.parametrize("breaks", [[], [BREAK]])
@pytest.mark.parametrize(("last", "is_wrong"), [(12, False), (13, True)])
def test_an_anchor_may_be_as_far_as_earlier_learning_rates_led(replay, breaks, last, is_wrong):
    """A resume divides the learning rate by 100 after iteration 9; an anchor lasts from 7 to 12, the next from 13."""
    folder = replay("healthy-1")
    change(folder, {"update_ref_model_step": 6}, signal__weight_rms=0.0, signal__anchor_moved=0.005)
    head, *lines = (line for line in read_lines(folder) if line["kind"] in ("run", "train"))
    for line in lines:
        line["kl/anchor_age"] = (line["step"] - 1) % 6 + 1
        line["lr"] = 1e-3 if line["step"] <= 9 else 1e-5
        if line["step"] <= 9:
            line["signal/anchor_moved"] = 1e-3
    resumed = [head | {"step": 9}, *breaks]
    kept = [line for line in lines[9:] if line["step"] <= last]
    write_lines(folder, [head, *lines[:9], *resumed, *kept])
    assert ("wrong anchor" in names(folder)) == is_wrong


@pytest.mark.parametrize(("last", "is_wrong"), [(12, False), (13, True)])
def test_an_anchor_older_than_the_folder_is_not_judged(replay, last, is_wrong):
    """A run is resumed after iteration 9 into a new folder, which does not say at which rates its anchor was left."""
    folder = replay("healthy-1")
    change(folder, {"update_ref_model_step": 6}, signal__weight_rms=0.0, signal__anchor_moved=0.005)
    head, *lines = (line for line in read_lines(folder) if line["kind"] in ("run", "train"))
    for line in lines:
        line["kl/anchor_age"] = (line["step"] - 1) % 6 + 1
        line["lr"] = 1e-5
    kept = [line for line in lines if 9 < line["step"] <= last]
    write_lines(folder, [head | {"step": 9}, *kept])
    assert ("wrong anchor" in names(folder)) == is_wrong


@pytest.mark.parametrize("in_new_folder", [False, True])
def test_an_anchor_stays_the_same_between_the_updates_of_accumulated_gradients(
    replay, in_new_folder
):
    """One update for every four iterations, and one anchor; a resume after the 9th lowers the learning rate."""
    folder = replay("healthy-1")
    change(folder, {"update_ref_model_step": 100}, signal__weight_rms=0.0)
    head, *lines = (line for line in read_lines(folder) if line["kind"] in ("run", "train"))
    for line in lines:
        line["updates"] = line["kl/anchor_age"] = line["step"] // 4
        line["lr"] = 1e-3 if line["step"] <= 9 else 1e-5
        line["signal/anchor_moved"] = 0.0 if line["step"] < 8 else 3e-3
    before = [] if in_new_folder else [head, *lines[:9]]
    write_lines(folder, [*before, head | {"step": 9}, *lines[9:]])
    assert "wrong anchor" not in names(folder)


@pytest.mark.parametrize("world", BY_WORLD)
def test_a_learning_rate_that_is_too_low_comes_before_advice_to_lower_it(replay, world):
    folder = replay("learning rate / 10,000", world)
    assert names(folder)[0] == "learning rate too low"


def test_a_warm_up_that_does_not_end_is_named(replay):
    folder = replay("learning rate / 10,000")
    change(folder, {"warmup_steps": 1000, "learning_rate": 2e-3})
    (finding, *_) = diagnose(read_run(folder))
    assert finding.name == "learning rate too low"
    assert "of 1000 steps of warm-up" in finding.evidence and "--warmup_steps" in finding.remedy


@pytest.mark.parametrize(
    ("algorithm", "unit"), [("grpo", "exploration noise"), ("awm", "size of a velocity")]
)
def test_drift_is_told_in_a_unit_that_the_algorithm_has(replay, algorithm, unit):
    folder = replay("learning rate x 50")
    change(folder, {"algorithm": algorithm})
    (evidence,) = [
        finding.evidence
        for finding in diagnose(read_run(folder))
        if finding.name == "learning rate too high"
    ]
    assert evidence.endswith(f"where 1 is the {unit}")


SPAN = 20  # iterations; the training reward rises in the first half


@pytest.mark.parametrize(
    ("first", "rises_until", "is_found"), [(0, SPAN, True), (10, SPAN, True), (10, 10, False)]
)
def test_validation_is_compared_with_training_in_its_own_span(
    tmp_path, first, rises_until, is_found
):
    """Validations at `first` and at the end are equal; what training gained before them does not count."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(f"max_steps: {SPAN}\n")
    lines = [{"kind": "run", "step": 0}]
    for step in range(1, SPAN + 1):
        reward = 0.1 * min(step, rises_until) + 0.01 * (-1) ** step
        lines.append({"kind": "train", "step": step, "reward/total": reward, "updates": 2 * step})
    for step in (first, SPAN):
        lines.append({"kind": "validation", "step": step})
        validation = folder / "validation" / f"step-{step:06d}"
        validation.mkdir(parents=True)
        clips = [
            {"file": "0.mp4", "prompt": str(i), "seed": 0, "scores": {"total": 0.1 * i}}
            for i in range(8)
        ]
        (validation / "clips.json").write_text(json.dumps(clips))
    write_lines(folder, lines)
    assert ("validation unlike training" in names(folder)) == is_found
    assert Case(read_run(folder)).validated_updates == 2 * (SPAN - first)


@pytest.mark.parametrize(
    ("shares", "is_found"), [((-0.3, 0.1), True), ((-4.0, 1.0), False), ((-1.5, 0.5), False)]
)
def test_a_share_of_signal_that_is_too_noisy_to_judge(replay, shares, is_found):
    """Even if it is far below 0, which it can be only by chance; the clips it takes are more than there are."""
    folder = replay("reward is a checksum of the clip, grpo")
    lines = read_lines(folder)
    training = [line for line in lines if line["kind"] == "train"]
    for number, line in enumerate(training):
        line["policy/grad_norm"] = 1.0 if number < 10 else 1e-3
        line["signal/gradient"] = shares[number % 2]
    write_lines(folder, lines)
    evidence = [f.evidence for f in diagnose(read_run(folder)) if f.name == "too few clips"]
    assert bool(evidence) == is_found
    for text in evidence:
        assert int(re.search(r"about (-?\d+) clips", text)[1]) > 64


@pytest.mark.parametrize(("flat_groups", "is_found"), [(0.9, True), (0.5, False)])
def test_a_reward_that_is_constant_for_half_of_the_prompts(replay, flat_groups, is_found):
    """2 groups per iteration, about one of which is flat by the luck of the draw."""
    folder = replay("learning rate / 10,000")
    change(folder, reward__flat_groups=flat_groups)
    assert ("flat groups" in names(folder)) == is_found


def test_training_prints_the_first_finding_when_it_changes(replay, capsys):
    folder = replay("learning rate x 50")
    run = RunFolder(
        Config(output_dir=str(folder), overwrite=True), Ranks(0, 1, torch.device("cpu"))
    )
    for step in (25, 50):
        run.diagnose(step)
    text = capsys.readouterr().err
    assert text.startswith("note: iteration 25: learning rate too high: the reward changed by ")
    assert text.count("\n") == 1
    (folder / "config.yaml").unlink()
    run.diagnose(75)
    assert capsys.readouterr().err == "note: iteration 75: no finding any more\n"
    (folder / "metrics.jsonl").write_text("{\n{\n")
    run.diagnose(100)
    assert "no diagnosis: " in capsys.readouterr().err
