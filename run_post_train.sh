#!/usr/bin/env bash
# Post-trains HunyuanVideo-1.5 on one machine with 8 GPUs; run the same command again to resume.
#
#   bash run_post_train.sh [--dry_run] [flags of post_train.py, which override everything]
#
# Checks this machine first: GPUs, driver, memory, disk, model, reward; SKIP_CHECKS=1 leaves that out.
# Values come from configs/hunyuan15_8gpu.yaml: the published command with another KL weight, cheaper rollouts and larger
# batches; for the exact published one, set CONFIG=configs/hunyuan15_8gpu_published.yaml. CONFIG, NUM_GPUS, OUTPUT_DIR,
# MODEL_ROOT, LEARNING_RATE and more in the environment override them: docs/running.md lists them all.
# `python post_train.py --help` lists the flags.
set -euo pipefail
here=$(dirname "$0")/scripts/post_train
# shellcheck source=scripts/post_train/settings.sh
source "$here/settings.sh"
help_if_asked "$@"
exec env NNODES=1 NODE_RANK=0 bash "$here/train_grpo.sh" "$@"
