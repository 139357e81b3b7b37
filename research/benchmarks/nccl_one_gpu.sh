#!/usr/bin/env bash
# Runs a command whose ranks share one GPU and talk by real NCCL, over sockets on the loopback.
#
#   bash research/benchmarks/nccl_one_gpu.sh [COMMAND...]
#
#   bash research/benchmarks/nccl_one_gpu.sh torchrun --nproc_per_node 4 post_train.py --sp_size 2 --enable_fsdp True
#   NUM_GPUS=8 bash research/benchmarks/nccl_one_gpu.sh bash run_post_train.sh
#
# Without a command: the benchmark, `python -m research.benchmarks.nccl`. The daemon of MPS runs meanwhile, so that the
# kernels of all ranks run side by side; without it a rank's kernel waits while another's has the GPU. The rest of the
# trick is in research/benchmarks/one_gpu/.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export PYTHONPATH="$PWD/research/benchmarks/one_gpu:$PWD${PYTHONPATH:+:$PYTHONPATH}"
python=${PYTHON:-python3}
if [[ -z ${PYTHON:-} && -x .venv/bin/python ]]; then python=.venv/bin/python; fi
if (($# == 0)); then set -- "$python" -m research.benchmarks.nccl; fi
CUDA_MPS_PIPE_DIRECTORY=$(mktemp -d) CUDA_MPS_LOG_DIRECTORY=$(mktemp -d)
export CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
if nvidia-cuda-mps-control -d; then
    trap 'echo quit -t 5 | timeout 30 nvidia-cuda-mps-control >/dev/null || true' EXIT
else
    unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
    echo "nccl_one_gpu.sh: no MPS here: the ranks take turns on the GPU" >&2
fi
"$@"
