"""JSON files: either an object, or an error that names the file."""

import json
import math

import pytest

from sage_grpo.json_files import read_object, write_json


@pytest.mark.parametrize("content, words", [
    (b"", "is not JSON"), (b"\xff", "is not JSON"), (b"{", "is not JSON"), (b"[" * 100_000, "is not JSON"),
    (b"9" * 5000, "is not JSON"), (b"[1]", "is not a JSON object"), (b"null", "is not a JSON object"),
])  # fmt: skip
def test_what_is_no_object_is_named(tmp_path, content, words):
    file = tmp_path / "a.json"
    file.write_bytes(content)
    with pytest.raises(ValueError) as caught:
        read_object(file)
    assert str(caught.value).startswith(f"{file} {words}") and "\n" not in str(caught.value)


def test_an_object_is_read_and_a_missing_file_is_named(tmp_path):
    (tmp_path / "a.json").write_text('{"a": [1]}')
    assert read_object(tmp_path / "a.json") == {"a": [1]}
    with pytest.raises(FileNotFoundError, match=r"none\.json is missing; download"):
        read_object(tmp_path / "none.json")


def test_a_file_is_written_whole_and_what_json_does_not_know_is_null(tmp_path):
    file = tmp_path / "a.json"
    write_json(file, {"a": (1, math.nan), "b": {"c": -math.inf, "d": 0.5}})
    assert json.loads(file.read_text()) == {"a": [1, None], "b": {"c": None, "d": 0.5}}
    (tmp_path / "a.json.tmp").mkdir()  # where a draft cannot be written
    with pytest.raises(OSError):
        write_json(file, {})
    assert json.loads(file.read_text())["b"]["d"] == 0.5
