#!/usr/bin/env bash
# Trains on this node, alone or as one of several: the one place where torchrun is called.
#
#   bash scripts/post_train/train_grpo.sh [--dry_run | --check | --stop | --kill] [flags of post_train.py]
#
# --dry_run prints the command, --check looks whether it could run. --stop and --kill end the same run on this node,
# with and without the time to save; of a run on several nodes stop all, by pdsh_train.sh.
# NNODES, NODE_RANK, NODE_NAME, MASTER_ADDR and MASTER_PORT say which of how many nodes this is; docs/multinode.md lists
# all settings. Exit code 0: done; 75: preempted, the same command goes on; 1: failed; 2: a setting or flag is
# wrong; above 128: torchrun was killed by a signal.
set -euo pipefail
shopt -s inherit_errexit
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/post_train/settings.sh

read_settings() {
    if [[ -n ${ENV_FILE:-} ]]; then
        [[ -r $ENV_FILE ]] || fail "ENV_FILE is '$ENV_FILE', which cannot be read on this node"
        set -a
        # shellcheck source=/dev/null
        source "$(realpath "$ENV_FILE")"
        set +a
    fi
    NNODES=${NNODES:-1} NODE_RANK=${NODE_RANK:-0} NUM_GPUS=${NUM_GPUS:-8}
    MAX_RESTARTS=${MAX_RESTARTS:-3} JOIN_TIMEOUT=${JOIN_TIMEOUT:-1800} STOP_GRACE=${STOP_GRACE:-600}
    whole NNODES NODE_RANK NUM_GPUS MAX_RESTARTS JOIN_TIMEOUT STOP_GRACE
    if ((NNODES == 1)); then
        NODE_NAME=${NODE_NAME:-localhost} MASTER_ADDR=${MASTER_ADDR:-localhost} MASTER_PORT=${MASTER_PORT:-0}
    else
        NODE_NAME=${NODE_NAME:-$(hostname)} MASTER_PORT=${MASTER_PORT:-29400}
        [[ -n ${MASTER_ADDR:-} ]] || fail "MASTER_ADDR is not set; with $NNODES nodes it names the one of NODE_RANK 0"
    fi
    whole MASTER_PORT
    ((NODE_RANK < NNODES)) || fail "NODE_RANK is $NODE_RANK; with $NNODES nodes it is at most $((NNODES - 1))"
    read_config "$@"
    if ((MAX_RESTARTS)); then refuse_starting_over MAX_RESTARTS=0 "$@"; fi
    logs=$OUTPUT_DIR/logs
    # found again in the environment of torchrun and its workers, also of those that outlive torchrun
    mark=SAGE_LAUNCH=$NODE_NAME:$(realpath -m "$OUTPUT_DIR")
}

# Sets `command`. Nodes are ranked by NODE_NAME, so a node that comes back gets its old ranks; NODE_RANK only says who
# hosts the rendezvous, because guessing that from host names fails where a name is not the machine's own.
torchrun_command() { # FLAG...
    training_flags "$@"
    command=(
        env TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # without it restarted workers meet the store of the dead ones
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=$STOP_GRACE" PYTHONUNBUFFERED=1 TQDM_MININTERVAL=10 "$mark"
        "$(python_path)" -m torch.distributed.run --nnodes "$NNODES" --nproc_per_node "$NUM_GPUS"
        --rdzv_backend c10d --rdzv_endpoint "$MASTER_ADDR:$MASTER_PORT" --rdzv_id "${OUTPUT_DIR//\//_}"
        --rdzv_conf "is_host=$((NODE_RANK == 0)),join_timeout=$JOIN_TIMEOUT${RDZV_CONF:+,$RDZV_CONF}"
        --local_addr "$NODE_NAME" --max_restarts "$MAX_RESTARTS" --log_dir "$logs/$NODE_NAME" --tee 3
        post_train.py "${training[@]}"
    )
}

marked() { # the processes of this run on this node, by id
    grep -lzsxF "$mark" /proc/[0-9]*/environ | cut -d / -f 3 || true
}

