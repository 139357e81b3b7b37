"""The run folder: written during training, read back by tools.

folder         what training writes, and in which order
lock           one run at a time in a folder
tracker        metrics.jsonl, TensorBoard, wandb
page_process   refreshes report.html during training
card           the model card of a checkpoint

history        metrics read back by iteration
clips          the clips of a validation with their scores
media          mp4 files and contact sheets
hacking        the reward rises while a held-out reward falls
diagnosis      rules: what is wrong with a run, why, and what helps
case           measurements that several rules share
"""
