"""Algorithms that `--algorithm` can name. To add one, write a class, a row here, and its name in config/fields.py."""

from sage_grpo.config.fields import Config
from sage_grpo.train.algorithms.awm import Awm
from sage_grpo.train.algorithms.base import Algorithm
from sage_grpo.train.algorithms.grpo import Grpo
from sage_grpo.train.algorithms.nft import Nft

ALGORITHMS: dict[str, type[Algorithm]] = {"grpo": Grpo, "awm": Awm, "nft": Nft}


def build_algorithm(config: Config) -> Algorithm:
    return ALGORITHMS[config.algorithm](config)
