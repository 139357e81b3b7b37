"""The spread of clips in what their prompts leave open: closed forms, and a run that is measured at its end."""

import json
from dataclasses import replace

import pytest
import torch

from research.studies import spread
from research.studies.compute import spread_table
from research.studies.one_run import train_and_measure
from research.studies.spread import measure, open_prompts, sampled, spread_of
from sage_grpo.config.fields import ConfigError
from sage_grpo.config.parse import from_values
from sage_grpo.files.json_files import finite
from sage_grpo.train.build import open_model
from sage_grpo.worlds.shapes.oracle import read
from sage_grpo.worlds.shapes.scenes import OPTIONAL, Scenes, parse, render, scenes_from_prompt
from sage_grpo.worlds.shapes.world import as_uint8

FLAGS = {
    "pretrained_model_root": "assets/tiny", "reward_model": "shapes", "max_steps": 1, "batch_size": 2,
    "num_generations": 2, "num_sampling_steps": 2, "validation_num_inference_steps": 2, "num_validation_prompts": 2,
    "guidance_scale": 1.0, "report_to": "none", "device": "cpu", "learning_rate": 1e-3, "validation_videos": 0,
}  # fmt: skip


def test_prompts_name_color_shape_and_direction_alone():
    prompts = open_prompts()
    named = [parse(prompt.text) for prompt in prompts]
    assert len({prompt.text for prompt in prompts}) == 16 and [
        prompt.index for prompt in prompts
    ] == list(range(16))
    assert all(set(one) == {"colour", "shape", "direction"} for one in named)
    assert [len({one[name] for one in named}) for name in ("colour", "shape", "direction")] == [
        6,
        7,
        4,
    ]


def reading_of(scenes):
    return read(as_uint8(render(scenes, 5, 48, 48)), [""] * len(scenes))


def repeated(scenes, times, **changes):
    """Each scene several times in a row, with other values of some parameters."""
    values = {name: value.repeat_interleave(times) for name, value in scenes.items()}
    return Scenes(**values | changes)


def test_spread_is_the_share_of_pairs_that_differ():
    scenes = scenes_from_prompt(
        ["a red circle moving left", "a blue square moving up"], torch.Generator().manual_seed(1)
    )
    same = spread_of(reading_of(repeated(scenes, 4)), 4)
    assert same["classes"] == 0 and same["places"] < 0.005 and same["match"] == 1
    assert same["classes if both match"] == 0
    backgrounds = torch.tensor(
        [0, 1, 2, 0, 1, 1, 1, 1]
    )  # of the first four clips 5 of 6 pairs differ, of the others none
    found = spread_of(reading_of(repeated(scenes, 4, background=backgrounds)), 4)
    assert found["classes"] == pytest.approx((5 / 6 + 0) / 2 / len(OPTIONAL))


def test_spread_is_also_told_of_the_clips_that_match():
    scenes = scenes_from_prompt(["a red circle moving left"], torch.Generator().manual_seed(1))
    four = repeated(scenes, 4, background=torch.tensor([0, 1, 2, 2]))
    found = spread_of(replace(reading_of(four), match=torch.tensor([True, True, False, True])), 4)
    assert found["match"] == 0.75 and found["classes"] == pytest.approx(5 / 6 / 3)
    assert found["classes if both match"] == pytest.approx(
        1 / 3
    )  # all three pairs differ, in one of three attributes


def test_places_are_measured_around_those_of_each_prompt():
    scenes = scenes_from_prompt(
        ["a red circle moving left", "a blue square moving up"], torch.Generator().manual_seed(1)
    )
    wide = repeated(scenes, 2)
    reading = reading_of(wide)
    moved = Scenes(
        **dict(wide.items()) | {"x": torch.tensor([0.4, 0.6, 0.5, 0.5]), "y": torch.full((4,), 0.5)}
    )
    assert spread_of(replace(reading, scenes=moved), 2)["places"] == pytest.approx(
        (0.02 / 4) ** 0.5
    )  # one of four variances is 0.02


def test_clips_depend_on_prompt_and_number_alone():
    backbone, config = open_model(from_values(FLAGS), torch.device("cpu"))
    prompts = open_prompts(2)
    both = sampled(backbone, config, prompts, 2)
    assert both.shape[0] == 4 and both.dtype == torch.uint8
    assert torch.equal(sampled(backbone, config, prompts[1:], 2), both[2:]) and not torch.equal(
        both[0], both[1]
    )


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_a_run_ends_with_its_spread(tmp_path, monkeypatch):
    """Slow: a real run; the measure is tested with numbers."""
    monkeypatch.setattr(spread, "CLIPS", 2)
    monkeypatch.setattr(spread, "open_prompts", lambda: open_prompts(2))
    run = tmp_path / "run.json"
    small = {"num_frames": 5, "height": 24, "width": 24}
    flags = FLAGS | small | {"validation_fixed_size": "24x24", "output_dir": str(tmp_path / "run")}
    run.write_text(json.dumps(flags))
    assert train_and_measure(["--config", str(run)], ["spread"]) == 0
    found = json.loads((tmp_path / "run" / "spread.json").read_text())
    assert found.keys() == {"base", "end"} and found["base"] != found["end"]
    assert finite(measure(from_values(flags))) == found
    with pytest.raises(ConfigError, match="has no checkpoint of its last iteration"):
        measure(from_values(flags | {"output_dir": str(tmp_path), "max_steps": 3}))


def test_the_table_tells_which_methods_narrow_the_spread():
    def record(classes, places, base=0.15):
        def values(classes, places, match):
            both = {"classes if both match": 0.4, "places if both match": 0.1}
            return {"classes": classes, "places": places, "match": match} | both

        return {"spread": {"base": values(0.43, base, 0.34), "end": values(classes, places, 0.5)}}

    arms = {"published": {1: record(0.40, 0.15), 2: record(0.47, 0.16), 3: record(0.44, 0.14)}}
    arms["awm"] = {1: record(0.40, 0.100), 2: record(0.47, 0.101), 3: record(0.44, 0.099)}
    rows = [line for line in spread_table(arms).splitlines() if line.startswith("| ")]
    assert rows[1] == "| base model |  | 0.430 | 0.150 | 0.400 | 0.100 | 0.340 |"
    assert (
        "narrower" not in rows[2]
        and rows[3].count("**narrower**") == 1
        and "0.100 ± 0.002: **narrower**" in rows[3]
    )
    guided = {
        "guided": {
            seed: record(0.43 + seed / 100, 0.18 + seed / 100, base=0.2) for seed in (1, 2, 3)
        }
    }
    names = [
        line.split("|")[1].strip()
        for line in spread_table(arms | guided).splitlines()
        if line.startswith("| ")
    ]
    assert (
        names[1:3] == ["base model, sampled as published", "base model, sampled as guided"]
        and len(names) == 6
    )
    assert "0.200 ± 0.025: undecided" in spread_table(guided)  # compared with its own base
    assert spread_table({"awm": {1: {}}, "published": {}}) == "No results yet.\n"
