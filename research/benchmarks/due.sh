#!/usr/bin/env bash
# The measurements that are due on one large GPU, in parts of at most ten minutes; each leaves its results in a folder.
#
#   bash research/benchmarks/due.sh PART OUTPUT [SECONDS]
#
#   clips    seconds and clips per GPU-hour at full size of the WAYS, separated by semicolons (awm, the recipe)
#   rivals   the same of nft and awm, with all clips trained and with the best and worst of 8, with and without guidance;
#            some 25 minutes in all: called again on the same machine, it continues
#   embedded updates per minute of the embedded model: prompts one by one, together, and as CUDA graphs
#   decode   ways to decode a clip at full size
#   beyond   training the embedded model far beyond the gain, four runs side by side
#            (research/studies/overoptimisation.py); called again, it continues them
#   wan      Wan 2.1 1.3B against stock diffusers, and an iteration inside 24 GB
#   ti2v     the same of Wan 2.2 TI2V 5B, text to video and image to video
#   a14b     an iteration of Wan 2.2 A14B, whose transformers take turns on the GPU, with its peak beside the plan; it writes
#            35 GB of weights first: called again on the same machine, it continues
#   images   image to video and 720p against stock diffusers and the planner
#   people   learning a reward from answers at full size: heads, and LoRA with recomputed layers and bf16 autocast
#   study    the studies of research/studies/second_edition.py that STUDIES names (rates, which the others need), one
#            after the other, those joined by a comma together, 16 runs side by side; called again, it continues them
#   third    all studies of research/studies/third_edition.py, in their order; called again, it continues them. On another
#            machine it continues from the records, if the archive of the last call was unpacked into the repository
#            (tar xzf third.tar.gz); runs that were stopped begin anew there, because their checkpoints are large. The
#            archive is written EVERY 60 seconds, and at the end or on a signal. REHEARSE=1: small runs on a CPU, in
#            OUTPUT/rehearsal
#
# A part at full size is rehearsed with a tiny model first, while its weights are written: a wrong flag must not cost
# minutes. REHEARSE=1 does nothing else. No part needs ffmpeg.
# MODEL (/dev/shm/random_model), SCRATCH (in /dev/shm where there is room, else in /tmp) and RUNS (/tmp/beyond) are
# scratch folders, kept for the next call.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

part=$1
output=$2
seconds=${3:-570}
begin=$SECONDS
today=$(date +%F)
model=${MODEL:-/dev/shm/random_model}
runs=${RUNS:-/tmp/beyond}
mkdir -p "$output"

python=${PYTHON:-python3}
if [[ -z ${PYTHON:-} && -x .venv/bin/python ]]; then python=.venv/bin/python; fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 TQDM_DISABLE=1 HF_HUB_OFFLINE=1
unset OMP_NUM_THREADS # a model at full size wants all cores; parts of many small runs set it themselves

left() { echo $((seconds - (SECONDS - begin))); } # seconds until the limit
within() { timeout --signal INT "$(left)" "$@"; }
run() { within "$python" -m "research.$1" "${@:2}"; } # MODULE FLAGS

roomy() { # GB; the folder in memory if it has room for them, else one on a disk
  local free
  free=$(df --output=avail -B 1G /dev/shm 2> /dev/null | tail -n 1) || free=0
  if ((free >= $1)); then echo /dev/shm; else echo /tmp; fi
}

writing= # process that writes weights
write() { # MODULE FLAGS; begins in the background
  [[ -z ${REHEARSE:-} ]] || return 0
  timeout "$(left)" "$python" -m "research.$1" "${@:2}" > "$output/weights.log" 2>&1 &
  writing=$!
}

