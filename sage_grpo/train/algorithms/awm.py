"""AWM, advantage weighted matching (arXiv 2509.25050): GRPO's clipped ratio with -|v - target|^2 as log-probability."""

from torch import Tensor

from sage_grpo.algo.grpo import policy_loss
from sage_grpo.train.algorithms.matching import Matching
from sage_grpo.train.rollout import Pairs


class Awm(Matching):
    def policy_loss(
        self, pairs: Pairs, velocity: Tensor, log_ratio: Tensor, advantages: Tensor
    ) -> Tensor:
        return policy_loss(log_ratio, advantages, self.config.clip_range)
