"""Fits VideoAlign's reward heads to comparisons: a vector per dimension on fixed hidden states, a convex problem.

The score of dimension d is w_d . h_d, with h_d the hidden state at its reward token. What is learned is the change of
w_d, under a penalty on its size in units of the features' standard deviations: dimensions that no question asked about,
and directions that the answers do not determine, stay as they were. The strength of the penalty is chosen by
cross-validation over prompts.

Shapes: P comparisons, N clips, D hidden features.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sage_grpo.algo.preference import tie_losses
from sage_grpo.rewards.videoalign.folder import DIMENSIONS

STRENGTHS = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
FOLDS = 5
# of a feature, relative to the mean spread; below it a feature counts as constant
MIN_SPREAD = 1e-3


@dataclass(frozen=True)
class Comparisons:
    """Answers about pairs of clips, one row per answer and question."""

    first: Tensor  # (P,) indices of clips
    second: Tensor
    shares: Tensor  # (P, 3) how much of each dimension's raw score the question asks about
    labels: Tensor  # (P,) 1: the first is better; -1: the second; 0: a tie
    prompts: tuple[str, ...]
    questions: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, rows: Sequence[int]) -> "Comparisons":
        index = torch.as_tensor(rows, dtype=torch.long)
        return Comparisons(
            first=self.first[index],
            second=self.second[index],
            shares=self.shares[index],
            labels=self.labels[index],
            prompts=tuple(self.prompts[row] for row in rows),
            questions=tuple(self.questions[row] for row in rows),
        )

    def differences(self, raw: Tensor) -> Tensor:
        """First minus second (P,) for raw scores (N, 3)."""
        return ((raw[self.first] - raw[self.second]) * self.shares).sum(1)


def raw_scores(hidden: Tensor, head: Tensor) -> Tensor:
    """Raw scores (N, 3) of hidden states (N, 3, D) by a head (3, D)."""
    return (hidden * head).sum(-1)


def fit_heads(hidden: Tensor, head: Tensor, comparisons: Comparisons, strength: float) -> Tensor:
    """The head (3, D) that explains the comparisons best, at a strength of the penalty; all in fp64."""
    hidden = hidden.double()
    head = head.double()
    spread = hidden.std(0)
    scale = spread.clamp(min=MIN_SPREAD * spread.mean().item())  # (3, D)
    rows = (hidden[comparisons.first] - hidden[comparisons.second]) * comparisons.shares[..., None]
    rows = rows.double()
    asked = (comparisons.shares != 0).any(0)[:, None].double()  # others stay
    change = torch.zeros_like(head, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [change], max_iter=300, tolerance_grad=1e-9, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        new_head = head + asked * change / scale
        differences = (rows * new_head).sum((1, 2))
        fit = tie_losses(differences, comparisons.labels).mean()
        value = fit + strength * (asked * change).square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    return (head + asked * change / scale).detach()


def choose_strength(
    hidden: Tensor, head: Tensor, comparisons: Comparisons, seed: int
) -> dict[float, float]:
    """Mean loss on left-out prompts by strength of the penalty; the least is the best."""
    folds = prompt_folds(comparisons.prompts, FOLDS, seed)
    losses = dict.fromkeys(STRENGTHS, 0.0)
    for fold in range(FOLDS):
        inside = [row for row, number in enumerate(folds) if number != fold]
        outside = [row for row, number in enumerate(folds) if number == fold]
        if not inside or not outside:
            continue
        left_out = comparisons[outside]
        for strength in STRENGTHS:
            fitted = fit_heads(hidden, head, comparisons[inside], strength)
            differences = left_out.differences(raw_scores(hidden.double(), fitted))
            loss = tie_losses(differences, left_out.labels).sum().item()
            losses[strength] += loss / len(comparisons)
    return losses


def prompt_folds(prompts: Sequence[str], folds: int, seed: int) -> list[int]:
    """The fold of each row; all rows of a prompt have the same."""
    different = sorted(set(prompts))
    order = np.random.default_rng(seed).permutation(len(different))
    fold_of = {different[place]: number % folds for number, place in enumerate(order)}
    return [fold_of[prompt] for prompt in prompts]


def full_head(head: Tensor) -> Tensor:
    """A head with one vector per dimension, (3, D); one shared vector is repeated."""
    return head.expand(len(DIMENSIONS), -1).clone()
