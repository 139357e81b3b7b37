"""Safetensors files written in pieces."""

import hashlib

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from sage_grpo.files import tensor_files
from sage_grpo.files.tensor_files import NAMES, TensorFile, all_finite, write_file


def some_tensors():
    of_each_type = {str(dtype): (100 * torch.rand(3, 5)).to(dtype) for dtype in NAMES}
    return of_each_type | {
        "transposed": torch.rand(4, 6).T,
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 7),
        "long": torch.arange(1000.0),
        "ünïcode/name": torch.ones(1, dtype=torch.bfloat16),
    }


@pytest.mark.parametrize("piece", [7, 1 << 26])
def test_what_is_written_is_read_back_by_safetensors(tmp_path, monkeypatch, piece):
    monkeypatch.setattr(tensor_files, "PIECE", piece)
    monkeypatch.setattr(tensor_files, "UNSYNCED", 100)
    tensors = some_tensors()
    path = tmp_path / "file.safetensors"
    sha256 = write_file(path, TensorFile(tensors, {"format": "pt", "more": "words"}))
    loaded = load_file(path)
    assert loaded.keys() == tensors.keys()
    for name, value in tensors.items():
        assert loaded[name].dtype == value.dtype
        assert torch.equal(loaded[name], value)
    assert sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert safe_open(path, "pt").metadata() == {"format": "pt", "more": "words"}


def test_progress_is_reported_piece_by_piece(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_files, "PIECE", 400)
    path = tmp_path / "file.safetensors"
    sizes = []
    write_file(
        path,
        TensorFile({"a": torch.rand(1000)}, {}),
        on_piece=lambda: sizes.append(path.stat().st_size),
    )
    assert len(sizes) == 11  # a header and 4,000 bytes
    assert sizes == sorted(sizes)


def test_text_is_written_as_it_is(tmp_path):
    text = '{"ü": 1}\n'
    sha256 = write_file(tmp_path / "a.json", text)
    assert sha256 == hashlib.sha256(text.encode()).hexdigest()
    assert (tmp_path / "a.json").read_text(encoding="utf-8") == text


def test_a_file_without_tensors_is_one(tmp_path):
    write_file(tmp_path / "none.safetensors", TensorFile({}, {}))
    assert load_file(tmp_path / "none.safetensors") == {}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_one_value_that_is_not_finite_is_noticed(dtype):
    largest = torch.finfo(dtype).max
    values = torch.full((3, 50), largest, dtype=dtype)  # whose sum is not finite
    assert all_finite(values) and all_finite(values[:0])
    infinite = torch.zeros(40, dtype=dtype)
    infinite[[3, 30]] = torch.tensor([torch.inf, -torch.inf], dtype=dtype)
    assert not all_finite(infinite)
    for bad in (torch.nan, torch.inf, -torch.inf):
        values = torch.ones(3, 50, dtype=dtype)
        values[1, 20] = bad
        assert not all_finite(values)


def test_numbers_of_other_kinds_are_finite():
    assert all_finite(torch.arange(3)) and all_finite(torch.tensor([True]))
