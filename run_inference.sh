#!/usr/bin/env bash
# Generates videos with a run's checkpoint.
#
#   PROMPT="a cat" bash run_inference.sh [--dry_run] [flags of generate.py, which override everything]
#
# OUTPUT_DIR is the run (default: from configs/hunyuan15_8gpu.yaml), CHECKPOINT one of its checkpoints (default: the
# newest), MODEL_ROOT the model it started from (default: from the run's config.yaml). Also set PROMPT or PROMPTS (a
# .csv, .txt or .jsonl file) and NUM_GPUS (default 1).
set -euo pipefail
shopt -s inherit_errexit
cd "$(dirname "${BASH_SOURCE[0]}")"
source scripts/post_train/settings.sh

newest_checkpoint() {
    local newest
    newest=$(find "$OUTPUT_DIR/checkpoints" -maxdepth 1 -name 'step-*[0-9]' 2>/dev/null | sort -V | tail -n 1) || true
    [[ -n $newest ]] || fail "$OUTPUT_DIR/checkpoints holds no checkpoint; set CHECKPOINT, or OUTPUT_DIR to a run"
    echo "$newest"
}

run_value() { # NAME: its value in the run's configuration
    if [[ -f $OUTPUT_DIR/config.yaml ]]; then yaml_value "$1" "$OUTPUT_DIR/config.yaml"; fi
}

take_switches "$@"
[[ $mode == run || $mode == dry_run ]] || fail "--$mode is for training"
NNODES=1 NUM_GPUS=${NUM_GPUS:-1}
whole NUM_GPUS
read_config "${flags[@]}"
command=("$(python_path)")
if ((NUM_GPUS > 1)); then command+=(-m torch.distributed.run --standalone --nproc_per_node "$NUM_GPUS"); fi
command+=(generate.py --model_path "$(first "${MODEL_ROOT:-}" "$(run_value pretrained_model_root)" ckpts)")
version=$(run_value pretrained_transformer_version)
if [[ -n $version ]]; then command+=(--pretrained_transformer_version "$version"); fi
command+=(--checkpoint_path "${CHECKPOINT:-$(newest_checkpoint)}")
if [[ -n ${PROMPT:-} ]]; then command+=(--prompt "$PROMPT"); fi
if [[ -n ${PROMPTS:-} ]]; then command+=(--valid_video_csv "$PROMPTS"); fi
command+=("${flags[@]}")
if [[ $mode == dry_run ]]; then
    pasteable cd "$PWD"
    pasteable "${command[@]}"
else
    exec "${command[@]}"
fi
