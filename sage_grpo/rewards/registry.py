"""Rewards that a command line can name: `module:attribute`, called with a `Setup`.

To add one, copy `motion.py`, the simplest, and add a row (docs/extending.md). Its memory and time go under [rewards] in
`sage_grpo/tools/plan/calibration.toml`; without them the planner leaves it out and says so.
"""

REWARDS = {
    "videoalign": "sage_grpo.rewards.videoalign.reward:build",
    "clipscore": "sage_grpo.rewards.clip:ClipScore",
    "pickscore": "sage_grpo.rewards.clip:PickScore",
    "ocr": "sage_grpo.rewards.ocr:OcrReward",
    "first_frame": "sage_grpo.rewards.first_frame:FirstFrameReward",
    "motion": "sage_grpo.rewards.motion:Motion",
    "judge": "sage_grpo.rewards.judge:Judge",
    "remote": "sage_grpo.rewards.remote:RemoteReward",
    "shapes": "sage_grpo.worlds.shapes.reward:build",
}
SERVED = ("judge", "remote")  # these are on a server of their own
ALIASES = {"videoalign_local": "videoalign"}
DEFAULT = "videoalign"  # for models of the real world
