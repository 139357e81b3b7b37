"""What the planner prints besides numbers: warnings, and what it could not count."""

from sage_grpo.tools.plan.summary import caveats, few_prompts_warning
from tests.tools.plan.imaginary import imaginary_plan


def test_few_prompts_per_update_are_named():
    assert few_prompts_warning(8) == ""
    warning = few_prompts_warning(7)
    assert warning.startswith("7 prompt(s) per update") and "gradient_accumulation_steps" in warning
    assert few_prompts_warning(2, ema_decay=0.95) == ""  # as in the demo


def test_rewards_of_unknown_cost_are_named_and_aliases_are_not():
    def unknown_rewards(*names):
        return [line for line in caveats(imaginary_plan(reward_model=names)) if "reward" in line]

    assert not unknown_rewards("videoalign_local", "clipscore")
    (line,) = unknown_rewards("videoalign", "mine.py:Mine")
    assert "mine.py:Mine" in line and "videoalign" not in line
