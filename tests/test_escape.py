"""Text from elsewhere on a terminal, in Markdown, and settings without the folders of a machine."""

import pytest

from sage_grpo.config.command_line import answering
from sage_grpo.escape import markdown, terminal_text, without_folders


def test_a_terminal_gets_nothing_to_act_on():
    assert terminal_text("red \033[2J\a\u202e circle\nпривет") == "red ?[2J?? circle\nпривет"


def test_an_error_reaches_the_terminal_escaped(capsys):
    with pytest.raises(SystemExit), answering("program: "):
        raise ValueError("the prompt \033]0;title\a")
    assert capsys.readouterr().err == "program: the prompt ?]0;title?\n"


def test_markdown_gets_no_markup():
    assert markdown("VQ + 2 TA") == "VQ + 2 TA"
    assert markdown("<b>\n# x | [y](http://z) `*_") == (r"\<b\> \# x \| \[y\](http\://z) \`\*\_")


def test_folders_of_a_machine_are_left_out():
    settings = {
        "a": "/home/me/model",
        "b": ["~/x.py:f", "../up/y"],
        "c": {"d": "ckpts/model"},
        "e": 1,
        "f": None,
    }
    public = {
        "a": "model",
        "b": ["x.py:f", "y"],
        "c": {"d": "ckpts/model"},
        "e": 1,
        "f": None,
    }
    assert without_folders(settings) == public
    assert without_folders(settings, is_path=True)["c"] == {"d": "model"}
