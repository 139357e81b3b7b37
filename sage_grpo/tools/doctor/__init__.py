"""Checks a configuration before it costs GPU hours.

check_result.py  what a check reports
machine.py       checks of this machine, without the model: the short doctor
checks.py        checks of model, prompts, reward and sampler
update.py        the check of rollout, first ratio and gradients
base_model.py    the check of the model's sampling settings against its own, of its latents, and of damage to clips
samplers.py      the comparison of all exploration SDEs
"""
