"""Parts of an iteration, and a checkpoint after it, for tests."""

import time

import torch

from sage_grpo import rng
from sage_grpo.parallel.fsdp import full_tensor
from sage_grpo.train import build, checkpoint
from sage_grpo.train.saving import PAUSE


def in_fp64():
    """Run all code in fp64; this process does nothing else."""
    build.DTYPES["fp32"] = torch.float64
    drawn = rng.normal
    rng.normal = lambda *key, **words: drawn(*key, **words).double()


def next_gradients(trainer):
    """Gradients of the next iteration over all ranks, with its record and advantages. Ends the trainer."""
    found, parameters = {}, trainer.optimization.parameters

    def optimizer_step():
        trainer.ranks.sum_gradients(parameters.values())
        found.update(
            {
                name: full_tensor(parameter.grad).clone()
                for name, parameter in parameters.items()
                if parameter.grad is not None
            }
        )
        return 1.0

    trainer.optimizer_step = optimizer_step
    batch = trainer.roll_out()
    advantages = trainer.advantages(trainer.score(batch, trainer.decode(batch)))
    batch, trained = trainer.select(batch, advantages)
    trainer.prepare_anchor(batch)
    record = trainer.update(batch, trained)
    return found, record, advantages.values


def save(trainer, folder):
    """Write a checkpoint and wait for it; returns its folder."""
    for _ in trainer.saves.write(folder, export=True, copied=trainer.config.async_save):
        time.sleep(PAUSE)
    return folder / f"step-{trainer.settled_step:06d}"


def load(trainer, path):
    """Load a checkpoint into a freshly built trainer."""
    checkpoint.load(trainer.state, trainer.config, trainer.fingerprints, trainer.ranks, path)
