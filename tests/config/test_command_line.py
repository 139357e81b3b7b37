"""The parser of every program."""

from pathlib import Path

import pytest

from sage_grpo.config.command_line import Parser, answering, sentence
from sage_grpo.config.fields import ConfigError
from sage_grpo.config.parse import parse
from sage_grpo.config.values import convert


@pytest.fixture
def parser():
    parser = Parser("a_program.py", "about")
    parser.add_argument("--input_file", required=True)
    parser.add_argument("--count", type=int, default=3, help="how many")
    parser.add_argument("--name", help="what it is called")
    return parser


def test_hyphens_and_underscores_mean_the_same_in_a_flag():
    words = ["--learning-rate", "1e-3", "--train-prompts=my-file.txt"]
    config = parse([*words, "--negative_prompt", "well-lit --not-a-flag"])
    assert (config.learning_rate, config.train_prompts) == (1e-3, ("my-file.txt",))
    assert config.negative_prompt == "well-lit --not-a-flag"


def test_an_unknown_flag_is_reported_before_a_missing_one(parser):
    with pytest.raises(ConfigError, match=r"unknown flag --coutn; did you mean --count\?"):
        parser.parse_args(["--coutn", "3"])
    with pytest.raises(ConfigError, match="--input_file"):
        parser.parse_args(["--count", "3"])


def test_a_misspelled_flag_may_have_meant_one_of_another_parser(parser):
    with pytest.raises(ConfigError, match=r"did you mean --reward\?"):
        parser.parse_args(["--input_file", "x", "--rewrad", "y"], also=["--reward"])


def test_flags_are_not_abbreviated(parser):
    with pytest.raises(ConfigError, match="unknown flag --input; did you mean --input_file"):
        parser.parse_args(["--input", "x"])


def test_the_help_shows_defaults_that_say_something(parser):
    text = parser.format_help()
    assert "how many (default: 3)" in text
    assert "what it is called" in text
    assert "None" not in text


def test_wrong_input_is_a_sentence_and_exit_code_2(capsys):
    with pytest.raises(SystemExit) as stop, answering("program: "):
        raise ValueError("eta is 0")
    assert stop.value.code == 2
    assert capsys.readouterr().err == "program: eta is 0\n"


@pytest.mark.parametrize(
    "error, words",
    [
        (FileExistsError(17, "File exists", "out/clips"), "out/clips cannot be used: File exists"),
        (OSError(98, "Address already in use"), "Address already in use"),
        (FileNotFoundError("no such model"), "no such model"),
        (ValueError("a \033[2J b"), "a ?[2J b"),
        (ValueError(), "ValueError"),
    ],
)
def test_any_error_about_a_file_is_a_sentence(error, words):
    assert sentence(error) == words


@pytest.mark.parametrize("path", ["x" * 256, "ä" * 128, "x/" * 2048])
def test_a_path_that_no_file_system_takes_is_refused_by_its_flag(path):
    parser = Parser("program", "about")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--files", type=Path, nargs="+")
    for words in (["--folder", path], ["--files", "a", path]):
        with pytest.raises(ConfigError, match=rf"{words[0][2:]} is .*at most 4095 bytes"):
            parser.parse_args(words)
    with pytest.raises(ConfigError, match=r"init_from_checkpoint is .*at most 4095 bytes"):
        convert("init_from_checkpoint", path)
    assert parser.parse_args(["--folder", "x" * 255]).folder == Path("x" * 255)
