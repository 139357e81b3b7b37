# shellcheck shell=bash disable=SC2034,SC2153 # variables of and for those who source this
# Shared by the launchers: settings, flags that are read before post_train.py, the list of nodes. Sourced from the
# repository root, never executed; docs/multinode.md lists the settings.

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
    STOP_GRACE MIN_FREE_GB MAX_USED_GPU_MB
)

fail() {
    echo "${0##*/}: $*" >&2
    exit 2
}

whole() { # NAME...: require each of these settings to be an integer
    local name
    for name in "$@"; do
        [[ ${!name} =~ ^[0-9]+$ ]] || fail "$name is '${!name}'; a whole number is expected"
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

pasteable() { # WORD...: quote the words as a shell command line
    local line
    printf -v line '%q ' "$@"
    echo "${line% }"
}

# Sets `mode` to run, dry_run, check, stop or kill and `flags` to all other words.
take_switches() {
    mode=run flags=()
    local word
    for word in "$@"; do
        case $word in
            --dry_run | --check | --stop | --kill) mode=${word#--} ;;
            *) flags+=("$word") ;;
        esac
    done
}

flag_value() { # NAME WORD...: the last value given to this flag in the words; empty if there is none
    local name=--$1 value='' previous=''
    shift
    local word
    for word in "$@"; do
        if [[ $previous == "$name" ]]; then value=$word; fi
        if [[ $word == "$name="* ]]; then value=${word#*=}; fi
        previous=$word
    done
    echo "$value"
}

yaml_value() { # NAME FILE: a plain value from a flat YAML file; empty if there is none
    sed -n -E "/^$1:/{s/^[^:]*:[[:space:]]*//; s/[[:space:]]+#.*$//; s/^([\"'])(.*)\1\$/\2/; p}" "$2"
}

first() { # VALUE...: the first that is not empty
    local value
    for value in "$@"; do
        if [[ -n $value ]]; then break; fi
    done
    echo "$value"
}

# Sets CONFIG and OUTPUT_DIR as post_train.py will see them: a flag overrides the environment, which overrides the file.
read_config() { # FLAG...
    local recipe=hunyuan15_8gpu
    if ((NNODES > 1)); then recipe=hunyuan15_64gpu; fi
    CONFIG=$(first "$(flag_value config "$@")" "${CONFIG:-}" "configs/$recipe.yaml")
    [[ -f $CONFIG ]] || fail "CONFIG is '$CONFIG', which is not a file; configs/ holds the recipes"
    OUTPUT_DIR=$(first "$(flag_value output_dir "$@")" "${OUTPUT_DIR:-}" "$(yaml_value output_dir "$CONFIG")" outputs)
}

overwrites() { # FLAG...: whether the run starts by deleting the contents of OUTPUT_DIR
    local word
    for word in "$@"; do
        if [[ $word == --overwrite* ]]; then return 0; fi
    done
    return 1
}

resumes_from() { # FLAG...
    first "$(flag_value resume_from_checkpoint "$@")" "${RESUME_FROM_CHECKPOINT:-}" auto
}

# A restart must resume from the newest checkpoint, or it gains nothing.
refuse_starting_over() { # REMEDY FLAG...
    local from
    from=$(resumes_from "${@:2}")
    if overwrites "${@:2}"; then
        fail "--overwrite would remove the run at each restart; remove $OUTPUT_DIR by hand, or set $1"
    elif [[ $from != auto ]]; then
        fail "resume_from_checkpoint is $from, to which each restart would go back; leave it auto, or set $1"
    fi
}

# Sets `training` to the flags of post_train.py: the file, then the environment, then the command line.
training_flags() { # FLAG...
    local flag name
    training=(--config "$CONFIG" --output_dir "$OUTPUT_DIR")
    if [[ -n ${MODEL_ROOT:-} ]]; then training+=(--pretrained_model_root "$MODEL_ROOT"); fi
    for flag in "${ENVIRONMENT_FLAGS[@]}"; do
        name=${flag^^}
        if [[ -n ${!name:-} ]]; then training+=("--$flag" "${!name}"); fi
    done
    if ! overwrites "$@"; then training+=(--resume_from_checkpoint "$(resumes_from "$@")"); fi
    training+=("$@")
}

# The value of a setting as post_train.py reads it; wrong flags give post_train.py's error message.
resolved() { # NAME FLAG...
    "$(python_path)" -c '
import sys
from sage_grpo.flags import parse
try:
    print(getattr(parse(sys.argv[2:]), sys.argv[1]))
except ValueError as error:
    sys.exit(f"post_train.py: {error}")' "$@"
}

# Sets `nodes`, from NODES ("a,b,c") or else from the lines of HOSTFILE ("a" or "a slots=8", # begins a comment).
read_nodes() {
    local line slots=() words
    nodes=()
    if [[ -n ${NODES:-} ]]; then
        IFS=', ' read -r -a nodes <<<"$NODES"
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
    for node in "${nodes[@]}"; do
        [[ $node =~ ^[A-Za-z0-9][A-Za-z0-9._-]*$ ]] || fail "'$node' is not a host name; name each node in full"
    done
    twice=$(printf '%s\n' "${nodes[@]}" | sort | uniq -d | head -n 1)
    [[ -z $twice ]] || fail "node $twice is named twice; one line for each node is enough"
}
