"""Exit codes of the programs."""

DONE = 0
FAILED = 1
WRONG_INPUT = 2
PREEMPTED = 75  # tells a scheduler to requeue the job
