#!/usr/bin/env bash
# Post-trains on the nodes of a Slurm job. Submit it from the repository root; sbatch options override those below:
#
#   sbatch --nodes 8 scripts/post_train/slurm.sh [flags of post_train.py]
#   NODES=a,b bash scripts/post_train/slurm.sh --dry_run [flags]      (prints what each node would run)
#
# Ten minutes before the time limit, and when the job is preempted, this script gets SIGTERM and forwards it: training
# finishes its iteration and saves, and the job is requeued. The site's GraceTime limits the time preemption really
# allows; --signal and STOP_GRACE should not be longer.
#SBATCH --job-name=sage_grpo
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.out
#SBATCH --signal=B:TERM@600
set -euo pipefail
shopt -s inherit_errexit
cd "${SLURM_SUBMIT_DIR:-$(dirname "${BASH_SOURCE[0]}")/../..}" # Slurm runs a copy from another folder
[[ -f scripts/post_train/settings.sh ]] || {
    echo "slurm.sh: $PWD is not the repository; submit from its root" >&2
    exit 2
}
source scripts/post_train/settings.sh

# NODE_RANK and NODE_NAME are known only on the node.
# shellcheck disable=SC2016 # so they are expanded there
on_node='NODE_RANK=${SLURM_NODEID} NODE_NAME=${SLURMD_NODENAME} exec bash scripts/post_train/train_grpo.sh "$@"'

dry_run() {
    local index
    for index in "${!nodes[@]}"; do
        echo "# ${nodes[$index]}"
        SLURM_NODEID=$index SLURMD_NODENAME=${nodes[$index]} bash -c "$on_node" node --dry_run "${flags[@]}"
    done
}

train() {
    local step code signalled=no tasks=(srun --kill-on-bad-exit=0 --wait=60 bash -c "$on_node" node)
    if [[ ${SKIP_CHECKS:-0} != 1 ]]; then
        "${tasks[@]}" --check "${flags[@]}" ||
            fail "not all nodes are ready, nothing was started; SKIP_CHECKS=1 leaves the checks out"
    fi
    export SKIP_CHECKS=1 # they are done
    "${tasks[@]}" "${flags[@]}" &
    step=$!
    trap 'signalled=yes; kill -TERM "$step"' TERM
    while
        code=0
        wait "$step" || code=$?
        [[ $signalled == yes ]]
    do signalled=no; done
    if ((code == 75)) && [[ $REQUEUE == 1 ]]; then
        echo "slurm.sh: preempted; job $SLURM_JOB_ID goes back into the queue"
        scontrol requeue "$SLURM_JOB_ID"
    fi
    exit "$code"
}

take_switches "$@"
if [[ -n ${SLURM_JOB_NODELIST:-} ]]; then NODES=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | tr '\n' ' '); fi
read_nodes
export NNODES=${#nodes[@]} MASTER_ADDR=${MASTER_ADDR:-${nodes[0]}} MASTER_PORT=${MASTER_PORT:-29400}
export STOP_GRACE=${STOP_GRACE:-570}
read_config "${flags[@]}"
if [[ ${REQUEUE:=1} == 1 ]]; then refuse_starting_over REQUEUE=0; fi
note_other_size
case $mode in
    dry_run) dry_run ;;
    run)
        [[ -n ${SLURM_JOB_ID:-} ]] || fail "there is no Slurm job here; start this with sbatch"
        train
        ;;
    *) fail "--$mode is not for jobs of Slurm; use scancel --signal=TERM --batch JOB" ;;
esac
