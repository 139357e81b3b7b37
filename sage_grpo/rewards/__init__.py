"""Rewards that a command line can name; those beyond VideoAlign are in extra_rewards/.

To add one, write a file like `extra_rewards/ocr.py` and add a row (docs/extending.md).
"""

REWARDS = {
    "videoalign": "sage_grpo.rewards.videoalign:build",
    "clipscore": "extra_rewards.clip:ClipScore",
    "pickscore": "extra_rewards.clip:PickScore",
    "ocr": "extra_rewards.ocr:OcrReward",
    "first_frame": "extra_rewards.first_frame:FirstFrame",
    "motion": "extra_rewards.first_frame:Motion",
    "judge": "extra_rewards.judge:Judge",
    "remote": "extra_rewards.remote:RemoteReward",
    "shapes": "embedded.shapes.reward:build",
}
ALIASES = {"videoalign_local": "videoalign"}
DEFAULT = "videoalign"  # for real-world models
TOKEN_VARIABLE, HOSTS_VARIABLE = "SAGE_REWARD_TOKEN", "SAGE_REWARD_HOSTS"  # of remote rewards, in the environment
