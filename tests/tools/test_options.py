"""The tools' own flags: every row of the table is one that argparse takes, and limits are kept."""

import pytest

from sage_grpo.config.fields import ConfigError
from sage_grpo.tools.options import FLAGS, ToolParser


def given(tool, *words):
    required = {
        "reward_server": ["--reward", "shapes"],
        "report": ["run"],
        "diagnose": ["run"],
    }.get(tool, [])
    return ToolParser(tool, "about").parse_known_args([*required, *words])[0]


@pytest.mark.parametrize("tool", FLAGS)
def test_defaults_are_within_their_limits_and_have_their_types(tool):
    options = given(tool)
    for name, flag in FLAGS[tool].items():
        value, kind = getattr(options, name), flag.get("type")
        assert flag["help"] and (
            flag.get("default") is None or "above" not in flag or value > flag["above"]
        )
        if kind and value not in (None, []):
            value = value[0] if flag.get("nargs") else value
            assert type(value).__name__.removeprefix("Posix").lower() == kind


@pytest.mark.parametrize(
    ("tool", "flag", "value", "limit"),
    [("doctor", "clips", "1", 1), ("doctor", "ranks", "0", 0), ("plan", "price", "nan", 0), ("plan", "gpus", "-1", 0),
     ("reward_server", "max_request_mb", "0", 0), ("audit_reward", "num_clips", "-3", 0)],
)  # fmt: skip
def test_values_beyond_a_limit_are_refused(tool, flag, value, limit):
    with pytest.raises(ConfigError, match=f"{flag} is {value}; it must be above {limit}$"):
        given(tool, f"--{flag}", value)
    assert getattr(given(tool, f"--{flag}", "2"), flag) == 2
