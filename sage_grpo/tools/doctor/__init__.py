"""Checks a configuration before it costs GPU hours.

finding.py    what a check reports
machine.py    checks of this machine, without the model: the short doctor
checks.py     checks of model, prompts, reward and sampler
update.py     the check of rollout, first ratio and gradients
samplers.py   the comparison of all exploration SDEs
"""
