#!/usr/bin/env bash
# Gets the weights of a model and of the VideoReward model, part by part; docs/models.md explains it.
# Run it again after an interruption: what is complete is left alone, the rest goes on where it stopped.
set -euo pipefail
shopt -s inherit_errexit

usage() {
    cat <<'TEXT'
bash download_weights.sh [options]
  --model NAME        hunyuan15 (default), wan21-1.3b, wan21-14b, wan22-ti2v-5b, wan22-t2v-a14b or wan22-i2v-a14b
  --output DIR        model folder; default: ckpts, for Wan ckpts/NAME
  --layout NAME       of hunyuan15: tencent (default) or diffusers
  --version NAME      transformer of hunyuan15; default: 480p_t2v; with _i2v in it, the vision encoder comes too
  --skip_reward       leave VideoReward out
  --prompt_template X VideoReward's prompt template: a file or an address to try before the built-in ones
  --dry_run           print what would be done
TEXT
}

fail() {
    echo "download_weights.sh: $*" >&2
    exit 2
}

total=0 # gigabytes of all parts
model=hunyuan15 output='' layout='' version='' reward=yes dry=no template=${PROMPT_TEMPLATE:-}
while (($#)); do
    case $1 in
        --model | --output | --layout | --version | --prompt_template)
            (($# > 1)) || fail "$1 needs a value"
            case $1 in
                --model) model=$2 ;;
                --output) output=$(realpath -m "$2") ;;
                --layout) layout=$2 ;;
                --version) version=$2 ;;
                --prompt_template) template=$2 ;;
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
case $model in
    hunyuan15)
        output=${output:-$PWD/ckpts} layout=${layout:-tencent} version=${version:-480p_t2v}
        [[ $layout == tencent || $layout == diffusers ]] || fail "layout is $layout; choose tencent or diffusers"
        ;;
    wan21-1.3b | wan21-14b | wan22-ti2v-5b | wan22-t2v-a14b | wan22-i2v-a14b)
        [[ -z $layout$version ]] || fail "--layout and --version are for hunyuan15; leave them out with --model $model"
        output=${output:-$PWD/ckpts/$model} layout=wan
        ;;
    *) fail "model is $model; choose hunyuan15, wan21-1.3b, wan21-14b, wan22-ti2v-5b, wan22-t2v-a14b or wan22-i2v-a14b" ;;
esac
if [[ -f $template ]]; then template=$(realpath "$template"); fi
cd "$(dirname "$0")"
trap 'exit 130' INT

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
    local name=$1 gigabytes=$2 have need
    existing=$output
    shift 2
    while [[ ! -d $existing ]]; do existing=$(dirname "$existing"); done
    free=$(df -Pk "$existing" | awk 'NR == 2 { print $4 }')
    have=$(used "$@")
    need=$((gigabytes * 1000000000 / 1024 - have))
    total=$((total + gigabytes))
    echo "$name: up to $gigabytes GB, $((free * 1024 / 1000000000)) GB free in $existing"
    if [[ $dry == no ]] && ((need > free)); then
        fail "$name needs $((need * 1024 / 1000000000 + 1)) GB more in $output, but only" \
            "$((free * 1024 / 1000000000)) GB are free; make room or choose another --output"
    fi
}

# verified REPOSITORY FOLDER PATTERN...: whether the files are the published ones; wrong ones are deleted, and what
# another download cannot mend ends this one
verified() {
    local code=0
    run "$python" scripts/verify_weights.py "$1" "$2" --include "${@:3}" --remove_wrong || code=$?
    ((code < 2)) || fail "$1 $3 in $2 could not be checked, as the line above says"
    return "$code"
}

