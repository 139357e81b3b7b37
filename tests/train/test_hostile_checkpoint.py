"""A checkpoint that holds more than tensors and JSON: nothing of it runs."""

import pytest
from safetensors import SafetensorError

from sage_grpo.train import checkpoint
from tests.hostile import write_bomb


@pytest.fixture
def saved(make):
    """The folder of a checkpoint of a fresh trainer."""
    trainer = make(use_lora=True)
    return checkpoint.save(trainer, trainer.run.folder / "checkpoints")


@pytest.mark.parametrize("name", ["rank-00000.safetensors", "rank-00001.safetensors", "state.json"])
def test_a_bomb_in_the_place_of_a_file_is_refused(make, saved, tmp_path, name):
    write_bomb(saved / "trainer" / name, tmp_path / "marker")
    with pytest.raises((ValueError, SafetensorError)):
        make(use_lora=True, resume_from_checkpoint="auto")
    assert not (tmp_path / "marker").exists()


def test_bombs_beside_the_files_do_not_go_off(make, saved, tmp_path):
    for name in ("optimizer.pt", "pytorch_model.bin", "rank-00000.pth", ".metadata", "state.pkl"):
        write_bomb(saved / "trainer" / name, tmp_path / "marker")
        write_bomb(saved / name, tmp_path / "marker")
    assert make(use_lora=True, resume_from_checkpoint="auto").step == 0
    assert not (tmp_path / "marker").exists()
