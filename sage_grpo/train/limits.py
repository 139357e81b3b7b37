"""What samples can reach at best in a model's world: the scores of perfect clips, and what the VAE alone costs.

Only reports show these numbers, so a run measures them after its first iteration instead of before.
"""

from collections.abc import Sequence
from typing import Any

from sage_grpo.config.fields import Config
from sage_grpo.data.requests import Request
from sage_grpo.models.backbone import Backbone
from sage_grpo.rewards.base import Composite
from sage_grpo.worlds.registry import World, drawn

NUM_DRAWN = 64  # rendered clips whose scores are the goal


def limits(
    world: World,
    backbone: Backbone,
    reward: Composite,
    requests: Sequence[Request],
    config: Config,
) -> dict[str, Any]:
    """A line of metrics.jsonl. requests: those whose clips are judged, held-out ones if there are any."""
    return {
        "perfect": perfect_scores(world, reward, requests, config),
        "vae_floor": world.vae_floor(backbone),
    }


def perfect_scores(
    world: World, reward: Composite, requests: Sequence[Request], config: Config
) -> dict[str, float]:
    """Mean scores of clips that show exactly what the requests say: about the most that training can reach."""
    c = config
    clips, requests = drawn(world, requests[:NUM_DRAWN], c.num_frames, c.height, c.width, c.seed)
    scores = reward.score(clips, requests, c.fps)
    means = {name: values.mean().item() for name, values in scores.named.items()}
    means["total"] = scores.total.mean().item()
    return means
