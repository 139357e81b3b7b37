"""A series of results ends where a resumed run changes its yardstick, and nothing is compared across that point."""

import json
import re
import shutil

import pytest

from sage_grpo import plugins
from sage_grpo.runs.hacking import divergence
from sage_grpo.runs.history import column, read_run
from sage_grpo.tools import diagnose
from sage_grpo.tools.paired import TOTAL, compared, validation_clips
from sage_grpo.tools.report.page import before_after, page, print_summary, tiles
from sage_grpo.train.guards import TrainingError
from tests.smallest_run import slow

REWARD = """
class Light:
    names = ("light", "dark")
    def score(self, clips, prompts):
        means = [{factor} * clip.float().mean().item() / 255 for clip in clips]
        return {{"light": means, "dark": [-mean for mean in means]}}

class Failing(Light):
    def score(self, clips, prompts):
        raise RuntimeError("no answer")

class Same(Light):
    def score(self, clips, prompts):
        return {{name: [0.0] * len(clips) for name in self.names}}
"""


@pytest.fixture
def lit(undrawn, flags, tmp_path):
    """Flags of a run of four iterations that cannot learn, with a reward of the user's and eight held-out prompts."""
    (tmp_path / "own.py").write_text(REWARD.format(factor=1))
    places = ("left", "right", "up", "down")
    held_out = tmp_path / "held_out.txt"
    held_out.write_text(
        "".join(
            f"a {color} circle moving {place}\n" for color in ("red", "green") for place in places
        )
    )
    return flags | {
        "reward_model": f"{tmp_path / 'own.py'}:Light",
        "reward_weights": {"light": 1.0},
        "validation_prompts": str(held_out),
        "learning_rate": 0.0,
        "use_lora": True,
        "max_steps": 4,
        "save_interval": 2,
        "validation_interval": 2,
        "validate_at_step0": True,
    }


@pytest.fixture
def train(make, lit):
    """train(flag=value, ...) -> the run that was trained or resumed, as it is read back."""

    def trained(**changes):
        for name in ("reward_model", "holdout_reward"):
            plugins.trust((lit | changes).get(name))
        trainer = make(**lit | changes)
        trainer.train()
        trainer.run.close()
        return read_run(trainer.run.path)

    return trained


MORE = {"max_steps": 8, "resume_from_checkpoint": "auto"}


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"factor": 2}, "reward Light code"),
        slow({"reward_weights": {"light": 2.0}}, "reward weights"),
        slow({"reward_weights": {"light": 1.0, "dark": 3.0}}, "reward weights"),
        slow({"reward_model": "own.py:Same"}, "reward names"),
    ],
    ids=["doubled reward", "doubled weight", "other weights", "another reward with that score"],
)
def test_a_changed_reward_begins_the_comparison_anew(train, tmp_path, capfd, changes, named):
    """Slow: changes that are not in the reward's code."""
    train()
    (tmp_path / "own.py").write_text(REWARD.format(factor=changes.get("factor", 1)))
    changes = {name: value for name, value in changes.items() if name != "factor"}
    if "reward_model" in changes:
        changes["reward_model"] = f"{tmp_path}/{changes['reward_model']}"
    run = train(**MORE, **changes)
    told = capfd.readouterr().err
    (line,) = run.breaks
    assert (line["step"], line["series"]) == (4, ["train", "validation"])
    assert set(line["changed"]) == {named}
    assert column(run.full_lines, "step").tolist() == [5, 6, 7, 8]
    assert column(run.validations, "step").tolist() == [4, 6, 8]
    assert [column(part, "step").tolist() for part in run.earlier_full_lines] == [[1, 2, 3, 4]]
    assert [column(part, "step").tolist() for part in run.earlier_validations] == [[0, 2, 4]]

    # the policy never changed, so no comparison may find a difference
    sentence = f"up to iteration 4 are not compared with later ones, because the yardstick changed: {named} "
    assert sentence in told
    clips = before_after(run)
    assert list(clips) == ["iteration 4", "iteration 8"]
    cell = compared(clips, total=True)["systems"]["iteration 8"]["columns"][TOTAL]
    assert (cell["difference"], cell["verdict"]) == (0, "not significant")

    # the terminal
    print_summary(run.folder)
    printed = capfd.readouterr().out
    assert sentence in printed
    assert "iteration 8 minus iteration 4" in printed
    assert "better" not in printed

    # the report
    text = page(run)
    assert text.count('<ul class="breaks">') == 1
    assert sentence in text.replace("&gt;", ">")
    (total,) = [tile.value for tile in tiles(run) if tile.name == "total reward"]
    before, after = total.split(" → ")
    assert before == after

    # the diagnosis
    diagnose.main([str(run.folder)])
    printed = capfd.readouterr().out
    assert sentence in printed
    assert "rises" not in printed and "falls" not in printed

    # the model card
    card = (run.folder / "checkpoints" / "step-000008" / "README.md").read_text()
    assert "after iteration 4" in card
    assert not re.search(r"^\| [02] \|", card, re.MULTILINE)