# Asks the train_grpo.sh that runs here to stop, as a signal would, and kills whoever is left after the grace.
stop_run() { # GRACE: seconds
    local pid end=$((SECONDS + $1))
    pid=$(cat "$logs/$NODE_NAME.pid" 2>/dev/null || true)
    if (($1)) && trains "$pid"; then
        kill -TERM "$pid"
        while ((SECONDS < end)) && trains "$pid"; do sleep 0.5; done
    fi
    kill_marked
}

trains() { # PID: whether that process is such a script, and not another one that has got its number
    [[ $(tr '\0' ' ' 2>/dev/null <"/proc/$1/cmdline") == *train_grpo.sh* ]]
}

kill_marked() {
    local left
    for _ in {1..300}; do # a process that waits for its GPU takes time to die
        left=$(marked)
        if [[ -z $left ]]; then return; fi
        # shellcheck disable=SC2086 # one word for each process
        kill -KILL $left 2>/dev/null || true
        sleep 0.2
    done
    fail "processes of the run on $NODE_NAME cannot be killed: ${left//$'\n'/ }"
}

state() { # what status.json says of the run; nothing where there is none
    if [[ -f $OUTPUT_DIR/status.json ]]; then
        "$(python_path)" -c 'import json, sys; print(json.load(open(sys.argv[1]))["state"])' "$OUTPUT_DIR/status.json"
    fi
}

# Prints the exit code of the run. torchrun's says only whether all went well; status.json tells the rest, unless an
# earlier run has left it. A run that was asked to stop and could not even write that is as resumable as it was.
verdict() { # CODE BEFORE ASKED
    local now=''
    for _ in {1..20}; do # another node may be about to write it
        if [[ $(stamp) != "$2" ]]; then now=$(state); fi
        if (($1 == 0)) || killed "$1" "$3" || [[ $now != running ]]; then break; fi
        sleep 0.5
    done
    case $1:$now:$3 in
        0:* | *:done:*) echo 0 ;;
        *:preempted:* | *:yes) echo 75 ;;
        *) if killed "$1" "$3"; then echo "$1"; else echo 1; fi ;;
    esac
}

killed() { (($1 > 128)) && [[ $2 == no ]]; } # CODE ASKED: torchrun itself was killed, so this node is lost, not the run

stamp() { stat -c '%i %y' "$OUTPUT_DIR/status.json" 2>/dev/null || true; }

# A signal is handed on to torchrun. That has a session of its own, so that a terminal's Ctrl-C does not reach it twice.
train() {
    local agent='' before code asked=no signalled=no
    before=$(stamp)
    trap 'asked=yes signalled=yes; if [[ -n $agent ]]; then kill -TERM "$agent" 2>/dev/null || true; fi' TERM INT HUP
    echo $$ >"$logs/$NODE_NAME.pid"
    pasteable "${command[@]}"
    setsid "${command[@]}" &
    agent=$!
    if [[ $asked == yes ]]; then kill -TERM "$agent"; fi
    while
        code=0
        wait "$agent" || code=$?
        [[ $signalled == yes ]]
    do signalled=no; done
    kill_marked
    code=$(verdict "$code" "$before" "$asked")
    echo "train_grpo.sh: $NODE_NAME ends with exit code $code; its log is $logs/$NODE_NAME.log"
    exit "$code"
}

refuse_second_start() {
    local running
    running=$(marked | tr '\n' ' ')
    [[ -z $running ]] || fail "$NODE_NAME already trains into $OUTPUT_DIR (processes ${running% }); --stop ends that"
}

take_switches "$@"
read_settings "${flags[@]}"
torchrun_command "${flags[@]}"
case $mode in
    dry_run)
        pasteable cd "$PWD"
        pasteable "${command[@]}"
        ;;
    check)
        source scripts/post_train/checks.sh
        check_node "${training[@]}"
        ;;
    stop) stop_run "$STOP_GRACE" ;;
    kill) stop_run 0 ;;
    run)
        refuse_second_start
        resolved output_dir "${training[@]}" >/dev/null || exit 2 # else torchrun would try wrong flags again and again
        mkdir -p "$logs"
        # the log goes on when whoever reads the output has gone, and outlives a signal to all of this process group
        exec > >(trap '' TERM INT HUP && exec tee -p -a "$logs/$NODE_NAME.log") 2>&1
        train
        ;;
esac
