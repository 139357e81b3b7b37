"""The loop that trains a VideoAlign: schedule, end, and a state from which it continues to the last bit."""

import pytest
import torch
from torch import nn

from sage_grpo.rewards.videoalign.training import StateFile, train, warm_cosine


@pytest.mark.parametrize("steps", [3, 20, 21, 200])
def test_the_learning_rate_rises_and_falls_whatever_the_number_of_steps(steps):
    rates = [warm_cosine(step, steps) for step in range(steps)]
    assert max(rates) <= 1 and rates[-1] < max(rates) and (steps < 40 or rates[0] < max(rates))
    assert steps < 200 or rates[-1] < 0.03


class Problem:
    """Least squares on batches that follow from the number of the step."""

    def __init__(self):
        self.parameters = {"w": nn.Parameter(torch.ones(4)), "b": nn.Parameter(torch.zeros(1))}
        self.drawn = []

    def draw(self, number):
        self.drawn.append(number)
        return (torch.randn(8, 4, generator=torch.Generator().manual_seed(number)),)

    def gradients(self, rows):
        w, b = self.parameters.values()
        loss = (rows @ w + b - rows.sum(1) * 3).square().mean()
        loss.backward()
        return loss

    def train(self, steps=6, **options):
        train(
            self.parameters,
            steps=steps,
            lr=0.1,
            draw=self.draw,
            gradients=self.gradients,
            name="test",
            **options,
        )
        return [value.detach().clone() for value in self.parameters.values()]


def equal(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_it_learns():
    problem = Problem()
    start = problem.gradients(*problem.draw(1)).item()
    w, _ = problem.train(steps=60)
    assert problem.gradients(*problem.draw(1)).item() < start / 4
    assert w.mean() > 1.5


def test_a_step_over_static_buffers_is_the_same_step():
    recorded = Problem()
    assert equal(recorded.train(record=lambda step: step), Problem().train())
    assert recorded.drawn == [0, 1, 2, 3, 4, 5, 6]


def test_it_continues_to_the_last_bit(tmp_path):
    expected = Problem().train()
    file = tmp_path / "state.safetensors"
    killed = Problem()
    draw = killed.draw

    def interrupted(number):
        if number == 4:
            raise KeyboardInterrupt
        return draw(number)

    killed.draw = interrupted
    with pytest.raises(KeyboardInterrupt):
        killed.train(state=StateFile(file, "key", interval=2))
    resumed = Problem()
    assert equal(resumed.train(state=StateFile(file, "key", interval=2)), expected)
    assert resumed.drawn == [3, 4, 5, 6]
    again = Problem()
    assert equal(again.train(state=StateFile(file, "key", interval=2)), expected)
    assert again.drawn == []
    other = Problem()
    assert equal(other.train(state=StateFile(file, "other", interval=2)), expected)
    assert other.drawn == [1, 2, 3, 4, 5, 6]


def test_it_ends_where_it_is_told_to_on_the_schedule_of_all_steps():
    cut = Problem()
    values = cut.train(until=3)
    stopped = Problem()
    assert equal(stopped.train(after_step=lambda number, loss: number == 3), values)
    assert cut.drawn == stopped.drawn == [1, 2, 3]
    assert not equal(Problem().train(steps=3), values)  # its learning rate falls faster
