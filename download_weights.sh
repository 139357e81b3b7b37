#!/usr/bin/env bash
# Gets the weights of HunyuanVideo-1.5 and of the VideoReward model, part by part; checkpoints-download.md explains it.
# Run it again after an interruption: what is complete is left alone, the rest goes on where it stopped.
set -euo pipefail
shopt -s inherit_errexit

usage() {
    cat <<'TEXT'
bash download_weights.sh [options]
  --output DIR        model folder; default: ckpts
  --layout NAME       tencent (default) or diffusers
  --version NAME      transformer; default: 480p_t2v
  --skip_reward       leave VideoReward out
  --dry_run           print what would be done
TEXT
}

fail() {
    echo "download_weights.sh: $*" >&2
    exit 2
}

output=$PWD/ckpts layout=tencent version=480p_t2v reward=yes dry=no
while (($#)); do
    case $1 in
        --output | --layout | --version)
            (($# > 1)) || fail "$1 needs a value"
            case $1 in
                --output) output=$(realpath -m "$2") ;;
                --layout) layout=$2 ;;
                --version) version=$2 ;;
            esac
            shift
            ;;
        --skip_reward) reward=no ;;
        --dry_run) dry=yes ;;
        -h | --help)
            usage
            exit
            ;;
        *) fail "unknown option $1; see --help" ;;
    esac
    shift
done
[[ $layout == tencent || $layout == diffusers ]] || fail "layout is $layout; choose tencent or diffusers"
cd "$(dirname "$0")"

python=${PYTHON:-python3}
if [[ -z ${PYTHON:-} && -x .venv/bin/python ]]; then python=$PWD/.venv/bin/python; fi
PATH=$PATH:$PWD/.venv/bin
hf=$(command -v hf || command -v huggingface-cli || true)
if [[ -z $hf ]]; then
    [[ $dry == yes ]] || fail "neither hf nor huggingface-cli is installed: pip install huggingface_hub, or make venv"
    hf=hf
fi
hf=$(basename "$hf")
[[ $dry == yes ]] || command -v curl >/dev/null || fail "curl is not installed"

run() {
    if [[ $dry == yes ]]; then
        printf '   '
        printf ' %q' "$@"
        echo
    else
        "$@"
    fi
}

# kilobytes under paths, 0 for those that are not there
used() {
    local total=0 path size
    for path in "$@"; do
        [[ -e $path ]] || continue
        size=$(du -sk "$path" | cut -f1)
        total=$((total + size))
    done
    echo "$total"
}

# space NAME GIGABYTES PATH...: refuse to begin what does not fit; what is already at the paths counts as done
space() {
    local name=$1 gigabytes=$2 existing=$output free have need
    shift 2
    while [[ ! -d $existing ]]; do existing=$(dirname "$existing"); done
    free=$(df -Pk "$existing" | awk 'NR == 2 { print $4 }')
    have=$(used "$@")
    need=$((gigabytes * 1000000000 / 1024 - have))
    echo "$name: up to $gigabytes GB, $((free * 1024 / 1000000000)) GB free in $existing"
    if [[ $dry == no ]] && ((need > free)); then
        fail "$name needs $((need * 1024 / 1000000000 + 1)) GB more in $output, but only" \
            "$((free * 1024 / 1000000000)) GB are free; make room or choose another --output"
    fi
}

# fetch REPOSITORY PATTERN FOLDER: the matching files of a Hugging Face repository, compared with their published sha256
fetch() {
    run "$hf" download "$1" --include "$2" --local-dir "$3"
    run "$python" scripts/verify_weights.py "$1" "$3" --include "$2"
}

# web URL FILE: one file, which must be complete to get its name
web() {
    [[ ! -s $2 ]] || return 0
    run mkdir -p "$(dirname "$2")"
    run curl --fail --location --silent --show-error --retry 5 --continue-at - --output "$2.part" "$1"
    run mv "$2.part" "$2"
}

tencent() {
    local repository=tencent/HunyuanVideo-1.5 texts=$output/text_encoder notes=.cache/huggingface
    space "transformer $version" 34 "$output/transformer/$version" "$output/$notes"
    fetch $repository "transformer/$version/*" "$output"
    space vae 6 "$output/vae"
    fetch $repository "vae/*" "$output"
    fetch $repository "scheduler/*" "$output"
    fetch $repository config.json "$output"
    space "text encoder" 17 "$texts/llm"
    fetch Qwen/Qwen2.5-VL-7B-Instruct "*" "$texts/llm"
    fetch google/byt5-small "*.json" "$texts/byt5-small"
    space "glyph encoder" 2 "$texts/Glyph-SDXL-v2"
    local file scope=${MODELSCOPE_ENDPOINT:-https://modelscope.cn}
    for file in assets/color_idx.json assets/multilingual_10-lang_idx.json checkpoints/byt5_model.pt; do
        web "$scope/models/AI-ModelScope/Glyph-SDXL-v2/resolve/master/$file" "$texts/Glyph-SDXL-v2/$file"
        run "$python" scripts/verify_weights.py AI-ModelScope/Glyph-SDXL-v2 "$texts/Glyph-SDXL-v2" --hub modelscope \
            --include "$file"
    done
}

diffusers() {
    space "model $version" 58 "$output"
    fetch "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-$version" "*" "$output"
}

videoreward() {
    local folder=$output/VideoReward file
    local commit=219ab9db64c045e5181a2202d11f686439351292
    space VideoReward 11 "$folder"
    fetch KwaiVGI/VideoReward "*" "$folder"
    for file in config preprocessor_config chat_template; do
        fetch Qwen/Qwen2-VL-2B-Instruct "$file.json" "$folder/base_config"
    done
    web "https://raw.githubusercontent.com/KwaiVGI/VideoAlign/$commit/prompt_template.py" "$folder/source/prompt_template.py"
    run "$python" scripts/prompt_template.py "$folder/source/prompt_template.py" "$folder/prompt_template.txt"
}

$layout
if [[ $reward == yes ]]; then videoreward; fi
if [[ $layout == tencent || $reward == yes ]]; then run "$python" scripts/convert_weights.py "$output"; fi
if [[ $dry == no ]]; then echo "$output is complete"; fi
