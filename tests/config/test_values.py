"""Raw values become the types of the flags, or a sentence."""

import pytest

from sage_grpo.config.fields import FIELDS, ConfigError, flag_info
from sage_grpo.config.parse import from_values
from sage_grpo.config.values import base_type, convert

PATHS = [name for name in FIELDS if flag_info(name).is_path]
NUMBERS = [name for name in FIELDS if base_type(name) in (int, float)]


@pytest.mark.parametrize(
    "name, raw, value",
    [
        ("eta", "1e-3", 1e-3),
        ("eta", 1, 1.0),
        ("max_steps", "7", 7),
        ("max_steps", 7.0, 7),
        ("use_lora", "TRUE", True),
        ("report_to", "none", ("none",)),
        ("gpus", "none", None),
        ("gpus", None, None),
        ("reward_weights", '{"VQ": 1}', {"VQ": 1}),
        ("negative_prompt", 7, "7"),
    ],
)
def test_values_become_the_type_of_their_flag(name, raw, value):
    converted = convert(name, raw)
    assert converted == value
    assert type(converted) is type(value)


@pytest.mark.parametrize(
    "name, raw, words",
    [
        ("eta", True, "a number is expected"),
        ("eta", float("nan"), "must be finite"),
        ("max_steps", 7.5, "a whole number is expected"),
        ("max_steps", float("inf"), "a whole number is expected"),
        ("max_steps", True, "a whole number is expected"),
        ("max_steps", None, "a whole number is expected"),
        ("use_lora", 1, "it must be True or False"),
        ("report_to", [], "a list of words is expected"),
        ("report_to", ["", "wandb"], "a list of words is expected"),
        ("negative_prompt", [], "a word is expected"),
    ],
)
def test_values_of_another_type_are_refused(name, raw, words):
    with pytest.raises(ConfigError, match=f"^{name} is .*{words}"):
        convert(name, raw)


@pytest.mark.parametrize("value", ["a\nb", "a\x7f", "\x1b[2J", "", "-rf", "a\udc80", "a\0b"])
@pytest.mark.parametrize("name", PATHS)
def test_a_path_has_no_control_characters(name, value):
    with pytest.raises(ConfigError, match=f"{name} is .*; a (path|list of words) is expected"):
        from_values({name: value})


def test_a_home_folder_is_the_users(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    config = from_values(
        {"output_dir": "~/run", "train_prompts": ["~/a.txt", "b~.txt"], "negative_prompt": "~"}
    )
    assert config.output_dir == "/home/me/run"
    assert config.train_prompts == ("/home/me/a.txt", "b~.txt")
    assert config.negative_prompt == "~"


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_beyond_all_use_is_refused(name):
    value = {int: 2**62, float: 1e300}[base_type(name)]
    if name in ("seed", "validation_global_seed"):
        assert getattr(from_values({name: value}), name) == value
        return
    with pytest.raises(ConfigError, match=rf"^{name} is .*; it must be .*at most \d"):
        from_values({name: value})