rehearse() { # COMMAND; then waits for the weights. If either fails, so does the part
  local failed=
  "$@" > "$output/rehearsal.log" 2>&1 || failed=$output/rehearsal.log
  if [[ -n $writing && -n $failed ]]; then
    kill "$writing" 2> /dev/null || true
  elif [[ -n $writing ]]; then
    wait "$writing" || failed=$output/weights.log
  fi
  if [[ -n $failed ]]; then
    tail -n 5 "$failed" >&2
    echo "$part failed before it measured anything: $failed" >&2
    exit 1
  fi
  [[ -z ${REHEARSE:-} ]] || exit 0
}

clips() {
  local ways
  local recipe=(--config configs/hunyuan15_1gpu_lora.yaml)
  IFS=';' read -ra ways <<< "${WAYS:-awm;recipe}"
  if [[ ! -d $model ]]; then
    rm -rf "$model-partial" # of a call that was stopped
    write benchmarks.random_model --output "$model-partial"
  fi
  rehearse tiny_clips
  [[ -d $model ]] || mv "$model-partial" "$model"
  local page=$model-$part.md # kept: the next call adds to it
  local code=0
  run benchmarks.clips "${recipe[@]}" --pretrained_model_root "$model" --prompt_cache "$model-prompts" \
    --output "$page" --ways "${ways[@]}" > "$output/clips.log" 2>&1 || code=$?
  cp "$page" "$output/$today-$part.md"
  return $code
}

tiny_clips() { # of the caller's recipe and ways
  local tiny=(--num_frames 5 --height 32 --width 32 --num_sampling_steps 4 --compile False --tail_steps 2)
  [[ -d $model-tiny ]] || run benchmarks.random_model --tiny --output "$model-tiny" || return
  run benchmarks.clips "${recipe[@]}" --pretrained_model_root "$model-tiny" --output "$output/rehearsal.md" \
    "${tiny[@]}" --ways "${ways[@]}"
}

rivals() {
  local all='nft;nft, 2 of 8;nft, guidance 1;nft, 2 of 8, guidance 1;awm;awm, 2 of 8;awm, guidance 1;awm, 2 of 8, guidance 1'
  WAYS="${WAYS:-$all;recipe;recipe, 2 of 8}" clips
}

embedded() {
  run benchmarks.embedded --config configs/tiny_gpu.yaml --device cuda --max_steps 24 \
    --output "$output/$today-embedded.md" > "$output/embedded.log" 2>&1
}

decode() { run benchmarks.decode --output "$output/$today-decode.md"; }

wan() { measure_wan wan wan21-1.3b 20; }

ti2v() { measure_wan ti2v wan22-ti2v-5b 30; }

a14b() { measure_wan a14b wan22-t2v-a14b 70; }

measure_wan() { # PAGE MODEL GB
  local scratch=${SCRATCH:-$(roomy "$3")/random_wan}
  write benchmarks.wan --model "$2" --scratch "$scratch" --write_only
  rehearse run benchmarks.wan --model "$2" --rehearse --output "$output/rehearsal.md"
  run benchmarks.wan --model "$2" --scratch "$scratch" --output "$output/$today-$1.md"
}

images() {
  rehearse run benchmarks.image_to_video --rehearse --output "$output/rehearsal.md"
  run benchmarks.image_to_video --output "$output/$today-image-to-video.md"
}

people() {
  local base=${SCRATCH:-$(roomy 12)}/random_reward
  write benchmarks.prefer_learn --base "$base" --write_only
  rehearse run benchmarks.prefer_learn --rehearse --output "$output/rehearsal.md"
  run benchmarks.prefer_learn --base "$base" --output "$output/$today-prefer-learn.md"
}

train() { # NAME FLAGS
  local name=$1
  local flags=(--validation_interval 40 --log_interval 20 --save_interval 40 --keep_checkpoints 1)
  flags+=(--use_moving_KL False --use_dual_kl False --holdout_reward shapes --report_to none --validation_videos 0)
  flags+=(--device cuda --max_steps 1200 --output_dir "$runs/$name" --resume_from_checkpoint auto)
  # It stops at the time limit, or by an error.
  within "$python" post_train.py --config configs/tiny_gpu.yaml "${flags[@]}" "${@:2}" > "$output/$name.log" 2>&1 \
    || echo "$name stopped: $(tail -n 1 "$output/$name.log")"
}

