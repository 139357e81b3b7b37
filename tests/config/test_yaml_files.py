"""YAML files: what is malformed or excessive in them is one sentence."""

import pytest
import yaml

from sage_grpo.config.fields import ConfigError
from sage_grpo.config.parse import parse


@pytest.fixture
def parsed(tmp_path):
    """parsed(text) is the configuration of a file with this text."""

    def parse_text(text):
        file = tmp_path / "c.yaml"
        file.write_text(text)
        return parse(["--config", str(file)])

    return parse_text


@pytest.mark.parametrize(
    "text",
    [
        "- a\n- b\n",
        "eta: [1, 2]\n",
        "eta:\n",
        "etta: 1\n",
        "a: b: c\n",
        "1: 2\n",
        "eta: true\n",
        "seed: yes\n",
        "seed: !!int ''\n",
        "seed: 2000-99-99\n",
        "seed: !!timestamp x\n",
        "[" * 100000,
        "a: " + "{a: " * 50000,
        '"a\\nb": 1\n',
        "eta: \0\n",
        f"seed: {2**63}\n",
        "batch_size: 1000000000\n",
        "reward_weights: '" + "[" * 99999 + "'\n",
    ],
)
def test_a_wrong_file_is_one_sentence(parsed, text):
    with pytest.raises(ConfigError) as caught:
        parsed(text)
    assert "\n" not in str(caught.value)


def test_a_file_cannot_unfold_into_gigabytes(parsed):
    doublings = [f"  a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 60)]
    text = "\n".join(["reward_weights:", "  a0: &a0 [x, x]", *doublings])
    with pytest.raises(ConfigError, match=r"c\.yaml repeats a value by an alias .*; write it out"):
        parsed(text)


@pytest.mark.parametrize(
    "text, words",
    [
        ("eta: 0.5\nseed: 1\neta: 0.7\n", "the key 'eta' in lines 1 and 3"),
        ("{eta: 0.5, eta: 0.5}", "the key 'eta' in lines 1 and 1"),
        ('eta: 1\n"eta": 2\n', "the key 'eta' in lines 1 and 2"),
        ("reward_weights:\n  VQ: 1\n  VQ: 2\n", "the key 'VQ' in lines 2 and 3"),
        ("report_to: [{a: 1, a: 2}]\n", "the key 'a' in lines 1 and 1"),
        ("? {x: 1}\n: 2\neta: 1\neta: 2\n", "the key 'eta' in lines 3 and 4"),
    ],
)
def test_a_key_is_written_once(parsed, text, words):
    with pytest.raises(ConfigError, match=rf"c\.yaml has {words}.*; keep one of them"):
        parsed(text)


def test_the_same_key_in_two_mappings_is_not_twice(parsed):
    weights = {"videoalign": {"TA": 1.0}, "ocr": {"TA": 2.0}}
    assert parsed(yaml.safe_dump({"reward_weights": weights})).reward_weights == weights


def test_a_value_may_equal_a_key(parsed):
    assert parsed("negative_prompt: output_dir\noutput_dir: negative_prompt\n").output_dir == (
        "negative_prompt"
    )


def test_a_malformed_file_is_reported_by_line_and_column(parsed):
    with pytest.raises(ConfigError, match=r"c\.yaml .*line 2, column 5: .*',' or '\]'"):
        parsed("eta: [1\nseed: 2\n")


def test_a_missing_file_is_answered_with_those_that_exist():
    with pytest.raises(
        ConfigError, match=r"config missing\.yaml does not exist; there are configs/"
    ):
        parse(["--config", "missing.yaml"])
