"""The parser of every program."""

import subprocess
import sys
from pathlib import Path

import pytest

import generate
from sage_grpo.config.command_line import Parser, answering, error_text
from sage_grpo.config.fields import FIELDS, ConfigError
from sage_grpo.config.other_names import OTHER_NAMES
from sage_grpo.config.parse import parse
from sage_grpo.config.values import convert
from tests.launch.shell import ROOT


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
        (ValueError("a \033[2J\nb"), "a ?[2J b"),
        (ValueError(), "ValueError"),
    ],
)
def test_any_error_about_a_file_is_a_sentence(error, words):
    assert error_text(error) == words


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


@pytest.mark.parametrize(
    "flag, in_training, in_sampling",
    [
        ("lr", "learning_rate", None),
        ("output", "output_dir", "output_path"),
        ("steps", "max_steps", "num_inference_steps"),
        ("rank", "lora_r", None),
        ("cfg", "guidance_scale", "guidance_scale"),
        ("model", "pretrained_model_root", "model_path"),
        ("per-device-train-batch-size", "batch_size", None),
    ],
)
def test_names_of_other_trainers_lead_to_flags_of_this_one(flag, in_training, in_sampling):
    for read, meant in ((parse, in_training), (generate.parse_arguments, in_sampling)):
        hint = rf"did you mean --{meant}\?" if meant else "--help lists them all"
        with pytest.raises(ConfigError, match=rf"unknown flag --{flag}; {hint}$"):
            read([f"--{flag}", "1"])


def test_the_names_of_others_are_not_ours_and_lead_to_flags_that_exist():
    help_of_sampling = subprocess.run(
        [sys.executable, "generate.py", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    tools = {"checkpoints"}
    for name, flags in OTHER_NAMES.items():
        assert name not in FIELDS
        for flag in flags:
            assert flag in {*FIELDS, *tools} or f"--{flag}" in help_of_sampling, (name, flag)


def test_a_dry_run_of_training_leads_to_the_planner_and_the_doctor():
    for flag in ("--dry_run", "--dry-run"):
        with pytest.raises(ConfigError) as refusal:
            parse(["--max_steps", "3", flag])
        assert "sage_grpo.tools.plan" in str(refusal.value)
        assert "sage_grpo.tools.doctor" in str(refusal.value)


@pytest.mark.parametrize(
    "program", [["generate.py", "--prompt", "x"], ["post_train.py"], ["-m", "sage_grpo.tools.plan"]]
)
def test_without_the_packages_a_program_ends_with_one_sentence(program):
    # -S: without site-packages, as outside the virtual environment
    ended = subprocess.run(
        [sys.executable, "-S", *program],
        cwd=ROOT,
        env={},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 2
    assert ended.stdout == ""
    (sentence,) = ended.stderr.splitlines()
    assert "torch" in sentence
    assert "requirements.txt" in sentence