share() { # the GPU between processes, each with one CPU thread
  export OMP_NUM_THREADS=1 CUDA_MPS_PIPE_DIRECTORY=/tmp/mps CUDA_MPS_LOG_DIRECTORY=/tmp/mps
  mkdir -p /tmp/mps
  echo get_server_list | nvidia-cuda-mps-control &> /dev/null || nvidia-cuda-mps-control -d \
    || echo "without MPS the runs take turns" >&2
}

beyond() {
  share
  train free-2e-4 --learning_rate 2e-4 --kl_weight 1e-12 &
  train free-4e-4 --learning_rate 4e-4 --kl_weight 1e-12 &
  train free-4e-4-again --learning_rate 4e-4 --kl_weight 1e-12 --seed 2 &
  train kept-4e-4 --learning_rate 4e-4 --kl_weight 0.3 &
  wait
  (cd "$runs" && find . -name checkpoints -prune -o \( -name '*.json*' -o -name config.yaml \) -print) \
    | tar czf "$output/beyond.tar.gz" -C "$runs" --files-from -
}

study() {
  share
  export TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 # as registered
  local names name together budget
  local commit=${COMMIT:-$(git rev-parse --short=12 HEAD)} # COMMIT where there is no repository
  read -ra names <<< "${STUDIES:-rates}"
  for name in "${names[@]}"; do
    (($(left) > 120)) || break
    budget=$(awk "BEGIN { print ($(left) - 50) / 60 }") # less two starts of Python and an archive
    IFS=, read -ra together <<< "$name"
    "$python" -m research.studies.second_edition --studies "${together[@]}" --jobs "${JOBS:-16}" \
      --budget_minutes "$budget" --cut --commit "$commit" || echo "$name: exit code $?"
    "$python" -m research.studies.second_edition --choose # what the next study needs
  done
  tar czf "$output/second.tar.gz" research/studies/records/second.jsonl research/studies/*.json
}

third_archive() { # FOLDER of the records
  local code=0
  (cd "$1" && find research/studies/records -name 'third*') \
    | tar czf "$output/third.tar.gz.part" -C "$1" --files-from - || code=$?
  if ((code > 1)); then # 1: a file grew meanwhile
    echo "no archive this time: tar ended with $code" >&2
    return
  fi
  mv "$output/third.tar.gz.part" "$output/third.tar.gz"
}

third() {
  [[ -n ${REHEARSE:-} ]] || share
  export TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 # as registered
  local commit=${COMMIT:-$(git rev-parse --short=12 HEAD)} # COMMIT where there is no repository
  local root=$PWD
  local flags=(--cut --commit "$commit" --jobs "${JOBS:-16}")
  if [[ -n ${REHEARSE:-} ]]; then
    root=$(realpath "$output")/rehearsal
    flags+=(--tiny)
  fi
  mkdir -p "$root/research/studies/records" "$root/outputs/third"
  flags+=(--results "$root/research/studies/records/third.jsonl" --work "$root/outputs/third")
  flags+=(--budget_minutes "$(awk "BEGIN { print ($(left) - 30) / 60 }")") # less a start of Python and an archive

  "$python" -m research.studies.third_edition "${flags[@]}" &
  local study=$!
  local pause
  trap 'kill -TERM $study 2> /dev/null || true' INT TERM # its runs save
  while kill -0 "$study" 2> /dev/null; do
    sleep "${EVERY:-60}" &
    pause=$!
    wait -n "$study" "$pause" || true
    kill "$pause" 2> /dev/null || true
    third_archive "$root" # again and again, in case that this is killed
  done
  wait "$study" || echo "exit code $?"
}

"$part"
