"""Fingerprints of files: what changes them, and what does not."""

import pytest
import torch
from safetensors.torch import save_file

from sage_grpo.files import fingerprints
from sage_grpo.files.fingerprints import file_fingerprint, files_fingerprint


def test_a_large_file_is_sampled_evenly(tmp_path):
    path = tmp_path / "weights"
    content = bytearray(range(256)) * 4

    def fingerprint(position=None, extra=b""):
        changed = bytearray(content)
        if position is not None:
            changed[position] ^= 1
        path.unlink(missing_ok=True)
        path.write_bytes(changed + extra)
        return file_fingerprint(path, blocks=4, block_size=16)

    original = fingerprint()
    assert original == fingerprint()
    assert all(fingerprint(position) != original for position in (0, 256, 512 + 15, 768))
    assert fingerprint(extra=b"x") != original


@pytest.mark.parametrize("scaled", [None, "norm.0", "norm.57", "matrix"])
def test_a_scaled_tensor_of_a_large_file_is_noticed_wherever_it_lies(tmp_path, monkeypatch, scaled):
    """The blocks, two of 64 bytes in 10 kB, alone would miss most of the 100 small tensors."""
    monkeypatch.setattr(fingerprints, "SAMPLE", 16)
    tensors = {f"norm.{i}": torch.full((16,), 1.0 + i) for i in range(100)}
    tensors["matrix"] = torch.arange(1.0, 1025.0)

    def fingerprint(name):
        path = tmp_path / name / "model.safetensors"
        path.parent.mkdir()
        save_file(tensors, path)
        return file_fingerprint(path, blocks=2, block_size=64)

    original = fingerprint("before")
    if scaled:
        tensors[scaled] *= 2
    assert (fingerprint("after") == original) == (scaled is None)


@pytest.mark.parametrize(
    "file, content, same",
    [
        ("vae/config.json", "{}", False),
        ("vae/added.safetensors", "x", False),
        ("README.md", "a note", True),
        (".cache/huggingface/download.json", "{}", True),
        ("vae/model.pth", "the file that model.safetensors was made from", True),
    ],
)
def test_a_folder_is_what_a_model_reads_of_it(tmp_path, file, content, same):
    folder = tmp_path / "model"
    (folder / "vae").mkdir(parents=True)
    (folder / "vae" / "config.json").write_text('{"width": 8}')
    (folder / "vae" / "model.safetensors").write_text("weights")
    original = files_fingerprint([folder])

    (folder / file).parent.mkdir(parents=True, exist_ok=True)
    (folder / file).write_text(content)
    assert (files_fingerprint([folder]) == original) == same


def test_a_damaged_header_is_sampled_like_any_file(tmp_path):
    path = tmp_path / "model.safetensors"
    for header in (b"\xff" * 8, (5).to_bytes(8, "little") + b"[1,2]", b"\x02"):
        path.write_bytes(header + b"x" * 300)
        assert file_fingerprint(path, blocks=2, block_size=64)
