"""JSON files: either an object, or an error that names the file."""

import json
import math
import os

import pytest

from sage_grpo.files.json_files import check_kinds, naming, read_config, read_object, write_json


@pytest.mark.parametrize(
    "content, words",
    [
        (b"", "is not JSON"),
        (b"\xff", "is not JSON"),
        (b"{", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"9" * 5000, "is not JSON"),
        (b"[1]", "is not a JSON object"),
        (b"null", "is not a JSON object"),
    ],
)
def test_what_is_not_an_object_is_named(tmp_path, content, words):
    file = tmp_path / "a.json"
    file.write_bytes(content)
    with pytest.raises(ValueError) as caught:
        read_object(file)
    assert str(caught.value).startswith(f"{file} {words}")
    assert "\n" not in str(caught.value)


def test_an_object_is_read_and_a_missing_file_is_named(tmp_path):
    (tmp_path / "a.json").write_text('{"a": [1]}')
    assert read_object(tmp_path / "a.json") == {"a": [1]}
    with pytest.raises(FileNotFoundError, match=r"none\.json is missing; download"):
        read_object(tmp_path / "none.json")


@pytest.mark.parametrize(
    "values, words",
    [
        ({"num_layers": 10**6}, "has 'num_layers' 1000000, but no model has 1000"),
        ({"text_config": {"depth": 1e9}}, "has 'depth' 1000000000.0, but no model has 1000"),
        ({"a": {"b": {"width": -(2**31)}}}, "has 'width' -2147483648, but no model has 2147483648"),
        ({"eps": math.nan}, "has 'eps' nan"),
        ({"eps": 10**400}, "has 'eps' 1000"),
        ({"layers": [1] * 1000}, "has 'layers'"),
    ],
)
def test_numbers_beyond_any_model_are_named(tmp_path, values, words):
    (tmp_path / "a.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=words):
        read_config(tmp_path / "a.json")


def test_a_configuration_within_reason_is_read(tmp_path):
    values = {
        "num_layers": 80,
        "hidden_size": 8192,
        "vocab_size": 152064,
        "layer_types": ["full"] * 80,
        "x": {"y": None},
    }
    (tmp_path / "a.json").write_text(json.dumps(values))
    assert read_config(tmp_path / "a.json") == values


KINDS = {"whole": int, "real": float, "list": tuple, "switch": bool, "text": str}


@pytest.mark.parametrize(
    "name, good, bad",
    [
        ("whole", [1, 2**31 - 1], [0, -1, 1.0, True, "1", None, 2**31, [1]]),
        ("real", [1, 0.5], [0, -0.5, True, "1", math.nan, math.inf, None]),
        ("list", [[1], [1, 2]], [[], [0], [0.5], ["a"], 1, None, "12"]),
        ("switch", [True, False], [0, 1, "true", None]),
        ("text", ["", "a"], [1, None, ["a"]]),
    ],
)
def test_values_of_another_kind_are_named(tmp_path, name, good, bad):
    for value in good:
        check_kinds(tmp_path, {name: value}, KINDS)
    for value in bad:
        with pytest.raises(ValueError, match=rf"^{tmp_path} has {name} .*; it must be "):
            check_kinds(tmp_path, {name: value}, KINDS)
    check_kinds(tmp_path, {}, KINDS)


def test_the_errors_of_other_packages_name_the_file(tmp_path):
    for error in (KeyError("a"), RuntimeError("two\nlines \x1b[2J" + 999 * "."), RecursionError()):
        with pytest.raises(ValueError) as caught, naming(tmp_path):
            raise error
        text = str(caught.value)
        assert text.startswith(f"{tmp_path} cannot be used ({type(error).__name__}:")
        assert text.isprintable()
        assert len(text) < len(str(tmp_path)) + 350
        assert caught.value.__cause__ is error
    with pytest.raises(RuntimeError, match="CUDA out of memory"), naming(tmp_path):
        raise RuntimeError("CUDA out of memory")  # no fault of the file
    with pytest.raises(KeyboardInterrupt), naming(tmp_path):
        raise KeyboardInterrupt


@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_what_is_not_a_file_is_missing(tmp_path, kind):
    path = tmp_path / "a.json"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    with pytest.raises(FileNotFoundError, match=r"a\.json is missing"):
        read_object(path)


def test_a_file_is_written_whole_and_what_json_does_not_know_is_null(tmp_path):
    file = tmp_path / "a.json"
    write_json(file, {"a": (1, math.nan), "b": {"c": -math.inf, "d": 0.5}})
    assert json.loads(file.read_text()) == {"a": [1, None], "b": {"c": None, "d": 0.5}}


def test_a_draft_takes_no_name_of_the_user_and_is_not_left(tmp_path):
    file = tmp_path / "a.json"
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "a.json.tmp").symlink_to(tmp_path / "precious")
    write_json(file, {"a": 1})
    assert json.loads(file.read_text()) == {"a": 1}
    assert (tmp_path / "precious").read_text() == "precious"

    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError):
        write_json(tmp_path / "folder", {})
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"a.json", "a.json.tmp", "folder", "precious"}
