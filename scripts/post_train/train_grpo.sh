#!/usr/bin/env bash
# Trains on this node, alone or as one of several: the only place where torchrun is called.
#
#   bash scripts/post_train/train_grpo.sh [--dry_run | --check | --stop | --kill] [flags of post_train.py]
#
# A run on one node begins with the checks of checks.sh; SKIP_CHECKS=1 leaves them out.
# --dry_run prints the command, --check checks whether it could run. --stop and --kill end the same run on this node,
# with and without time to save; stop a multi-node run on all nodes with pdsh_train.sh.
# NNODES, NODE_RANK, NODE_NAME, MASTER_ADDR and MASTER_PORT describe this node's place in the run; docs/running.md
# lists all settings. Exit code 0: done; 75: preempted, the same command resumes; 1: failed; 2: a setting or flag is
# wrong; above 128: torchrun was killed by a signal.
set -euo pipefail
shopt -s inherit_errexit
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/post_train/settings.sh
source scripts/post_train/checks.sh

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
    host_name "$NODE_NAME"
    read_config "$@"
    if ((MAX_RESTARTS)); then refuse_starting_over MAX_RESTARTS=0; fi
    logs=$OUTPUT_DIR/logs
    # used to find torchrun and its workers by their environment, including workers that outlive torchrun
    IFS= read -r -d '' mark < <(realpath -mz "$OUTPUT_DIR")
    mark=SAGE_LAUNCH=$NODE_NAME:$mark
    [[ $mark != *[[:cntrl:]]* ]] || fail "$(pasteable "$OUTPUT_DIR") leads to a path with control characters; rename that"
}

# Sets `command`. Nodes are ranked by NODE_NAME, so a node that comes back gets its old ranks; NODE_RANK only determines
# who hosts the rendezvous, because guessing that from host names fails if a name is not the machine's hostname.
torchrun_command() {
    command=(
        env TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # without it, restarted workers connect to the dead workers' store
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=$STOP_GRACE" PYTHONUNBUFFERED=1 TQDM_MININTERVAL=10 "$mark"
        "$(python_path)" -m torch.distributed.run --nnodes "$NNODES" --nproc_per_node "$NUM_GPUS"
        --rdzv_backend c10d --rdzv_endpoint "$MASTER_ADDR:$MASTER_PORT" --rdzv_id "${OUTPUT_DIR//\//_}"
        --rdzv_conf "is_host=$((NODE_RANK == 0)),join_timeout=$JOIN_TIMEOUT${RDZV_CONF:+,$RDZV_CONF}"
        --local_addr "$NODE_NAME" --max_restarts "$MAX_RESTARTS" --log_dir "$logs/$NODE_NAME" --tee 3
        post_train.py "${training[@]}"
    )
}

marked() { # PIDs of this run on this node: those with exactly this variable; -F would take lines for several patterns
    grep -lzsxF "$mark" /proc/[0-9]*/environ | cut -d / -f 3 || true
}

own() { # PIDs of what this script started; another one may have started the same run at the same moment
    local pid
    for pid in $(marked); do
        if grep -qzsxF "SAGE_LAUNCHER=$$" "/proc/$pid/environ"; then echo "$pid"; fi
    done
}

# Asks the train_grpo.sh running here to stop, as a signal would, and kills any process left after the grace period.
stop_run() { # GRACE: seconds
    local pid end=$((SECONDS + $1))
    pid=$(launcher)
    if (($1)) && [[ -n $pid ]]; then
        kill -TERM "$pid" || true
        while ((SECONDS < end)) && [[ $(launcher) == "$pid" ]]; do sleep 0.5; done
    fi
    kill_marked
}

launcher() { # PID of the train_grpo.sh that started this run: the parent of one of its processes
    local pid parent words
    for pid in $(marked); do
        parent=$(sed -n -E 's/^PPid:\s*//p' "/proc/$pid/status" 2>/dev/null || true)
        mapfile -d '' -t words < <(cat "/proc/$parent/cmdline" 2>/dev/null || true)
        if [[ ${words[1]:-} == *train_grpo.sh ]]; then
            echo "$parent"
            return
        fi
    done
}

kill_marked() { # FUNCTION that lists them; by default all of this run
    local left none=0
    for _ in {1..300}; do # a process waiting for its GPU takes time to die
        left=$("${1:-marked}")
        if [[ -z $left ]]; then # twice in a row: while a process starts a program, it shows no environment
            if ((none++)); then return 0; fi # 0: in a trap, return alone repeats what it interrupted
        else
            none=0
            # shellcheck disable=SC2086 # one word per process
            kill -KILL $left 2>/dev/null || true
        fi
        sleep 0.2
    done
    fail "processes of the run on $NODE_NAME cannot be killed: ${left//$'\n'/ }"
}

