"""Rewards that a command line can name: `module:attribute`, called with a `Setup`.

To add one, write a file like `sage_grpo/rewards/ocr.py` and add a row (docs/extending.md).
"""

REWARDS = {
    "videoalign": "sage_grpo.rewards.videoalign.reward:build",
    "clipscore": "sage_grpo.rewards.clip:ClipScore",
    "pickscore": "sage_grpo.rewards.clip:PickScore",
    "ocr": "sage_grpo.rewards.ocr:OcrReward",
    "first_frame": "sage_grpo.rewards.first_frame:FirstFrame",
    "motion": "sage_grpo.rewards.motion:Motion",
    "judge": "sage_grpo.rewards.judge:Judge",
    "remote": "sage_grpo.rewards.remote:RemoteReward",
    "shapes": "sage_grpo.worlds.shapes.reward:build",
}
SERVED = ("judge", "remote")  # these are on a server of their own
ALIASES = {"videoalign_local": "videoalign"}
DEFAULT = "videoalign"  # for models of the real world
