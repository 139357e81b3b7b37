#!/usr/bin/env bash
# Generates videos with a run's checkpoint.
#
#   PROMPT="a cat" bash run_inference.sh [--dry_run] [flags of generate.py, which override everything]
#
# OUTPUT_DIR is the run (default: from configs/hunyuan15_8gpu.yaml), CHECKPOINT one of its checkpoints (default: the
# newest), MODEL_ROOT the model it started from (default: from the run's config.yaml). Also set PROMPT or PROMPTS (a
# .csv, .txt or .jsonl file) and NUM_GPUS (default 1).
# `python generate.py --help` lists the flags.
set -euo pipefail
shopt -s inherit_errexit
cd "$(dirname "${BASH_SOURCE[0]}")"
source scripts/post_train/settings.sh

newest_checkpoint() {
    local newest folder=$OUTPUT_DIR/checkpoints
    newest=$(find "$folder" -maxdepth 1 -type d -regex '.*/step-[0-9]+' 2>/dev/null | sort -V | tail -n 1) || true
    [[ -n $newest ]] || fail "$folder holds no checkpoint; set CHECKPOINT, or OUTPUT_DIR to a run"
    echo "$newest"
}

take_switches "$@"
[[ $mode == run || $mode == dry_run ]] || fail "--$mode is for training"
NUM_GPUS=${NUM_GPUS:-1}
whole NUM_GPUS
ask output_dir -- --config "${CONFIG:-configs/hunyuan15_8gpu.yaml}" ${OUTPUT_DIR:+--output_dir "$OUTPUT_DIR"}
OUTPUT_DIR=${answers[0]}
run=(--pretrained_model_root ckpts)
[[ ! -L $OUTPUT_DIR/config.yaml ]] || fail "$OUTPUT_DIR/config.yaml is a link, which is not followed"
if [[ -f $OUTPUT_DIR/config.yaml ]]; then run=(--config "$OUTPUT_DIR/config.yaml"); fi
ask pretrained_model_root pretrained_transformer_version -- "${run[@]}" \
    ${MODEL_ROOT:+--pretrained_model_root "$MODEL_ROOT"}
command=("$(python_path)")
if ((NUM_GPUS > 1)); then command+=(-m torch.distributed.run --standalone --nproc_per_node "$NUM_GPUS"); fi
command+=(generate.py --model_path "${answers[0]}" --pretrained_transformer_version "${answers[1]}")
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
