#!/usr/bin/env bash
# Post-trains HunyuanVideo-1.5 on several machines, 8 GPUs each, named by NODES=a,b,c or HOSTFILE=FILE.
#
#   NODES=a,b,c bash run_post_train_multinode.sh [--dry_run | --stop] [flags of post_train.py, which override all]
#
# docs/running.md lists the settings and explains what happens when a node dies.
# `python post_train.py --help` lists the flags.
set -euo pipefail
here=$(dirname "$0")/scripts/post_train
# shellcheck source=scripts/post_train/settings.sh
source "$here/settings.sh"
help_if_asked "$@"
exec bash "$here/pdsh_train.sh" scripts/post_train/train_grpo.sh "$@"
