"""Bradley-Terry with ties (Rao and Kupper, 1967), the model by which VideoAlign was learned from people's comparisons.

With scores a and b, d = a - b and theta > 1:

    P(first is better)  = e^a / (e^a + theta e^b) = sigmoid(d - log theta)
    P(second is better) = sigmoid(-d - log theta)
    P(tie)              = (theta^2 - 1) e^a e^b / ((e^a + theta e^b) (theta e^a + e^b)), what is left

VideoAlign has theta = 5: two equal clips are a tie with probability 2/3.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import softplus

THETA = 5.0


def tie_losses(difference: Tensor, labels: Tensor, theta: float = THETA) -> Tensor:
    """Minus the log-probability of each label, for scores that differ by `difference`; both of any one shape.

    labels: positive if the first is better, negative if the second is, 0 for a tie.
    """
    log_theta = math.log(theta)
    first = softplus(log_theta - difference)
    second = softplus(log_theta + difference)
    tie = first + second - math.log(theta**2 - 1)
    return torch.where(labels > 0, first, torch.where(labels < 0, second, tie))


def outcome_probabilities(difference: Tensor, theta: float = THETA) -> Tensor:
    """Probabilities (..., 3) that the first is better, of a tie, and that the second is better."""
    log_theta = math.log(theta)
    first = torch.sigmoid(difference - log_theta)
    second = torch.sigmoid(-difference - log_theta)
    return torch.stack([first, 1 - first - second, second], dim=-1)
