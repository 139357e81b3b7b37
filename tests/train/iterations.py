"""Parts of an iteration, for tests."""

from sage_grpo.parallel.fsdp import whole


def next_gradients(trainer):
    """Of the next iteration, over all ranks, before the optimizer; with its record and advantages. Ends the trainer."""
    found, parameters = {}, trainer.optimization.parameters

    def optimizer_step():
        trainer.ranks.sum_gradients(parameters.values())
        found.update({name: whole(parameter.grad).clone() for name, parameter in parameters.items()})
        return 1.0

    trainer.optimizer_step = optimizer_step
    schedule = trainer.schedule()
    batch = trainer.roll_out(schedule)
    advantages = trainer.advantages(trainer.score(batch, trainer.decode(batch)))
    trainer.prepare_anchor(batch, schedule)
    record = trainer.update(batch, schedule, advantages)
    return found, record, advantages.values
