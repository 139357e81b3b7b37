"""Estimates a run's memory, time and checkpoints before it starts.

calibration.toml, .py   measured and assumed figures, with their sources
model.py                `Plan`: what an iteration consists of, counted from configuration, model and layout
times.py, memory.py     what a plan costs
remedies.py             what to change in a run that does not fit
planner.py              `plan_of`: from a configuration to a plan
summary.py              what is printed
"""
