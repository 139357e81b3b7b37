#!/usr/bin/env bash
# Runs a script on every node with pdsh, after checking the nodes, and restarts lost nodes.
#
#   NODES=a,b,c bash scripts/post_train/pdsh_train.sh SCRIPT [--dry_run | --check | --stop | --kill] [flags]
#
# SCRIPT is scripts/post_train/train_grpo.sh or a script with the same switches; the flags are those of post_train.py.
# The nodes come from NODES or HOSTFILE; the first hosts the rendezvous; all have the repository at the same path and
# share OUTPUT_DIR. docs/running.md lists the settings. Exit code: the worst node's, 255 for a lost node.
set -euo pipefail
shopt -s inherit_errexit
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/post_train/settings.sh
source scripts/post_train/checks.sh

read_launch_settings() { # SCRIPT FLAG...
    take_switches "$@"
    ((${#flags[@]})) || fail "name the script that the nodes run, such as scripts/post_train/train_grpo.sh"
    script=${flags[0]} flags=("${flags[@]:1}")
    [[ -f $script ]] || fail "script '$script' is not a file in $PWD"
    read_nodes
    NNODES=${#nodes[@]} MASTER_ADDR=${MASTER_ADDR:-${nodes[0]}} MASTER_PORT=${MASTER_PORT:-29400}
    NODE_RESTARTS=${NODE_RESTARTS:-3} FAIL_GRACE=${FAIL_GRACE:-90} JOIN_TIMEOUT=${JOIN_TIMEOUT:-1800}
    PDSH_RCMD_TYPE=${PDSH_RCMD_TYPE:-ssh}
    whole MASTER_PORT NODE_RESTARTS FAIL_GRACE JOIN_TIMEOUT
    read_config "${flags[@]}"
    if ((NODE_RESTARTS)); then refuse_starting_over NODE_RESTARTS=0; fi
    case $PDSH_RCMD_TYPE in
        ssh) ;;
        exec)
            [[ -n ${REMOTE_SHELL:-} ]] ||
                fail "PDSH_RCMD_TYPE is exec; set REMOTE_SHELL to what runs a command there, such as 'docker exec %h'"
            ;;
        *) fail "PDSH_RCMD_TYPE is '$PDSH_RCMD_TYPE'; choose ssh or exec" ;;
    esac
    # without these, a node that loses power is waited for forever, and ssh prompts for a password in vain
    local careful='-oBatchMode=yes -oServerAliveInterval=15 -oServerAliveCountMax=4'
    export PDSH_SSH_ARGS_APPEND=${PDSH_SSH_ARGS_APPEND:-$careful}
}

# Sets `settings` and `variables` to the NAME=VALUE pairs sent to every node: the launcher settings that are set, and
# NCCL_*, GLOO_*, SAGE_* and the names in PASS_ENV.
read_passed() {
    local name names secret='(TOKEN|SECRET|PASSW|PASSPHRASE|CREDENTIAL|KEY)' # in uppercase
    settings=() variables=()
    for name in "${NODE_SETTINGS[@]}" "${ENVIRONMENT_FLAGS[@]^^}"; do
        if [[ -n ${!name:-} ]]; then settings+=("$name=${!name}"); fi
    done
    read -r -d '' -a names <<<"${PASS_ENV:-}" || true # it ends without the delimiter
    for name in "${names[@]}"; do
        [[ $name =~ ^[A-Za-z_][A-Za-z0-9_]*$ ]] || fail "PASS_ENV holds '$name', which is not the name of a variable"
        [[ -n ${!name+set} ]] || fail "PASS_ENV names $name, which is not set"
        [[ ! ${name^^} =~ $secret ]] ||
            fail "PASS_ENV names $name, which others could read in the list of processes; use ENV_FILE"
        variables+=("$name=${!name}")
    done
    for name in $(compgen -e | grep -E '^(NCCL|GLOO|SAGE)_' || true); do
        if [[ ${name^^} =~ $secret ]]; then
            echo "note: $name is not sent: others could read it in the list of processes; ENV_FILE can hold it" >&2
        else
            variables+=("$name=${!name}")
        fi
    done
}

node_command() { # INDEX SWITCH...: the command for a shell on that node
    local place=(NNODES="$NNODES" NODE_RANK="$1" NODE_NAME="${nodes[$1]}")
    place+=(MASTER_ADDR="$MASTER_ADDR" MASTER_PORT="$MASTER_PORT" SKIP_CHECKS=1) # they are done from here
    echo "$(pasteable cd "$PWD") && $(pasteable env "${variables[@]}" "${settings[@]}" "${place[@]}" \
        bash "$script" "${@:2}" "${flags[@]}")"
}

# The last line reports the exit code, because pdsh treats a killed command as successful. A separate session shields
# pdsh from a terminal's Ctrl-C: the nodes are stopped by end_others.
on_node() { # INDEX SWITCH...
    local text
    text="$(node_command "$@"); code=\$?; echo; echo \"exit code \$code\"; exit \$code"
    text=${text//%/%%} # pdsh expands %h and others
    if [[ $PDSH_RCMD_TYPE == ssh ]]; then
        setsid -w pdsh -S -R ssh -w "${nodes[$1]}" "bash -c $(printf %q "$text")"
    else
        # shellcheck disable=SC2086 # REMOTE_SHELL is a list of words
        setsid -w pdsh -S -R exec -w "${nodes[$1]}" $REMOTE_SHELL bash -c "$text"
    fi
}

on_all_nodes() { # SWITCH...: in parallel, each into a file; sets `failed` to the number of nonzero exits
    local index
    for index in "${!nodes[@]}"; do
        on_node "$index" "$@" &>"$scratch/$index.said" &
    done
    wait
    failed=0
    for index in "${!nodes[@]}"; do
        [[ $(exit_code "$scratch/$index.said") == 0 ]] || failed=$((failed + 1))
    done
}

exit_code() { # FILE: the exit code that on_node reported; 255 for a lost node
    local code
    code=$(sed -n -E 's/^[^ ]+: exit code ([0-9]+)$/\1/p' "$1" | tail -n 1)
    if [[ -z $code ]] || ((code > 128)); then code=255; fi
    echo "$code"
}

said() { # INDEX: a node's output, without the exit code
    grep -vE '^[^ ]+: (exit code [0-9]+)?$|^pdsh@.* exited with exit code' "$scratch/$1.said" || true
    if (($(exit_code "$scratch/$1.said") == 255)); then echo "${nodes[$1]}: no answer through $PDSH_RCMD_TYPE"; fi
}

check_nodes() {
    local index
    local settings=("${settings[@]}" LAUNCH_COMMIT="$(source_commit)" LAUNCH_CHANGES="$(source_changes)"
        LAUNCH_CONFIG="$(file_hash "$CONFIG")" CHECK_TIMEOUT="${CHECK_TIMEOUT:-20}")
    on_all_nodes --check
    for index in "${!nodes[@]}"; do said "$index" | grep -vE '^[^ ]+: ok  ' >&2 || true; done
    ((failed == 0)) ||
        fail "$failed of $NNODES nodes are not ready, nothing was started; SKIP_CHECKS=1 leaves the checks out"
}

start_node() { # INDEX FUNCTION: run it for that node in the background; its output goes to ours and to a file
    : >"$scratch/$1.said"
    "$2" "$1" 2>&1 | (trap '' TERM INT HUP && exec tee -p "$scratch/$1.said") &
    running[$1]=$!
}

# Waits for a node that may be rebooting, ends leftovers of the run there, and restarts it, unless all are to stop.
on_node_again() { # INDEX
    local end=$((SECONDS + JOIN_TIMEOUT))
    until on_node "$1" --kill &>"$scratch/$1.cleared" || [[ -e $scratch/told ]] || ((SECONDS > end)); do sleep 2; done
    if [[ -e $scratch/told ]]; then echo "${nodes[$1]}: exit code 75"; else on_node "$1"; fi
}

end_others() { # SWITCH: ask the nodes that still run to --stop or --kill
    local index
    ending=told
    touch "$scratch/told"
    for index in "${!running[@]}"; do
        on_node "$index" "$1" &>"$scratch/$index.cleared" &
    done
}

# `ending` is no, then `failed` after the first failure, and `told` once the nodes were told to stop.
node_ended() { # INDEX
    unset "running[$1]"
    codes[$1]=$(exit_code "$scratch/$1.said")
    case $ending:${codes[$1]} in
        *:0) ;;
        told:255) codes[$1]=${codes[$culprit]:-255} ;; # it was killed from here
        told:*) ;;
        *:255) node_lost "$1" ;;
        no:75)
            culprit=$1
            end_others --stop
            ;;
        *) node_failed "$1" ;;
    esac
}

