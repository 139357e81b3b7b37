# shellcheck shell=bash
# Checks of a node before it trains: `check_node` prints one line per failed check. Sourced by train_grpo.sh --check
# after it has read its settings.

source_commit() { git rev-parse HEAD 2>/dev/null || echo none; }
source_changes() { git diff HEAD 2>/dev/null | sha256sum | cut -c 1-12; }
file_hash() { sha256sum <"$1" | cut -c 1-12; }

problem() {
    echo "check failed: $*"
    problems=$((problems + 1))
}

check_node() { # FLAG...
    problems=0
    refuse_second_start
    check_source
    check_python "$@"
    check_gpus
    check_disk
    check_rendezvous
    return $((problems > 0))
}

# LAUNCH_COMMIT, LAUNCH_CHANGES and LAUNCH_CONFIG describe the launching machine.
check_source() {
    local commit
    commit=$(source_commit)
    if [[ ${LAUNCH_COMMIT:-$commit} != "$commit" ]]; then
        problem "the commit is ${commit:0:12}, on the launching machine ${LAUNCH_COMMIT:0:12}; check out the same"
    elif [[ ${LAUNCH_CHANGES:-$(source_changes)} != "$(source_changes)" ]]; then
        problem "uncommitted changes differ from those of the launching machine; commit them and check out the same"
    fi
    if [[ ${LAUNCH_CONFIG:-$(file_hash "$CONFIG")} != "$(file_hash "$CONFIG")" ]]; then
        problem "$CONFIG is not the file of the launching machine; copy it"
    fi
}

# Imports the package, parses the flags as training will, and looks for the model they name.
check_python() { # FLAG...
    local model
    if ! model=$(resolved pretrained_model_root "$@" 2>&1); then
        problem "$(python_path) cannot read the flags: ${model##*$'\n'}"
    elif [[ ! -e ${model##*$'\n'} ]]; then
        problem "pretrained_model_root ${model##*$'\n'} does not exist; bash download_weights.sh gets the weights"
    fi
}

check_gpus() {
    local used number most=${MAX_USED_GPU_MB:-1000}
    if ! command -v nvidia-smi >/dev/null; then
        echo "note: no nvidia-smi here, so GPUs are not checked"
        return
    fi
    if ! used=$(nvidia-smi ${CUDA_VISIBLE_DEVICES:+-i "$CUDA_VISIBLE_DEVICES"} --query-gpu=memory.used \
        --format=csv,noheader,nounits 2>&1); then
        problem "nvidia-smi fails: ${used%%$'\n'*}"
        return
    fi
    mapfile -t used <<<"$used"
    ((${#used[@]} >= NUM_GPUS)) || problem "${#used[@]} GPUs are here, NUM_GPUS is $NUM_GPUS"
    for number in "${!used[@]}"; do
        ((number >= NUM_GPUS || used[number] <= most)) ||
            problem "GPU $number has ${used[number]} MB in use; end what uses it, or raise MAX_USED_GPU_MB=$most"
    done
}

check_disk() {
    local folder free least=${MIN_FREE_GB:-100}
    folder=$(realpath -m "$OUTPUT_DIR")
    while [[ ! -d $folder ]]; do folder=$(dirname "$folder"); done
    [[ -w $folder ]] || problem "OUTPUT_DIR $OUTPUT_DIR cannot be made: $folder is not writable"
    free=$(($(df -Pk "$folder" | awk 'NR == 2 { print $4 }') * 1024 / 1000000000))
    ((free >= least)) || problem "OUTPUT_DIR $OUTPUT_DIR has $free GB of room; make some, or lower MIN_FREE_GB=$least"
}

# The first node listens at the rendezvous address, the others connect to it: all nodes run their checks at once.
check_rendezvous() {
    local said role=call
    ((NNODES > 1)) || return 0
    if ((NODE_RANK == 0)); then role=listen; fi
    said=$("$(python_path)" scripts/post_train/rendezvous_probe.py "$role" "$MASTER_ADDR" "$MASTER_PORT" \
        $((NNODES - 1)) "${CHECK_TIMEOUT:-20}" 2>&1) || problem "${said##*$'\n'}"
}
