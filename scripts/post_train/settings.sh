# shellcheck shell=bash disable=SC2034,SC2153 # variables of and for those who source this
# Shared by the launchers: settings, flags that are read before post_train.py, the list of nodes. Sourced from the
# repository root, never executed; docs/running.md lists the settings.

# post_train.py flags that can be set in the environment by their uppercase names.
ENVIRONMENT_FLAGS=(
    pretrained_transformer_version train_prompts validation_prompts prompt_cache learning_rate batch_size
    num_generations max_steps sp_size dp_replicate enable_fsdp enable_gradient_checkpointing sde_type
    use_grad_balancing enable_timestep_permutation kl_weight kl_coef use_moving_KL update_ref_model_step use_dual_kl
    dual_kl_moving_weight dual_kl_step_weight reference_mode_offload save_interval seed
)
# Launcher settings that every node needs.
NODE_SETTINGS=(
    CONFIG MODEL_ROOT OUTPUT_DIR RESUME_FROM_CHECKPOINT PYTHON ENV_FILE NUM_GPUS MAX_RESTARTS JOIN_TIMEOUT RDZV_CONF
    STOP_GRACE MAX_USED_GPU_MB
)

fail() {
    local text=$*
    echo "${0##*/}: ${text//[[:cntrl:]]/?}" >&2
    exit 2
}

