"""A checkpoint that contains more than tensors and JSON: none of it is executed."""

import pytest

from sage_grpo.config.fields import ConfigError
from tests.hostile import sealed_again, write_bomb
from tests.train.iterations import save


@pytest.fixture
def saved(make):
    """The folder of a checkpoint of a fresh trainer."""
    trainer = make(use_lora=True)
    return save(trainer, trainer.run.path / "checkpoints")


@pytest.mark.parametrize("name", ["rank-00000.safetensors", "rank-00001.safetensors", "state.json"])
def test_a_bomb_in_the_place_of_a_file_is_refused(make, saved, tmp_path, name):
    """Even with a hash to match."""
    write_bomb(saved / "trainer" / name, tmp_path / "marker")
    with pytest.raises(ConfigError, match="is not a complete checkpoint"):
        make(use_lora=True, resume_from_checkpoint=str(saved))
    sealed_again(saved)
    with pytest.raises(
        ConfigError,
        match=r"cannot be read as a checkpoint of this version|state.json cannot be read",
    ):
        make(use_lora=True, resume_from_checkpoint=str(saved))
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize(
    "name", ["optimizer.pt", "trainer/rank-00000.pth", "trainer/.metadata", "state.pkl"]
)
def test_a_bomb_beside_the_files_is_refused(make, saved, tmp_path, name):
    write_bomb(saved / name, tmp_path / "marker")
    with pytest.raises(ConfigError, match=f"{name} is not in manifest.json"):
        make(use_lora=True, resume_from_checkpoint=str(saved))
    sealed_again(saved)
    assert (
        make(use_lora=True, resume_from_checkpoint=str(saved)).step == 0
    )  # listed, but nobody opens it
    assert not (tmp_path / "marker").exists()
