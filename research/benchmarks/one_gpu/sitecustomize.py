"""Lets ranks share one GPU and records phases. Python imports it at its start if this folder is on PYTHONPATH.

NCCL refuses two ranks on one GPU of one host. Here every rank claims to be another host, so that NCCL connects them by
sockets over the loopback, and each takes the first GPU. With PHASES=FOLDER in the environment, `phase_records.py`
writes there how long each phase of a program takes and how much memory it needs. Programs and launchers run unchanged.
"""

import os

NCCL = {
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_NTHREADS": "2",  # times two sockets per connection: one thread cannot fill the loopback
    "NCCL_NSOCKS_PERTHREAD": "2",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_CUMEM_ENABLE": "0",
}

if "RANK" in os.environ:  # a worker of torchrun
    os.environ["NCCL_HOSTID"] = f"rank{os.environ['RANK']}"
    os.environ["LOCAL_RANK"] = "0"
    for name, value in NCCL.items():
        os.environ.setdefault(name, value)
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        # The killed rank may have broken its MPS server.
        os.environ["CUDA_MPS_PIPE_DIRECTORY"] = "/nonexistent"
if "PHASES" in os.environ:
    import phase_records

    phase_records.start(os.environ["PHASES"])
