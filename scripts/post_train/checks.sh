# shellcheck shell=bash disable=SC2154 # variables of train_grpo.sh
# Checks before a node trains: `check_node` prints one line per check, ok or FAIL with its remedy. Sourced by
# train_grpo.sh after it has read its settings, and by pdsh_train.sh.

source_commit() { git rev-parse HEAD 2>/dev/null || echo none; }
source_changes() { git diff HEAD 2>/dev/null | sha256sum | cut -c 1-12; }
file_hash() { sha256sum <"$1" | cut -c 1-12; }

problem() { # CHECK TEXT
    printf '%-6s%-8s%s\n' FAIL "$1" "$2"
    problems=$((problems + 1))
}

check_node() {
    local name before
    problems=0
    MAX_USED_GPU_MB=${MAX_USED_GPU_MB:-1000} CHECK_TIMEOUT=${CHECK_TIMEOUT:-20}
    whole MAX_USED_GPU_MB CHECK_TIMEOUT
    refuse_second_start
    for name in source idle port; do
        before=$problems text=''
        "check_$name"
        if ((problems == before)); then printf '%-6s%-8s%s\n' ok "$name" "$text"; fi
    done
    # with the mark --stop finds it, and in the background it does not delay a signal
    env "$mark" "$(python_path)" -m sage_grpo.tools.doctor --short --ranks $((NNODES * NUM_GPUS)) \
        --ranks_here "$NUM_GPUS" "${training[@]}" &
    wait $! || problems=$((problems + 1))
    ((problems == 0))
}

# LAUNCH_COMMIT, LAUNCH_CHANGES and LAUNCH_CONFIG describe the launching machine.
check_source() {
    local commit
    commit=$(source_commit)
    text="commit ${commit:0:12}, $CONFIG"
    if [[ ${LAUNCH_COMMIT:-$commit} != "$commit" ]]; then
        problem source "the commit is ${commit:0:12}, on the launching machine ${LAUNCH_COMMIT:0:12}; check out the same"
    elif [[ ${LAUNCH_CHANGES:-$(source_changes)} != "$(source_changes)" ]]; then
        problem source "uncommitted changes differ from those of the launching machine; commit them, check out the same"
    fi
    if [[ ${LAUNCH_CONFIG:-$(file_hash "$CONFIG")} != "$(file_hash "$CONFIG")" ]]; then
        problem source "$CONFIG is not the file of the launching machine; copy it"
    fi
}

# Whether others use the GPUs; whether torch can use them is for the doctor to say.
check_idle() {
    local used number most=$MAX_USED_GPU_MB
    text="no nvidia-smi here, so not checked"
    command -v nvidia-smi >/dev/null || return 0
    if ! used=$(nvidia-smi ${CUDA_VISIBLE_DEVICES:+-i "$CUDA_VISIBLE_DEVICES"} --query-gpu=memory.used \
        --format=csv,noheader,nounits 2>&1); then
        problem idle "nvidia-smi fails: ${used%%$'\n'*}; install a driver, or mind CUDA_VISIBLE_DEVICES"
        return
    fi
    mapfile -t used <<<"$used"
    text="GPUs with ${used[*]} MB in use"
    ((${#used[@]} >= NUM_GPUS)) || problem idle "${#used[@]} GPUs are here, NUM_GPUS is $NUM_GPUS; lower it"
    for number in "${!used[@]}"; do
        ((number >= NUM_GPUS || used[number] <= most)) ||
            problem idle "GPU $number has ${used[number]} MB in use; end what uses it, or raise MAX_USED_GPU_MB=$most"
    done
}

# The first node listens at the rendezvous address, the others connect to it: all nodes run their checks at once.
check_port() {
    local said role=call
    text="$MASTER_ADDR:$MASTER_PORT"
    if ((MASTER_PORT == 0)); then text="a free one is chosen"; fi
    if ((NODE_RANK == 0)); then role=listen; fi
    said=$("$(python_path)" scripts/post_train/rendezvous_probe.py "$role" "$MASTER_ADDR" "$MASTER_PORT" \
        $((NNODES - 1)) "$CHECK_TIMEOUT" 2>&1) || problem port "${said##*$'\n'}"
}