# The rendezvous is on the first node. Any other lost node rejoins it; if the first is lost, all nodes restart, even if
# others have failed meanwhile, which they do because they lost it.
node_lost() { # INDEX
    local count="loss $((restarts + 1)) of $NODE_RESTARTS"
    if ((restarts == NODE_RESTARTS)) || { (($1)) && [[ $ending == failed ]]; }; then
        node_failed "$1"
        return
    fi
    restarts=$((restarts + 1)) culprit=$1
    if (($1)); then
        echo "${nodes[$1]} was lost and is started again ($count)"
        start_node "$1" on_node_again
    else
        echo "${nodes[$1]} was lost, and the rendezvous with it: all nodes are started again ($count)"
        end_others --kill
        again=yes
    fi
}

node_failed() { # INDEX: gives the others time to report, and us time to notice that the first node is lost
    if [[ $ending == no ]]; then
        ending=failed culprit=$1 kill_at=$((SECONDS + FAIL_GRACE))
    fi
}

run_nodes() { # FUNCTION: one attempt on all nodes; sets `again` if it has to be repeated
    local index
    running=() codes=() ending=no again=no culprit=0 kill_at=''
    rm -f "$scratch/told"
    for index in "${!nodes[@]}"; do start_node "$index" "$1"; done
    while ((${#running[@]})); do
        sleep 0.5 & wait $! || true # a signal ends the wait
        if ((asked > heard)); then
            heard=$asked again=no
            if ((asked == 1)); then end_others --stop; else end_others --kill; fi
        elif [[ -n $kill_at ]] && ((SECONDS >= kill_at)); then
            kill_at=''
            end_others --kill
        fi
        for index in "${!running[@]}"; do
            kill -0 "${running[$index]}" 2>/dev/null || node_ended "$index"
        done
    done
}

report() { # the first node that failed: its output, and where its log is
    local index code node how
    for index in "$culprit" "${!nodes[@]}"; do
        code=${codes[$index]} node=${nodes[$index]}
        if ((code == 0 || code == 75)); then continue; fi
        how="failed with exit code $code"
        if ((code == 255)); then how='was lost'; fi
        {
            echo "${0##*/}: $node $how, after these lines:"
            said "$index" | grep -F ': [default' | tail -n 12 || true # worker output, before torchrun's long summary
            said "$index" | tail -n 3
            echo "${0##*/}: the log of $node is $OUTPUT_DIR/logs/$node.log"
        } >&2
        return
    done
}

worst_code() {
    local code worst=0
    for code in "${codes[@]}"; do
        case $worst:$code in
            *:0 | *:"$worst") ;;
            0:* | 75:*) worst=$code ;;
            *:75) ;;
            *) worst=$((code > worst ? code : worst)) ;;
        esac
    done
    echo "$worst"
}

dry_run() {
    local index variable
    for index in "${!nodes[@]}"; do
        echo "# ${nodes[$index]}"
        for variable in "${variables[@]}"; do pasteable export "$variable"; done
        bash -c "$(node_command "$index" --dry_run)"
    done
}

train() {
    if [[ ${SKIP_CHECKS:-0} != 1 ]]; then check_nodes; fi
    asked=0 heard=0 restarts=0
    trap 'asked=$((asked + 1))' TERM INT HUP
    run_nodes on_node
    while [[ $again == yes ]]; do run_nodes on_node_again; done
    report
    exit "$(worst_code)"
}

read_launch_settings "$@"
read_passed
if [[ $mode == dry_run || $mode == run || $mode == check ]]; then note_other_size; fi
if [[ $mode == dry_run ]]; then
    dry_run
    exit
fi
command -v pdsh >/dev/null || fail "pdsh is not installed; apt-get install pdsh, or start $script on each node by hand"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
case $mode in
    run) train ;;
    check) check_nodes ;;
    *)
        on_all_nodes "--$mode"
        ((failed == 0)) || fail "$failed of $NNODES nodes could not be told to $mode"
        ;;
esac
