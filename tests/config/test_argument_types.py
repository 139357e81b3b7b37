"""Types of command-line arguments, by value."""

from argparse import ArgumentTypeError

import pytest

from sage_grpo.config import argument_types as types

GOOD = [
    (types.frame_size, "480x848", (480, 848)),
    (types.frame_size, "480X848", (480, 848)),
    (types.aspect_ratio, "16:9", 16 / 9),
    (types.finite_number, "-1e9", -1e9),
    (types.count, "999999", 999999),
    (types.seed, str(2**63 - 1), 2**63 - 1),
    (types.seed, "0", 0),
    (types.name_or_code(["cps"]), "cps", "cps"),
    (types.name_or_code(["cps"]), "mine.py:noise", "mine.py:noise"),
]
BAD = [
    (types.frame_size, ["480", "480x", "480x848x3", "-1x2", "1234567x1"]),
    (types.aspect_ratio, ["16", "16:0", "16/9", "a:b"]),
    (types.finite_number, ["nan", "inf", "1e10", "x", ""]),
    (types.count, ["0", "-1", "1.0", "1000000", ""]),
    (types.seed, ["-1", str(2**63), "9" * 400, "1e3"]),
    (types.name_or_code(["cps"]), ["ode", "mine.py", "mine.py:"]),
]


@pytest.mark.parametrize("convert, text, value", GOOD)
def test_texts_become_values(convert, text, value):
    assert convert(text) == value


@pytest.mark.parametrize(
    "convert, text", [(convert, text) for convert, texts in BAD for text in texts]
)
def test_other_texts_are_quoted_in_the_error(convert, text):
    with pytest.raises(ArgumentTypeError, match=r"is not") as caught:
        convert(text)
    assert str(caught.value).startswith(repr(text))
