"""JSON files: an object, or a sentence that names the file."""

import pytest

from sage_grpo.json_files import read_object


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