whole() { # NAME...: require each of these settings to be an integer, and drop its leading zeros, which mean octal
    local name
    for name in "$@"; do
        [[ ${!name} =~ ^0*[0-9]{1,9}$ ]] || fail "$name is '${!name}'; a whole number is expected"
        printf -v "$name" %d $((10#${!name}))
    done
}

python_path() {
    if [[ -n ${PYTHON:-} ]]; then
        echo "$PYTHON"
    elif [[ -x .venv/bin/python ]]; then
        echo .venv/bin/python
    else
        echo python3
    fi
}

host_name() { # NAME: require it to be one
    [[ $1 =~ ^[A-Za-z0-9][A-Za-z0-9._-]*$ ]] || fail "'$1' is not a host name; name each node in full"
}

# Prints the comment at the top of a launcher if a word asks for help; then nothing is launched.
help_if_asked() { # WORD...
    local word file=$0
    if [[ ! -f $file ]]; then file=$OLDPWD/$0; fi # the launcher has changed to the root folder
    for word in "$@"; do
        if [[ $word == -h || $word == --help ]]; then
            sed -n '2,${/^#/!q;/^#SBATCH/!s/^# \{0,1\}//p}' "$file"
            exit 0
        fi
    done
}

pasteable() { # WORD...: quote the words as a shell command line
    local line
    printf -v line '%q ' "$@"
    echo "${line% }"
}

# Sets `mode` to run, dry_run, check, stop or kill and `flags` to all other words.
take_switches() {
    help_if_asked "$@"
    mode=run flags=()
    local word
    for word in "$@"; do
        case $word in
            --dry_run | --check | --stop | --kill) mode=${word#--} ;;
            *) flags+=("$word") ;;
        esac
    done
}

# Sets `answers` to values of the configuration as post_train.py reads it, which is the only reader of YAML and flags.
ask() { # NAME... -- FLAG...
    local names=() code
    while [[ $1 != -- ]]; do
        names+=("$1")
        shift
    done
    mapfile -d '' -t answers < <(
        code=0
        "$(python_path)" post_train.py "${@:2}" --print_config "${names[@]}" || code=$?
        printf '%s\0' "$code"
    )
    code=${answers[-1]}
    if ((code == 2)); then exit 2; fi # post_train.py has said why
    ((code == 0)) || fail "$(python_path) cannot read the flags; PYTHON must name one with the requirements installed"
}

# Sets CONFIG and OUTPUT_DIR to what training will use, and `training` to the flags of post_train.py: the file, then the
# environment, then the command line. `resume` and `overwrite` say how the run starts, `intended_gpus` for how many GPUs
# the recipe was made, empty if it does not say.
read_config() { # FLAG...
    local recipe=hunyuan15_8gpu flag name chosen=()
    if ((NNODES > 1)); then recipe=hunyuan15_64gpu; fi
    if [[ -n ${MODEL_ROOT:-} ]]; then chosen+=(--pretrained_model_root "$MODEL_ROOT"); fi
    if [[ -n ${RESUME_FROM_CHECKPOINT:-} ]]; then chosen+=(--resume_from_checkpoint "$RESUME_FROM_CHECKPOINT"); fi
    for flag in "${ENVIRONMENT_FLAGS[@]}"; do
        name=${flag^^}
        if [[ -n ${!name:-} ]]; then chosen+=("--$flag" "${!name}"); fi
    done
    training=(--config "${CONFIG:-configs/$recipe.yaml}" ${OUTPUT_DIR:+--output_dir "$OUTPUT_DIR"} "${chosen[@]}" "$@")
    ask config output_dir resume_from_checkpoint overwrite given gpus -- "${training[@]}"
    CONFIG=${answers[0]} OUTPUT_DIR=${answers[1]} resume=${answers[2]:-none} overwrite=${answers[3]}
    intended_gpus=${answers[5]}
    if [[ $overwrite == false && ${answers[4]} != *'"resume_from_checkpoint"'* ]]; then
        resume=auto chosen=(--resume_from_checkpoint auto "${chosen[@]}")
    fi
    training=(--config "$CONFIG" --output_dir "$OUTPUT_DIR" "${chosen[@]}" "$@")
}

# Every GPU holds batch_size clips, so that another number of them is another experiment, and a tight fit may fail.
note_other_size() {
    local gpus=$((NNODES * ${NUM_GPUS:-8}))
    if [[ -z $intended_gpus ]] || ((gpus == intended_gpus)); then return; fi
    echo "note: $CONFIG is made for $intended_gpus GPUs, and $NNODES x ${NUM_GPUS:-8} are $gpus: an iteration has" \
        "$gpus/$intended_gpus of its clips; use $intended_gpus GPUs, choose a recipe for $gpus, or adapt batch_size" \
        "and learning_rate" >&2
}

# A restart must resume from the newest checkpoint, or it gains nothing.
refuse_starting_over() { # REMEDY
    if [[ $overwrite == true ]]; then
        fail "--overwrite would remove the run at each restart; remove $OUTPUT_DIR by hand, or set $1"
    elif [[ $resume != auto && $resume != last_good ]]; then
        fail "resume_from_checkpoint is $resume, to which each restart would go back; leave it auto, or set $1"
    fi
}

# Sets `nodes`, from NODES ("a,b,c", or separated by blanks or lines) or else from the lines of HOSTFILE ("a" or "a slots=8", # begins a comment).
read_nodes() {
    local line slots=() words
    nodes=()
    if [[ -n ${NODES:-} ]]; then
        IFS=$', \t\n' read -r -d '' -a nodes <<<"$NODES" || true # it ends without the delimiter
    else
        [[ -n ${HOSTFILE:-} ]] || fail "no nodes are given; set NODES=a,b,c or HOSTFILE=FILE with a host per line"
        [[ -r $HOSTFILE ]] || fail "HOSTFILE is '$HOSTFILE', which cannot be read"
        while read -r line || [[ -n $line ]]; do
            read -r -a words <<<"${line%%#*}"
            ((${#words[@]})) || continue
            [[ ${words[*]} =~ ^[^[:space:]=]+(\ slots=[0-9]+)?$ ]] ||
                fail "HOSTFILE $HOSTFILE has the line '$line'; write HOST or HOST slots=GPUS"
            nodes+=("${words[0]}")
            slots+=("${words[1]:-}")
        done <"$HOSTFILE"
        take_slots "${slots[@]}"
    fi
    refuse_odd_nodes
}

take_slots() { # slots=N or nothing, for each node
    local kinds
    kinds=$(printf '%s\n' "$@" | sort -u)
    [[ $kinds != *$'\n'* ]] || fail "HOSTFILE $HOSTFILE gives nodes different slots; all need the same number of GPUs"
    if [[ -n $kinds ]]; then NUM_GPUS=${NUM_GPUS:-${kinds#slots=}}; fi
}

refuse_odd_nodes() {
    local node twice
    ((${#nodes[@]})) || fail "${NODES:+NODES }${NODES:-HOSTFILE $HOSTFILE} names no node"
    for node in "${nodes[@]}"; do host_name "$node"; done
    twice=$(printf '%s\n' "${nodes[@]}" | sort | uniq -d | head -n 1)
    [[ -z $twice ]] || fail "node $twice is named twice; one line for each node is enough"
}
