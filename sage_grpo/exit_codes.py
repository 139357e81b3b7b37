"""Exit codes of `post_train.py`; the last one tells a scheduler to requeue the job."""

DONE, FAILED, WRONG_INPUT, PREEMPTED = 0, 1, 2, 75
