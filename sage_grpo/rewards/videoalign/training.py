"""The loop that trains a VideoAlign: the embedded one from random weights, and adapters on people's answers.

AdamW with a warm start and a cosine decay of the learning rate. What a step trains on and how it computes gradients is
the caller's; batches follow from the number of the step, so that a stored state is all it takes to continue.
"""

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm

BETAS = (0.9, 0.98)
WEIGHT_DECAY = 0.05
MAX_NORM = 1.0  # of the gradient
MOMENTS = ("exp_avg", "exp_avg_sq", "step")  # AdamW's names of its state

Batch = tuple[Tensor, ...]
Step = Callable[[], Tensor]


def warm_cosine(step: int, steps: int) -> float:
    """Factor of the learning rate at step 0, 1, ...: up during a twentieth of the steps, then down to a fiftieth."""
    warmup = min(1.0, 20 * (step + 1) / steps)
    return warmup * (0.51 + 0.49 * math.cos(math.pi * step / steps))


def zero_state(optimizer: torch.optim.Optimizer) -> None:
    """Zero the optimizer's state in place: recorded graphs hold these tensors."""
    for state in optimizer.state.values():
        for value in state.values():
            value.zero_()


def train(
    parameters: Mapping[str, nn.Parameter],
    *,
    steps: int,
    until: int | None = None,
    lr: float,
    draw: Callable[[int], Batch],
    gradients: Callable[..., Tensor],
    name: str,
    after_step: Callable[[int, Tensor], bool | None] = lambda number, loss: False,
    record: Callable[[Step], Step] | None = None,
    state: "StateFile | None" = None,
) -> None:
    """Train the parameters in place.

    steps: length of the schedule. until: step after which to stop, by default the last of the schedule. draw: the batch
    of step 1, 2, ... gradients: adds the gradients of a batch's loss to the parameters and returns the
    loss. name: of the progress bar. after_step: called with the number of a finished step and its loss; True ends the
    training. record: makes a step over static buffers fast; batches must then have one shape, and the step runs a few
    times at a learning rate of 0 before. state, not with record: where to store the state of training, and to continue
    from.
    """
    if record and state:
        raise ValueError("a recorded step keeps its moments: give either record or state")
    trained = list(parameters.values())
    rate = torch.zeros((), device=trained[0].device)
    optimizer = torch.optim.AdamW(
        trained, rate, betas=BETAS, weight_decay=WEIGHT_DECAY, capturable=rate.is_cuda
    )

    def step_on(batch: Batch) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = gradients(*batch)
        nn.utils.clip_grad_norm_(trained, MAX_NORM)
        optimizer.step()
        return loss.detach()

    if record is None:
        step = step_on
    else:
        buffers = tuple(part.clone() for part in draw(0))
        replay = record(lambda: step_on(buffers))
        zero_state(optimizer)

        def step(batch: Batch) -> Tensor:
            for buffer, part in zip(buffers, batch, strict=True):
                buffer.copy_(part)
            return replay()

    done = state.load(parameters, optimizer) if state else 0
    last = steps if until is None else until
    numbers = range(done + 1, last + 1)
    for number in tqdm(numbers, name, initial=done, total=last, unit="step", mininterval=5):
        rate.fill_(lr * warm_cosine(number - 1, steps))
        loss = step(draw(number))
        ends = after_step(number, loss)
        if state and (ends or number == last or number % state.interval == 0):
            state.save(parameters, optimizer, number)
        if ends:
            break


class StateFile:
    """Parameters and moments after a step, in one safetensors file that is replaced at once."""

    def __init__(self, path: Path, key: str, interval: int) -> None:
        """key: what the training depends on; a file with another one is ignored. interval: steps between two saves."""
        self.path = path
        self.key = key
        self.interval = interval

    def save(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        number: int,
    ) -> None:
        tensors = {}
        for name, parameter in parameters.items():
            tensors[f"value/{name}"] = parameter.detach()
            for moment in MOMENTS:
                tensors[f"{moment}/{name}"] = optimizer.state[parameter][moment]
        copies = {name: value.cpu().contiguous() for name, value in tensors.items()}
        unfinished = self.path.with_suffix(".new")
        save_file(copies, unfinished, {"step": str(number), "key": self.key})
        os.replace(unfinished, self.path)

    @torch.no_grad()
    def load(self, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> int:
        """Continue from the file; returns the number of its step, 0 if there is none for this training."""
        if not self.path.is_file():
            return 0
        with safe_open(self.path, framework="pt") as file:
            about = file.metadata()
            if about.get("key") != self.key:
                return 0
            for name, parameter in parameters.items():
                parameter.copy_(file.get_tensor(f"value/{name}"))
                moments = {moment: file.get_tensor(f"{moment}/{name}") for moment in MOMENTS}
                if parameter.is_cuda:  # capturable: on the device, the count of steps too
                    moments = {key: value.to(parameter.device) for key, value in moments.items()}
                optimizer.state[parameter] = moments
        return int(about["step"])
