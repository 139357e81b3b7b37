# The repository with its pinned requirements on CUDA. Weights and run folders are mounted, never copied:
#
#   docker build -t sage-grpo .
#   docker run --rm sage-grpo make demo                                     # the check: learns on the CPU in minutes
#   docker run --rm --gpus all --ipc host --init --stop-timeout 660 -v "$PWD/ckpts:/app/ckpts:ro" -v "$PWD/outputs:/app/outputs" sage-grpo
#
# The host needs NVIDIA driver 580 or newer, for torch 2.13, and `outputs` must be writable for user 1001.
FROM nvidia/cuda:13.0.1-runtime-ubuntu24.04

RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates git make procps python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home --uid 1001 sage && mkdir /app && chown sage /app
USER sage
WORKDIR /app

# the large part, which changes with the requirements alone
COPY --chown=sage requirements.txt ./
RUN python3 -m venv .venv && .venv/bin/python -m pip install --no-cache-dir --disable-pip-version-check -r requirements.txt

COPY --chown=sage . .
RUN make venv && mkdir -p ckpts outputs
ENV PATH=/app/.venv/bin:$PATH PYTHONUNBUFFERED=1

CMD ["bash", "run_post_train.sh"]
