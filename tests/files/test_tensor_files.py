"""Safetensors files written in pieces."""

import hashlib

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from sage_grpo.files import tensor_files
from sage_grpo.files.tensor_files import NAMES, TensorFile, write_file


def some_tensors():
    drawn = {str(dtype): (100 * torch.rand(3, 5)).to(dtype) for dtype in NAMES}
    views = {
        "transposed": torch.rand(4, 6).T,
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 7),
    }
    return (
        drawn
        | views
        | {"long": torch.arange(1000.0), "ünïcode/name": torch.ones(1, dtype=torch.bfloat16)}
    )


@pytest.mark.parametrize("piece", [7, 1 << 26])
def test_what_is_written_is_read_back_by_safetensors(tmp_path, monkeypatch, piece):
    monkeypatch.setattr(tensor_files, "PIECE", piece)
    monkeypatch.setattr(tensor_files, "UNSYNCED", 100)
    tensors, path = some_tensors(), tmp_path / "file.safetensors"
    sha256 = write_file(path, TensorFile(tensors, {"format": "pt", "more": "words"}))
    found = load_file(path)
    assert found.keys() == tensors.keys()
    assert all(
        torch.equal(found[name], value) and found[name].dtype == value.dtype
        for name, value in tensors.items()
    )
    assert sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert safe_open(path, "pt").metadata() == {"format": "pt", "more": "words"}


def test_growth_is_told_piece_by_piece(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_files, "PIECE", 400)
    sizes = []
    path = tmp_path / "file.safetensors"
    write_file(
        path, TensorFile({"a": torch.rand(1000)}, {}), lambda: sizes.append(path.stat().st_size)
    )
    assert len(sizes) == 11 and sizes == sorted(sizes)


def test_text_is_written_as_it_is(tmp_path):
    assert (
        write_file(tmp_path / "a.json", '{"ü": 1}\n')
        == hashlib.sha256('{"ü": 1}\n'.encode()).hexdigest()
    )
    assert (tmp_path / "a.json").read_text(encoding="utf-8") == '{"ü": 1}\n'


def test_a_file_without_tensors_is_one(tmp_path):
    write_file(tmp_path / "none.safetensors", TensorFile({}, {}))
    assert load_file(tmp_path / "none.safetensors") == {}
