"""DiffusionNFT (arXiv 2509.16117): relative to an old policy, match good clips more closely and bad ones less.

The old policy samples. It follows the trained one with a growing lag (`nft_decay`): `Optimization.step` moves it, and
`Trainer.roll_out` samples with it.
"""

from torch import Tensor

from sage_grpo.algo.matching import nft_loss
from sage_grpo.train.algorithms.matching import Matching
from sage_grpo.train.rollout import Pairs


class Nft(Matching):
    def policy_loss(
        self, pairs: Pairs, velocity: Tensor, log_ratio: Tensor, advantages: Tensor
    ) -> Tensor:
        c = self.config
        return nft_loss(
            velocity,
            pairs.old_velocity,
            target=pairs.outcome,
            sigma=pairs.sigma,
            advantages=advantages,
            beta=c.nft_beta,
            largest=c.adv_clip_max,
        )
