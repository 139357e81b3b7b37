"""Every configuration setting reaches the run: real runs, and a record of the flags they read."""

import dataclasses
import sys

import pytest

import post_train
from sage_grpo.config.fields import FIELDS, Config
from sage_grpo.config.parse import from_values
from sage_grpo.config.rules import RULES
from sage_grpo.tools.report import page as report

# functions that fill flags in or compare them, and use none
BOOKKEEPING = {"resolve", "check", *(rule.__name__ for rule in RULES)}

OTHER_ALGORITHM = {
    "algorithm": "nft",
    "nft_decay_growth": 0.1,
    "ema_decay": 0.5,
    "num_generations": 4,
    "train_clips": 2,
}


def recorded(kind: type) -> tuple[type, set[str]]:
    """A configuration like `kind`, and the flags that will have been read for use, not to copy, write or check them."""
    read: set[str] = set()

    class Recorded(kind):
        def __getattribute__(self, name):
            code = sys._getframe(1).f_code
            outside = code.co_filename not in (
                dataclasses.__file__,
                "<string>",
            )  # where dataclasses write their code
            if outside and code.co_qualname.partition(".")[0] not in BOOKKEEPING:
                read.add(name)
            return super().__getattribute__(name)

    return Recorded, read


@pytest.fixture
def flags_read(flags, monkeypatch):
    """The flags of a configuration class that a run with LoRA, and one of all weights and another algorithm, read."""

    def run(kind):
        kind, read = recorded(kind)
        monkeypatch.setattr(
            report, "print_summary", lambda run: None
        )  # it reads files alone, and is slow
        for use_lora in (True, False):
            values = flags | {"use_lora": use_lora, "max_steps": 2, "overwrite": True}
            values |= {"enable_gradient_checkpointing": True, "validation_fixed_size": "16x16"}
            values |= {} if use_lora else OTHER_ALGORITHM
            config = kind(**vars(from_values(values)))
            monkeypatch.setattr(post_train, "parse", lambda arguments, config=config: config)
            assert post_train.main([]) == 0
        return read

    return run


def test_every_flag_is_read_by_a_run(flags_read):
    @dataclasses.dataclass(frozen=True)
    class Longer(Config):
        idle: int = 3

    read = flags_read(Longer)
    assert {name for name in (*FIELDS, "idle") if name not in read} == {"idle"}
