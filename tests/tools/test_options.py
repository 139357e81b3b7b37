"""The parser of the tools: limits are enforced, and each tool sets the limits it needs."""

import importlib

import pytest

from sage_grpo.config.fields import ConfigError
from sage_grpo.tools.options import ToolParser

PROGRAMS = {
    "audit_reward": "scripts.audit_reward",
    "doctor": "sage_grpo.tools.doctor.__main__",
    "plan": "sage_grpo.tools.plan.__main__",
    "reward_server": "scripts.reward_server",
}
REQUIRED = {"reward_server": ["--reward", "shapes"]}


def parsed(tool, *words):
    """The options of a program; those of post_train.py, which some programs also return, are dropped."""
    program = importlib.import_module(PROGRAMS[tool])
    result = program.parse_arguments([*REQUIRED.get(tool, []), *words])
    return result[0] if isinstance(result, tuple) else result


def test_a_value_at_or_below_its_limit_is_refused_and_so_is_nan():
    parser = ToolParser("program", "about")
    parser.add_argument("--speed", type=float, above=2, help="speed")
    parser.add_argument("--count", type=int, default=1, help="count")
    for value in ("2", "-1", "nan"):
        with pytest.raises(ConfigError, match=r"^speed is .*; it must be above 2"):
            parser.parse_known_args(["--speed", value])
    assert parser.parse_known_args(["--speed", "2.5"])[0].speed == 2.5
    assert parser.parse_known_args([])[0].speed is None
    assert parser.parse_known_args(["--count", "-9"])[0].count == -9


def test_flags_of_the_configuration_are_passed_on():
    parser = ToolParser("program", "about")
    parser.add_argument("--clips", type=int, default=4, above=1, help="clips")
    options, config = parser.parse_with_config(["--eta", "0.25", "--clips", "3"])
    assert (options.clips, config.eta) == (3, 0.25)
    with pytest.raises(ConfigError, match="unknown flag --clip; did you mean --clips"):
        parser.parse_with_config(["--clip", "3"])


@pytest.mark.parametrize(
    ("tool", "flag", "value", "limit"),
    [
        ("doctor", "clips", "1", 1),
        ("doctor", "prompts", "0", 0),
        ("doctor", "ranks", "0", 0),
        ("doctor", "ranks_here", "0", 0),
        ("plan", "price", "nan", 0),
        ("plan", "gpus", "-1", 0),
        ("plan", "gpu_memory", "0", 0),
        ("plan", "text_tokens", "0", 0),
        ("reward_server", "max_request_mb", "0", 0),
        ("reward_server", "timeout", "0", 0),
        ("audit_reward", "num_clips", "-3", 0),
    ],
)
def test_every_tool_refuses_values_beyond_its_limits(tool, flag, value, limit):
    with pytest.raises(ConfigError, match=rf"{flag} is {value}\S*; it must be above {limit}"):
        parsed(tool, f"--{flag}", value)
    assert getattr(parsed(tool, f"--{flag}", "2"), flag) == 2