state() { # the run's state in status.json; empty if there is none
    if [[ -f $OUTPUT_DIR/status.json ]]; then
        "$(python_path)" -c 'import json, sys; print(json.load(open(sys.argv[1]))["state"])' "$OUTPUT_DIR/status.json"
    fi
}

# Prints the exit code of the run. torchrun's exit code only tells success from failure; status.json has the details,
# unless an earlier run left it. A run that was asked to stop and could not even write that is still resumable. A run
# that is done has written so: without that, code such as a reward's has ended the process.
verdict() { # CODE BEFORE ASKED
    local now=''
    for _ in {1..20}; do # another node may still be writing it
        if [[ $(stamp) != "$2" ]]; then now=$(state); fi
        if killed "$1" "$3" || [[ $now =~ ^(done|preempted|failed)$ ]]; then break; fi
        if (($1 == 0 ? NNODES == 1 : ${#now} == 0)); then break; fi
        sleep 0.5
    done
    case $1:$now:$3 in
        *:done:*) echo 0 ;;
        *:preempted:* | *:yes) echo 75 ;;
        0:*)
            echo "train_grpo.sh: the run ended with exit code 0, but status.json does not say that it is done: it says" \
                "'${now:-nothing}'; code of the run, such as its reward, may have ended the process" >&2
            echo 1
            ;;
        *) if killed "$1" "$3"; then echo "$1"; else echo 1; fi ;;
    esac
}

killed() { (($1 > 128)) && [[ $2 == no ]]; } # CODE ASKED: torchrun itself was killed, so this node is lost, not the run

stamp() { stat -c '%i %y' "$OUTPUT_DIR/status.json" 2>/dev/null || true; }

# A signal is forwarded to torchrun, which runs in a separate session, so that a terminal's Ctrl-C reaches it only once.
train() {
    local agent='' before code asked=no signalled=no
    before=$(stamp)
    trap 'asked=yes signalled=yes; if [[ -n $agent ]]; then kill -TERM "$agent" 2>/dev/null || true; fi' TERM INT HUP
    pasteable "${command[@]}"
    SAGE_LAUNCHER=$$ setsid "${command[@]}" &
    agent=$!
    if [[ $asked == yes ]]; then kill -TERM "$agent"; fi
    while
        code=0
        wait "$agent" || code=$?
        [[ $signalled == yes ]]
    do signalled=no; done
    kill_marked own
    code=$(verdict "$code" "$before" "$asked")
    echo "train_grpo.sh: $NODE_NAME ends with exit code $code; its log is $logs/$NODE_NAME.log"
    exit "$code"
}

refuse_second_start() {
    local running
    running=$(marked | tr '\n' ' ')
    [[ -z $running ]] || fail "$NODE_NAME already trains into $OUTPUT_DIR (processes ${running% }); --stop ends that"
}

refuse_linked_logs() { # a run folder may come from others, and lead to files of the user
    local path
    for path in "$logs" "$logs/$NODE_NAME" "$logs/$NODE_NAME.log"; do
        [[ ! -L $path ]] || fail "$path is a link, and a run does not write through links; remove it"
    done
}

take_switches "$@"
read_settings "${flags[@]}"
torchrun_command
if ((NNODES == 1)) && [[ $mode == dry_run || $mode == run || $mode == check ]]; then note_other_size; fi
case $mode in
    dry_run)
        pasteable cd "$PWD"
        pasteable "${command[@]}"
        ;;
    check) check_node || exit 2 ;;
    stop) stop_run "$STOP_GRACE" ;;
    kill) stop_run 0 ;;
    run)
        refuse_second_start
        if ((NNODES == 1)) && [[ ${SKIP_CHECKS:-0} != 1 ]]; then # pdsh_train.sh checks several nodes before it starts any
            trap 'kill_marked; exit 75' TERM INT HUP
            check_node || fail "$NODE_NAME is not ready, nothing was started; SKIP_CHECKS=1 leaves the checks out"
        fi
        refuse_linked_logs
        mkdir -p "$logs"
        # the log continues when the reader of the output is gone, and survives a signal to this process group
        exec > >(trap '' TERM INT HUP && exec tee -p -a "$logs/$NODE_NAME.log") 2>&1
        train
        ;;
esac
