"""Prompt files: every format gives the same requests, and a bad line is named."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sage_grpo.data.requests import Request, read_requests


def write(tmp_path, name, text):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_txt_takes_one_prompt_per_line(tmp_path):
    path = write(tmp_path, "p.txt", "\ufeffa red circle\n\n  a blue square  \r\n")
    assert read_requests(path) == [Request("a red circle", 0), Request("a blue square", 1)]


def test_csv_with_index_seed_and_quotes(tmp_path):
    path = write(tmp_path, "p.csv", 'prompt,index,seed\n"a ""T"", moving",7,930\nplain,,\n')
    assert read_requests(path) == [Request('a "T", moving', 7, 930), Request("plain", 1, None)]


def test_jsonl(tmp_path):
    path = write(tmp_path, "p.jsonl", '{"prompt": "a", "seed": 3}\n\n{"prompt": "b", "index": 9}\n')
    assert read_requests(path) == [Request("a", 0, 3), Request("b", 9)]


@pytest.mark.parametrize("odd", ["\u2028", "\u0085", "\x0b", "\x0c"])
def test_only_line_ends_end_a_line(tmp_path, odd):
    text = f"a red{odd}circle"
    assert read_requests(write(tmp_path, "p.txt", text + "\nb\n")) == [
        Request(text, 0),
        Request("b", 1),
    ]
    assert read_requests(write(tmp_path, "p.csv", f"prompt\n{text}\n")) == [Request(text, 0)]
    line = '{"prompt": "a red\u2028circle"}'
    assert read_requests(write(tmp_path, "p.jsonl", line)) == [Request("a red\u2028circle", 0)]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("p.txt", "\n \n", "holds no prompt"),
        ("p.csv", "prompt,index\na,1\nb,1\n", "index 1 is that of 'a' and of 'b'"),
        ("p.csv", "prompt,index\na,1\nb,\n", "index 1 is that of 'a' and of 'b'"),
        ("p.csv", "text\nhello\n", "`prompt` among them"),
        (
            "p.csv",
            "prompt,sed\nhello,1\n",
            r"line 2: unknown column .sed.; known are prompt, index, seed",
        ),
        (
            "p.csv",
            "prompt,seed\nhello,x\n",
            "line 2: seed is 'x'; it must be a whole number from 0",
        ),
        ("p.csv", "prompt,seed\nhello,-1\n", "seed is '-1'; it must be a whole number from 0"),
        ("p.csv", "prompt,seed\n,1\n", "line 2: the prompt is missing or empty"),
        ("p.csv", "prompt\na,b\n", "unknown column"),
        ("p.csv", 'prompt,"a\nb"\na,b\n', r"unknown column 'a\\nb'"),
        ("p.csv", "prompt\n" + "a" * 200_000, "line 1: not CSV .field larger"),
        (
            "p.csv",
            f"prompt,index\na,{2**63}\n",
            "index is '9223372036854775808'; it must be a whole number",
        ),
        ("p.jsonl", '{"prompt": "a", "index": [1]}', "index is 'a list'"),
        ("p.jsonl", "[" * 100_000, "line 1: not JSON"),
        ("p.jsonl", '{"prompt": "a", "index": ' + "1" * 5000 + "}", "line 1: not JSON"),
        (
            "p.jsonl",
            '{"prompt": "a \\ud800 b"}',
            r"the prompt 'a \\ud800 b' holds half a character",
        ),
        ("p.jsonl", '{"prompt": "a"}\nnonsense\n', "line 2: not JSON"),
        ("p.jsonl", "[1]\n", "expected an object"),
        ("p.jsonl", '{"prompt": 5}\n', "missing or empty"),
        ("p.txt", b"\xff\xfe\x00", "is not UTF-8 text"),
        ("p.txt", "a\0b", "NUL"),
        ("p.yaml", "a", "must end in .txt, .csv, .jsonl"),
    ],
)
def test_bad_files_are_refused(tmp_path, name, text, message):
    with pytest.raises(ValueError, match=message):
        read_requests(write(tmp_path, name, text))


def test_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.txt does not exist"):
        read_requests(tmp_path / "nowhere.txt")


@given(st.text())
def test_names_stay_inside_their_folder(text):
    """Whatever the prompt (../, absolute, newline, emoji, 10 kB), a file name is digits, dash and hex."""
    name = Request(text, 12).name
    assert name.startswith("0012-") and set(name) <= set("0123456789abcdef-") and len(name) == 13


def test_names_tell_prompts_apart():
    assert Request("a", 0).name != Request("b", 0).name