def test_an_unchanged_run_has_one_series(train):
    train()
    run = train(**MORE)
    assert run.breaks == []
    assert column(run.full_lines, "step").tolist() == list(range(1, 9))
    assert column(run.validations, "step").tolist() == [0, 2, 4, 6, 8]
    kinds = [
        json.loads(line)["kind"] for line in (run.folder / "metrics.jsonl").read_text().splitlines()
    ]
    assert kinds.count("break") == 0


# changed settings, and the series that end with them
YARDSTICKS = [
    ({"validation_num_inference_steps": 3}, ["validation"]),
    ({"validation_solver": "dpm"}, ["validation"]),
    ({"validation_global_seed": 1}, ["validation"]),
    ({"validation_fixed_size": "16x24"}, ["validation"]),
    ({"validate_video_length": 7}, ["validation"]),
    ({"validation_timestep_shift": 2.0}, ["validation"]),
    ({"num_validation_prompts": 7}, ["validation"]),
    ({"holdout_reward": "motion"}, []),  # there is nothing yet to compare it with
    ({"guidance_scale": 2.0}, ["train", "validation"]),
    ({"fps": 4}, ["train", "validation"]),
    ({"eta": 0.3}, ["train"]),
    ({"num_sampling_steps": 2}, ["train"]),
    ({"sde_type": "flow_grpo"}, ["train"]),
    ({"seed": 7}, ["train"]),
    ({"kl_weight": 0.2}, []),
    ({"learning_rate": 1e-6}, []),
    ({"reward_batch_size": 2}, []),
]


def test_each_series_ends_with_its_own_yardstick(train, tmp_path):
    short = {"max_steps": 1, "save_interval": 0, "validate_at_step0": False}
    started = train(**short).folder
    for number, (changes, series) in enumerate(YARDSTICKS):
        copy = shutil.copytree(started, tmp_path / f"copy {number}")
        run = train(**short | changes, output_dir=str(copy), resume_from_checkpoint="auto")
        assert [line["series"] for line in run.breaks] == ([series] if series else []), changes


def test_a_run_that_goes_back_before_a_break_undoes_it(train):
    train()
    run = train(**MORE, reward_weights={"light": 2.0}, keep_checkpoints=9)
    assert len(run.breaks) == 1
    run = train(resume_from_checkpoint=str(run.folder / "checkpoints" / "step-000002"))
    assert run.breaks == []
    assert column(run.full_lines, "step").tolist() == [1, 2, 3, 4]
    assert column(run.validations, "step").tolist() == [0, 2, 4]
    assert len(set(column(run.validations, "reward/total"))) == 1


def test_a_start_with_a_wrong_reward_ends_no_series(train, tmp_path):
    train()
    with pytest.raises(TrainingError, match="no answer"):
        train(**MORE, reward_model=f"{tmp_path}/own.py:Failing")
    run = train(**MORE)
    assert run.breaks == []
    assert column(run.full_lines, "step").tolist() == list(range(1, 9))
    assert column(run.validations, "step").tolist() == [0, 2, 4, 6, 8]


def test_reward_hacking_is_judged_within_a_series(train, tmp_path):
    """The reward is doubled and the held-out one negated: across the break that looks like hacking."""
    code = tmp_path / "hold.py"
    held_out = "def hold(clips, prompts):\n    return [{} * clip.float().mean().item() for clip in clips]\n"
    code.write_text(held_out.format(1))
    train(holdout_reward=f"{code}:hold")
    code.write_text(held_out.format(-1))
    run = train(**MORE, holdout_reward=f"{code}:hold", reward_weights={"light": 2.0})
    assert [line["holdout/diverged"] for line in run.validations] == [None, 0, 0]
    assert divergence(run.folder, 8)  # all validations, whatever their yardstick
    assert sorted(validation_clips(run)) == [4, 6, 8]
