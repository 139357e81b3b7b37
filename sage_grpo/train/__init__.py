"""The training loop: prompts, rollout, score, advantage, update."""