# fetch PATTERN FOLDER REPOSITORY [OLD_NAME...]: the matching files of a Hugging Face repository, compared with their
# published sha256; a wrong file is fetched once more
fetch() {
    local pattern=$1 folder=$2 name code attempt
    shift 2
    for attempt in first second; do
        for name in "$@"; do
            code=0
            run "$hf" download "$name" --include "$pattern" --local-dir "$folder" || code=$?
            if ((code == 0)); then break; fi
            echo "$name could not be downloaded: $hf ended with exit code $code" >&2
        done
        if ((code)); then exit "$code"; fi
        if (($# > 1)); then echo "using $name, which has had the names $*"; fi
        if verified "$name" "$folder" "$pattern"; then return; fi
        echo "the $attempt download of $name $pattern was wrong" >&2
    done
    fail "$name $pattern was wrong twice; wrong files were deleted from $folder"
}

# web URL FILE: one file, which must be complete to get its name; a partial one is continued
web() {
    local code=0 get=(curl --fail --location --silent --show-error --retry 5 --output "$2.part")
    [[ ! -s $2 ]] || return 0
    run mkdir -p "$(dirname "$2")"
    run "${get[@]}" --continue-at - "$1" || code=$?
    if [[ -e $2.part && $code =~ ^(22|33|36)$ ]]; then # the server does not continue it: it may be too long or outdated
        run rm "$2.part"
        code=0
        run "${get[@]}" "$1" || code=$?
    fi
    if ((code)); then exit "$code"; fi
    run mv "$2.part" "$2"
}

# modelscope REPOSITORY PATH FOLDER: one file of a repository, compared with its published sha256
modelscope() {
    local attempt
    for attempt in first second; do
        web "${MODELSCOPE_ENDPOINT:-https://modelscope.cn}/models/$1/resolve/master/$2" "$3/$2"
        if verified "$1" "$3" "$2" --hub modelscope; then return; fi
        echo "the $attempt download of $1 $2 was wrong" >&2
    done
    fail "$1 $2 was wrong twice; it was deleted from $3"
}

tencent() {
    local repository=tencent/HunyuanVideo-1.5 texts=$output/text_encoder notes=.cache/huggingface file
    space "transformer $version" 34 "$output/transformer/$version" "$output/$notes"
    fetch "transformer/$version/*" "$output" $repository
    space vae 6 "$output/vae"
    fetch "vae/*" "$output" $repository
    fetch "scheduler/*" "$output" $repository
    fetch config.json "$output" $repository
    space "text encoder" 17 "$texts/llm"
    fetch "*" "$texts/llm" Qwen/Qwen2.5-VL-7B-Instruct
    fetch "*.json" "$texts/byt5-small" google/byt5-small
    space "glyph encoder" 2 "$texts/Glyph-SDXL-v2"
    for file in assets/color_idx.json assets/multilingual_10-lang_idx.json checkpoints/byt5_model.pt; do
        modelscope AI-ModelScope/Glyph-SDXL-v2 $file "$texts/Glyph-SDXL-v2"
    done
    if [[ $version == *_i2v* ]]; then
        space "vision encoder" 3 "$output/vision_encoder"
        for file in image_encoder feature_extractor; do
            fetch "$file/*" "$output/vision_encoder/siglip" black-forest-labs/FLUX.1-Redux-dev
        done
    fi
    run "$python" scripts/convert_weights.py "$output"
}

diffusers() {
    space "model $version" 60 "$output"
    fetch "*" "$output" "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-$version"
}

wan() {
    local name room # of the repository; gigabytes
    case $model in
        wan21-1.3b) name=Wan2.1-T2V-1.3B room=32 ;;
        wan21-14b) name=Wan2.1-T2V-14B room=84 ;;
        wan22-ti2v-5b) name=Wan2.2-TI2V-5B room=48 ;;
        wan22-t2v-a14b) name=Wan2.2-T2V-A14B room=142 ;; # at most: two transformers in fp32
        wan22-i2v-a14b) name=Wan2.2-I2V-A14B room=142 ;;
    esac
    space "model $model" $room "$output"
    fetch "*" "$output" "Wan-AI/$name-Diffusers"
}

videoreward() {
    local folder=$output/VideoReward file
    space VideoReward 11 "$folder"
    fetch "*" "$folder" KlingTeam/VideoReward KwaiVGI/VideoReward
    run "$python" scripts/convert_weights.py "$output"
    for file in config preprocessor_config chat_template; do
        fetch "$file.json" "$folder/base_config" Qwen/Qwen2-VL-2B-Instruct
    done
    prompt_template "$folder"
}

# prompt_template FOLDER: the first copy of VideoReward's prompt template that has the pinned sha256
prompt_template() {
    local target=$1/prompt_template.txt source=$1/source/prompt_template.py commit owner address file addresses=()
    local github=${GITHUB_ENDPOINT:-https://raw.githubusercontent.com} cdn=${JSDELIVR_ENDPOINT:-https://cdn.jsdelivr.net}
    if [[ -n $template ]]; then addresses+=("$template"); fi
    commit=219ab9db64c045e5181a2202d11f686439351292
    for owner in KlingAIResearch KlingTeam KwaiVGI; do # names of one organization, newest first
        addresses+=("$github/$owner/VideoAlign/$commit/prompt_template.py")
    done
    addresses+=("$cdn/gh/KlingAIResearch/VideoAlign@$commit/prompt_template.py")
    commit=15cc71d53cc2e6e18a68ee607d5fb6ba9a99e344
    addresses+=("$github/XueZeyue/DanceGRPO/$commit/fastvideo/models/videoalign/prompt_template.py")
    if [[ -f $target ]] && run "$python" scripts/prompt_template.py "$target" "$target"; then return; fi
    run mkdir -p "$1/source"
    for address in "${addresses[@]}"; do
        file=$source
        if [[ -f $address ]]; then
            file=$address
        elif ! run curl --fail --location --silent --show-error --retry 2 --output "$source" "$address"; then
            echo "$address did not answer with the prompt template" >&2
            continue
        fi
        if run "$python" scripts/prompt_template.py "$file" "$target"; then
            echo "prompt template: $address"
            if [[ $dry == no ]]; then return; fi
        fi
    done
    if [[ $dry == yes ]]; then return; fi
    fail "no address has the prompt template of VideoReward; name a copy with --prompt_template FILE"
}

$layout
if [[ $reward == yes ]]; then videoreward; fi
if [[ $dry == no ]]; then
    echo "$output is complete"
else
    echo "total: up to $total GB; $((free * 1024 / 1000000000)) GB free in $existing, $(($(used "$output") * 1024 / 1000000000)) GB already there"
fi
