"""What an algorithm is. The loop, the trust region and the optimizer are the same for all of them."""

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor

from sage_grpo.algo.sde import Schedule
from sage_grpo.config.fields import Config
from sage_grpo.models.backbone import Guidance
from sage_grpo.train.rollout import Pairs, RolloutSampler


class Algorithm(ABC):
    """One way to learn from clips and their advantages."""

    # whether clips explore by the noise of an SDE; else they differ only by their initial noise
    explores: ClassVar[bool]
    sampler: ClassVar[type[RolloutSampler]]
    # whether the steps of one clip carry independent noise; awm and nft see the same clip at every level
    independent_steps: ClassVar[bool]

    def __init__(self, config: Config) -> None:
        self.config = config

    @abstractmethod
    def schedule(self) -> Schedule:
        """The tables of its log-probabilities and KL."""

    @abstractmethod
    def trained_guidance(self, guidance: Guidance) -> Guidance:
        """The guidance of the velocities that are trained, for clips that were sampled with `guidance`."""

    @abstractmethod
    def policy_loss(
        self, pairs: Pairs, velocity: Tensor, log_ratio: Tensor, advantages: Tensor
    ) -> Tensor:
        """The loss of each pair, (B,), without its equalizer and the KL.

        `velocity` (B, ...) is the policy's, `log_ratio` and `advantages` are (B,). A pair without an advantage adds 0.
        """
