"""download_weights.sh and the scripts it calls: planned actions, what stops it, what is verified."""

import hashlib
import http.client
import http.server
import json
import re
import shutil
import subprocess
import sys
import threading
import urllib.error
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from scripts import convert_weights as convert
from scripts import prompt_template as template
from scripts import verify_weights as verify

ROOT = Path(__file__).parents[2]
NOBODY = "http://127.0.0.1:9"  # answers no request
GLYPH = "text_encoder/Glyph-SDXL-v2/checkpoints/byt5_model.pt"
MODEL = "checkpoint-11352/model.pth"
USUAL = (
    "bash",
    "awk",
    "basename",
    "cat",
    "cut",
    "df",
    "dirname",
    "du",
    "mkdir",
    "mv",
    "realpath",
    "rm",
)
COMMIT = "219ab9db64c045e5181a2202d11f686439351292"
TEMPLATE = "first line \n{text_prompt} {other} \u00e9\n"
SOURCE = f"{template.CONSTANT} = {TEMPLATE!r}\n"


@pytest.fixture
def download(tmp_path):
    """download(*options, tools={name: shell text}) runs a copy of the script with only these programs and the usual."""
    copy = tmp_path / "repository"
    (copy / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "download_weights.sh", copy)
    for name in ("convert_weights", "verify_weights", "prompt_template"):
        shutil.copy(ROOT / "scripts" / f"{name}.py", copy / "scripts")

    def run(*options, tools=None, **variables):
        bin_folder = tmp_path / "bin"
        bin_folder.mkdir(exist_ok=True)
        for name in USUAL:
            (bin_folder / name).unlink(missing_ok=True)
            (bin_folder / name).symlink_to(shutil.which(name))
        for name, text in (tools or {}).items():
            (bin_folder / name).unlink(missing_ok=True)
            (bin_folder / name).write_text(f"#!{shutil.which('bash')}\n{text}\n")
            (bin_folder / name).chmod(0o755)
        environment = {"PATH": str(bin_folder), "PYTHON": sys.executable}
        environment |= dict.fromkeys(("HF_ENDPOINT", "MODELSCOPE_ENDPOINT"), NOBODY)
        environment |= dict.fromkeys(("GITHUB_ENDPOINT", "JSDELIVR_ENDPOINT"), NOBODY) | variables
        command = [
            "bash",
            str(copy / "download_weights.sh"),
            "--output",
            str(tmp_path / "ckpts"),
            *options,
        ]
        return subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
        )

    return run


@pytest.fixture
def pinned(download, tmp_path):
    """pinned(sha256=..., size=...): the copy of the scripts asks for this reward model, and for TEMPLATE."""

    def change(sha256, size):
        scripts = tmp_path / "repository" / "scripts"
        known = verify.VIDEOREWARD[MODEL]
        text = (scripts / "verify_weights.py").read_text()
        assert known.sha256 in text
        assert f"{known.size:_}" in text
        text = text.replace(known.sha256, sha256).replace(f"{known.size:_}", str(size))
        (scripts / "verify_weights.py").write_text(text)
        text = (scripts / "prompt_template.py").read_text()
        text = text.replace(template.SHA256, hashlib.sha256(TEMPLATE.encode()).hexdigest())
        (scripts / "prompt_template.py").write_text(text)

    return change


@pytest.fixture
def serve():
    """serve({path: bytes}) answers these paths, with ranges, and 404 to others; returns its address and the log."""
    servers = []

    def start(files):
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                body = files.get(self.path)
                begin = int(re.search(r"\d+", self.headers.get("Range", "0"))[0])
                log.append((self.path, begin))
                if body is None or begin >= len(body):
                    return self.send_error(416 if body else 404)
                self.send_response(206 if begin else 200)
                self.send_header("Content-Length", str(len(body) - begin))
                if begin:
                    self.send_header("Content-Range", f"bytes {begin}-{len(body) - 1}/{len(body)}")
                self.end_headers()
                self.wfile.write(body[begin:])

            def log_message(self, *_):
                pass

        log = []
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}", log

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def torch_bytes(folder, content):
    torch.save(content, folder / "made.pt")
    return (folder / "made.pt").read_bytes()


def hf_of(reward):
    """An hf that copies this file as the reward model unless one is there; of other repositories it gets nothing."""
    copy = f"mkdir -p $6/{Path(MODEL).parent}; cat {reward} > $6/{MODEL}"
    return f'echo "hf $2"\nif [[ $2 == */VideoReward && ! -e $6/{MODEL} ]]; then {copy}; fi'


def free(gigabytes):
    """A df that finds this much room."""
    return f'echo "Filesystem 1024-blocks Used Available Capacity Mounted"; echo "d 1 1 {gigabytes * 1000000} 1% /"'


def test_a_dry_run_names_every_part_and_does_nothing(download, tmp_path):
    result = download("--dry_run", tools={"df": free(1)})  # too little room, which it only mentions
    assert result.returncode == 0, result.stderr
    repositories = (
        "tencent/HunyuanVideo-1.5",
        "Qwen/Qwen2.5-VL-7B-Instruct",
        "google/byt5-small",
        "KlingTeam/VideoReward",
        "Qwen/Qwen2-VL-2B-Instruct",
    )
    for repository in repositories:
        assert f"hf download {repository} --include" in result.stdout
        assert f"scripts/verify_weights.py {repository}" in result.stdout
    assert "transformer 480p_t2v: up to 34 GB, 1 GB free" in result.stdout
    assert "transformer/480p_t2v/" in result.stdout
    assert "Glyph-SDXL-v2/checkpoints/byt5_model.pt" in result.stdout
    for place in (
        f"KlingAIResearch/VideoAlign/{COMMIT}",
        f"KwaiVGI/VideoAlign/{COMMIT}",
        "XueZeyue/DanceGRPO",
    ):
        assert place in result.stdout
    assert not (tmp_path / "ckpts").exists()
    *_, last = result.stdout.splitlines()
    parts = [int(size) for size in re.findall(r": up to (\d+) GB, 1 GB free", result.stdout)]
    assert len(parts) == 5
    assert last.startswith(f"total: up to {sum(parts)} GB; 1 GB free")


def test_the_other_layout_is_one_repository(download):
    options = ("--dry_run", "--layout", "diffusers", "--version", "720p_t2v", "--skip_reward")
    lines = [line for line in download(*options).stdout.splitlines() if "download" in line]
    assert len(lines) == 1
    assert "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-720p_t2v" in lines[0]


@pytest.mark.parametrize(
    "model, repository, gigabytes",
    [
        ("wan21-1.3b", "Wan2.1-T2V-1.3B", 32),
        ("wan21-14b", "Wan2.1-T2V-14B", 84),
        ("wan22-ti2v-5b", "Wan2.2-TI2V-5B", 48),
        ("wan22-t2v-a14b", "Wan2.2-T2V-A14B", 142),
        ("wan22-i2v-a14b", "Wan2.2-I2V-A14B", 142),
    ],
)
def test_wan_is_one_repository_in_a_folder_of_its_own(model, repository, gigabytes):
    words = [
        "bash",
        "download_weights.sh",
        "--dry_run",
        "--model",
        model,
        "--skip_reward",
    ]
    result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    (line,) = [line for line in result.stdout.splitlines() if " download " in line]
    assert f"Wan-AI/{repository}-Diffusers" in line
    assert line.endswith(f"ckpts/{model}")
    assert f"model {model}: up to {gigabytes} GB" in result.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--model", "wan"),
            "model is wan; choose hunyuan15, wan21-1.3b, wan21-14b, wan22-ti2v-5b, wan22-t2v-a14b or "
            "wan22-i2v-a14b",
        ),
        (
            ("--model", "wan21-14b", "--version", "720p"),
            "--layout and --version are for hunyuan15; leave them out with --model wan21-14b",
        ),
        (
            (),
            "neither hf nor huggingface-cli is installed: pip install huggingface_hub, or make venv",
        ),
        (("--layout", "other"), "layout is other; choose tencent or diffusers"),
        (("--version",), "--version needs a value"),
        (("--everything",), "unknown option --everything; see --help"),
    ],
)
def test_what_is_wrong_is_one_sentence(download, tmp_path, options, message):
    result = download(*options)
    assert result.returncode == 2
    assert result.stderr == f"download_weights.sh: {message}\n"
    assert not (tmp_path / "ckpts").exists()


def test_a_missing_curl_is_named(download):
    assert (
        download(tools={"hf": "echo began"}).stderr
        == "download_weights.sh: curl is not installed\n"
    )


def test_a_part_that_does_not_fit_is_not_begun(download, tmp_path):
    """32 GB are enough for neither a new transformer nor, with 1 GB of it there, the rest."""
    done = tmp_path / "ckpts" / "transformer" / "480p_t2v"
    done.mkdir(parents=True)
    tools = {"hf": "echo began", "df": free(32), "du": "printf '1000000\\t%s' $2", "curl": ""}
    result = download(tools=tools)
    assert result.returncode == 2
    assert "began" not in result.stdout
    assert result.stderr == (
        f"download_weights.sh: transformer 480p_t2v needs 33 GB more in {tmp_path / 'ckpts'}, but only 32 GB are free; "
        "make room or choose another --output\n"
    )


def test_what_is_already_there_counts(download, tmp_path):
    (tmp_path / "ckpts" / "transformer" / "480p_t2v").mkdir(parents=True)
    tools = {
        "hf": "echo began; exit 7",
        "df": free(32),
        "du": "printf '4000000\\t%s' $2",
        "curl": "",
    }
    result = download(tools=tools)
    assert result.returncode == 7
    assert "began" in result.stdout


def test_the_older_program_does_as_well(download):
    tools = {"huggingface-cli": 'echo "$@"; exit 7', "df": free(99), "curl": ""}
    result = download("--layout", "diffusers", tools=tools)
    assert result.returncode == 7
    assert "download hunyuanvideo-community/" in result.stdout


def test_all_parts_in_turn_then_the_conversion(download, tmp_path):
    torch.save({"final_layer_norm.weight": torch.ones(2)}, tmp_path / "glyph.pt")
    curl = f'while [[ $1 != --output ]]; do shift; done\ncat {tmp_path / "glyph.pt"} > "$2"'
    result = download("--skip_reward", tools={"hf": 'echo "hf $2"', "curl": curl, "df": free(99)})
    assert result.returncode == 0, result.stderr
    fetched = [line.split()[1] for line in result.stdout.splitlines() if line.startswith("hf ")]
    assert fetched == ["tencent/HunyuanVideo-1.5"] * 4 + [
        "Qwen/Qwen2.5-VL-7B-Instruct",
        "google/byt5-small",
    ]
    assert (
        "NOT CHECKED: AI-ModelScope/Glyph-SDXL-v2 cannot be asked for its sha256 sums"
        in result.stderr
    )
    assert (tmp_path / "ckpts" / GLYPH).with_suffix(".safetensors").is_file()
    assert result.stdout.endswith(f"{tmp_path / 'ckpts'} is complete\n")


@pytest.mark.slow
def test_the_model_is_converted_even_if_the_reward_cannot_be_had(download, tmp_path):
    """Slow: a whole download; all parts together are fetched in `make test`."""
    glyph = torch_bytes(tmp_path, {"final_layer_norm.weight": torch.ones(2)})
    (tmp_path / "glyph.pt").write_bytes(glyph)
    curl = f'while [[ $1 != --output ]]; do shift; done\ncat {tmp_path / "glyph.pt"} > "$2"'
    result = download(
        tools={"hf": "[[ $2 != */VideoReward ]] || exit 7", "curl": curl, "df": free(99)}
    )
    assert result.returncode == 7
    assert "VideoReward could not be downloaded" in result.stderr
    assert (tmp_path / "ckpts" / GLYPH).with_suffix(".safetensors").is_file()


@pytest.mark.slow
def test_a_repository_is_found_under_its_old_name(download, pinned, tmp_path):
    """Slow: a whole download from a second address."""
    model = torch_bytes(tmp_path, {"w": torch.zeros(2)})
    pinned(hashlib.sha256(model).hexdigest(), len(model))
    (tmp_path / "source.py").write_text(SOURCE)
    absent = "[[ $2 != KlingTeam/* ]] || exit 7\n"
    tools = {"hf": absent + hf_of(tmp_path / "made.pt"), "curl": "exit 6", "df": free(99)}
    result = download(
        "--layout", "diffusers", "--prompt_template", str(tmp_path / "source.py"), tools=tools
    )
    assert result.returncode == 0, result.stderr
    assert "using KwaiVGI/VideoReward" in result.stdout
    assert (
        "KlingTeam/VideoReward could not be downloaded: hf ended with exit code 7" in result.stderr
    )
    assert (tmp_path / "ckpts" / "VideoReward" / MODEL).with_suffix(".safetensors").is_file()


@pytest.mark.slow
def test_a_wrong_file_of_hugging_face_is_deleted_and_fetched_again(download, pinned, tmp_path):
    """hf takes a file that is there for complete, so a damaged one would be found wrong again and again.

    Slow: two downloads; test_files_are_compared_with_the_published_sums has the comparison alone.
    """
    model = torch_bytes(tmp_path, {"w": torch.zeros(2)})
    pinned(hashlib.sha256(model).hexdigest(), len(model))
    damaged = tmp_path / "ckpts" / "VideoReward" / MODEL
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(model[:-1] + b"?")
    (tmp_path / "source.py").write_text(SOURCE)
    tools = {"hf": hf_of(tmp_path / "made.pt"), "curl": "exit 6", "df": free(99)}
    result = download(
        "--layout", "diffusers", tools=tools, PROMPT_TEMPLATE=str(tmp_path / "source.py")
    )
    assert result.returncode == 0, result.stderr
    assert "NOT CHECKED, except checkpoint-11352/model.pth" in result.stderr
    assert "instead of" in result.stderr
    assert "using KlingTeam/VideoReward" in result.stdout
    assert damaged.read_bytes() == model
    assert result.stdout.count("hf KlingTeam/VideoReward") == 2


def test_a_file_that_is_wrong_twice_ends_the_download(download, pinned, tmp_path):
    model = torch_bytes(tmp_path, {"w": torch.zeros(2)})
    pinned(hashlib.sha256(model).hexdigest(), len(model) + 1)
    tools = {"hf": hf_of(tmp_path / "made.pt"), "curl": "exit 6", "df": free(99)}
    result = download("--layout", "diffusers", tools=tools)
    assert result.returncode == 2
    assert result.stdout.count("hf KlingTeam/VideoReward") == 2
    assert f"has {len(model):,} bytes instead of {len(model) + 1:,}" in result.stderr
    assert "KlingTeam/VideoReward * was wrong twice; wrong files were deleted" in result.stderr
    assert not (tmp_path / "ckpts" / "VideoReward" / MODEL).exists()


def modelscope_files(files):
    """Answers of ModelScope: its listing with sizes and sums, and the files."""
    root = "models/AI-ModelScope/Glyph-SDXL-v2"
    listing = [{"Path": "assets", "Type": "tree"}]
    for name, body in files.items():
        sha256 = hashlib.sha256(body).hexdigest()
        listing.append({"Path": name, "Type": "blob", "Size": len(body), "Sha256": sha256})
    answers = {f"/{root}/resolve/master/{name}": body for name, body in files.items()}
    listed = json.dumps({"Data": {"Files": listing}}).encode()
    return answers | {f"/api/v1/{root}/repo/files?Recursive=true": listed}


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("curl"), reason="needs curl")
def test_what_an_interrupted_download_left_is_continued_and_checked(download, serve, tmp_path):
    """A partial file is continued; if the result is not the published file, it is downloaded again in the same run.

    Slow: downloads twice.
    """
    glyph = torch_bytes(tmp_path, {"final_layer_norm.weight": torch.ones(2)})
    half = len(glyph) // 2
    files = {
        "assets/color_idx.json": b'{"white": 0}',
        "assets/multilingual_10-lang_idx.json": b'{"en": 0}',
        "checkpoints/byt5_model.pt": glyph,
    }
    address, log = serve(modelscope_files(files))
    folder = tmp_path / "ckpts" / "text_encoder" / "Glyph-SDXL-v2"
    left = {
        "assets/color_idx.json.part": b'{"white": 0}?',
        "assets/multilingual_10-lang_idx.json": b'{"en": 1}',
        "checkpoints/byt5_model.pt.part": b"?" * half,
    }
    for name, content in left.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    tools = {"hf": "", "curl": f'exec {shutil.which("curl")} "$@"', "df": free(99)}
    result = download("--skip_reward", tools=tools, MODELSCOPE_ENDPOINT=address)
    assert result.returncode == 0, result.stderr
    begun = [(Path(path).name, begin) for path, begin in log if path.startswith("/models/")]
    assert begun == [
        ("color_idx.json", 13),
        ("color_idx.json", 0),
        ("multilingual_10-lang_idx.json", 0),
        ("byt5_model.pt", half),
        ("byt5_model.pt", 0),
    ]
    assert not list(folder.rglob("*.part"))
    for name, body in files.items():
        assert (folder / name).read_bytes() == body


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("curl"), reason="needs curl")
def test_the_prompt_template_is_taken_from_the_first_address_that_has_it(
    download, pinned, serve, tmp_path
):
    """The newest name answers with a page, the second with another template, the third not at all.

    Slow: a download for each address; one address is tried in `make test`.
    """
    model = torch_bytes(tmp_path, {"w": torch.zeros(2)})
    pinned(hashlib.sha256(model).hexdigest(), len(model))
    names = {
        "KlingAIResearch": b"<html>moved</html>",
        "KlingTeam": f"{template.CONSTANT} = 'another'".encode(),
    }
    files = {
        f"/{name}/VideoAlign/{COMMIT}/prompt_template.py": body for name, body in names.items()
    }
    mirror = f"/gh/KlingAIResearch/VideoAlign@{COMMIT}/prompt_template.py"
    github, log = serve(files)
    cdn, _ = serve({mirror: SOURCE.encode()})
    curl = f'exec {shutil.which("curl")} "$@"'
    tools = {"hf": hf_of(tmp_path / "made.pt"), "curl": curl, "df": free(99)}
    places = {"GITHUB_ENDPOINT": github, "JSDELIVR_ENDPOINT": cdn}
    file = tmp_path / "ckpts" / "VideoReward" / "prompt_template.txt"
    file.parent.mkdir(parents=True)
    file.write_text("damaged")
    result = download("--layout", "diffusers", tools=tools, **places)
    assert result.returncode == 0, result.stderr
    assert f"prompt template: {cdn}{mirror}" in result.stdout
    assert "has sha256" in result.stderr
    assert [path.split("/")[1] for path, _ in log] == ["KlingAIResearch", "KlingTeam", "KwaiVGI"]
    assert file.read_bytes() == TEMPLATE.encode()

    # it is not downloaded again
    assert download("--layout", "diffusers", tools=tools, **places).returncode == 0
    assert len(log) == 3


@pytest.mark.slow
def test_a_prompt_template_that_nobody_has_is_one_sentence(download, pinned, tmp_path):
    """Slow: tries every address."""
    model = torch_bytes(tmp_path, {"w": torch.zeros(2)})
    pinned(hashlib.sha256(model).hexdigest(), len(model))
    (tmp_path / "other.txt").write_text("another {text_prompt}")
    tools = {"hf": hf_of(tmp_path / "made.pt"), "curl": "exit 6", "df": free(99)}
    result = download("--layout", "diffusers", "--prompt_template", "other.txt", tools=tools)
    assert result.returncode == 2
    assert result.stderr.rstrip().endswith("name a copy with --prompt_template FILE")
    assert "other.txt is not the source of the prompt template" in result.stderr
    assert not (tmp_path / "ckpts" / "VideoReward" / "prompt_template.txt").exists()


def test_files_are_compared_with_the_published_sums(tmp_path):
    (tmp_path / "good.bin").write_bytes(b"abc")
    (tmp_path / "bad.bin").write_bytes(b"abd")
    (tmp_path / "small.json").write_text("{}")
    right = hashlib.sha256(b"abc").hexdigest()
    (tmp_path / "short.bin").write_bytes(b"ab")
    published = {
        "good.bin": verify.Published(3, right),
        "bad.bin": verify.Published(3, right),
        "short.bin": verify.Published(3, right),
        "small.json": verify.Published(size=2),
        "gone.json": verify.Published(),
    }
    wrong = {path.name: reason for path, reason in verify.differences(tmp_path, published).items()}
    assert wrong.pop("bad.bin").startswith(
        f"has sha256 {hashlib.sha256(b'abd').hexdigest()} instead of {right}"
    )
    assert wrong.pop("short.bin").startswith("has 2 bytes instead of 3")
    assert wrong == {"gone.json": "is missing; run download_weights.sh again."}


def test_the_reward_model_is_pinned_under_both_names_of_its_repository(
    tmp_path, monkeypatch, capsys
):
    """Its hub is not needed to find it wrong, nor believed about it."""
    sha256 = hashlib.sha256(b"abc").hexdigest()
    listed = [{"rfilename": MODEL, "size": 3, "lfs": {"sha256": sha256}}]
    monkeypatch.setattr(verify, "ask", lambda url: {"siblings": listed})
    (tmp_path / MODEL).parent.mkdir()
    for name in ("KlingTeam", "KwaiVGI"):
        (tmp_path / MODEL).write_bytes(b"abc")
        assert verify.main([f"{name}/VideoReward", str(tmp_path), "--remove_wrong"]) == 1
        assert "has 3 bytes instead of 5,031,072,529" in capsys.readouterr().err
        assert not (tmp_path / MODEL).exists()


def test_answers_of_both_hubs_are_read(monkeypatch):
    small = {"rfilename": "a.json"}
    large = {"rfilename": "b.bin", "size": 3, "lfs": {"sha256": "12"}}
    monkeypatch.setattr(verify, "ask", lambda url: {"siblings": [small, large]})
    assert verify.files_on_huggingface("x/y") == {"a.json": (None, None), "b.bin": (3, "12")}
    folder = {"Path": "d", "Type": "tree", "Sha256": ""}
    file = {"Path": "d/b.pt", "Type": "blob", "Size": 5, "Sha256": "34"}
    monkeypatch.setattr(verify, "ask", lambda url: {"Data": {"Files": [folder, file]}})
    assert verify.files_on_modelscope("x/y") == {"d/b.pt": (5, "34")}


def test_the_template_is_taken_byte_for_byte_without_running_the_source(tmp_path, monkeypatch):
    text = "\nfirst line \n{text_prompt} {other} é\n"
    source = f"raise SystemExit\nOTHER = 'no'\n{template.CONSTANT} = {text!r}\n"
    assert template.constant(source, template.CONSTANT) == text
    with pytest.raises(ValueError, match="MISSING is not assigned in this source"):
        template.constant(source, "MISSING")
    monkeypatch.setattr(template, "SHA256", hashlib.sha256(text.encode()).hexdigest())
    (tmp_path / "s.py").write_text(source, encoding="utf-8")
    assert template.main(tmp_path / "s.py", tmp_path / "new" / "t.txt") == 0
    assert (tmp_path / "new" / "t.txt").read_bytes() == text.encode()


def torch_file(folder, content, name=GLYPH):
    path = folder / name
    path.parent.mkdir(parents=True)
    torch.save(content, path)
    return path


@pytest.mark.parametrize("whole", [True, False])
def test_the_glyph_encoder_is_taken_out_of_either_kind_of_file(tmp_path, whole, capsys):
    tensors = {"embed_tokens.weight": torch.randn(3, 2), "final_layer_norm.weight": torch.randn(2)}
    prefixed = {f"module.text_tower.encoder.{name}": tensor for name, tensor in tensors.items()}
    content = tensors
    if whole:
        content = {"epoch": 1, "state_dict": prefixed | {"module.logit_scale": torch.ones(1)}}
    path = torch_file(tmp_path, content)
    convert.main([str(tmp_path)])
    written = load_file(path.with_suffix(".safetensors"))
    assert sorted(written) == sorted(f"encoder.{name}" for name in tensors)
    assert all(torch.equal(written[f"encoder.{name}"], tensor) for name, tensor in tensors.items())
    with safe_open(path.with_suffix(".safetensors"), "pt") as file:
        assert file.metadata()["source_sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert "2 tensors, from byt5_model.pt" in capsys.readouterr().out


def test_a_file_is_converted_again_only_if_it_changed(tmp_path, capsys):
    path = torch_file(tmp_path, {"w": torch.zeros(2)}, "VideoReward/checkpoint-11352/model.pth")
    convert.main([str(tmp_path)])
    convert.main([str(tmp_path)])
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("wrote")
    assert second.endswith("model.safetensors is up to date")
    torch.save({"w": torch.ones(2)}, path)
    convert.main([str(tmp_path)])
    assert load_file(path.with_suffix(".safetensors"))["w"].sum() == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "has none of text_encoder/"),
        ({"state_dict": {"x": torch.ones(1)}}, "holds none of the expected tensors"),
    ],
)
def test_nothing_to_convert_is_one_sentence(tmp_path, capsys, content, message):
    if content:
        torch_file(tmp_path, content)
    with pytest.raises(SystemExit) as stop:
        convert.main([str(tmp_path)])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.parametrize("name", ["../victim", "a/../../victim", "{root}/victim"])
def test_a_mirror_cannot_have_a_file_outside_deleted(tmp_path, monkeypatch, capsys, name):
    name = name.format(root=tmp_path)
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "weights").mkdir()
    monkeypatch.setattr(verify, "ask", lambda url: {"siblings": [{"rfilename": name, "size": 1}]})
    assert verify.main(["x/y", str(tmp_path / "weights"), "--remove_wrong"]) == 1
    assert name in capsys.readouterr().err
    assert (tmp_path / "victim").read_text() == "precious"


@pytest.mark.parametrize(
    "listed",
    [5, [5], ["x"], [{}], [{"rfilename": "a", "size": "1"}], [{"rfilename": "a", "lfs": "x"}]],
)
def test_a_listing_of_another_form_is_not_checked_and_says_so(
    tmp_path, monkeypatch, capsys, listed
):
    monkeypatch.setattr(verify, "ask", lambda url: {"siblings": listed})
    assert verify.main(["x/y", str(tmp_path)]) == 0
    assert "NOT CHECKED" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error",
    [
        http.client.IncompleteRead(b'{"siblings": ['),
        http.client.BadStatusLine("\033[2Jgarbage\r\n"),
        urllib.error.URLError("refused"),
    ],
    ids=["cut short", "no HTTP", "refused"],
)
def test_a_hub_that_cannot_be_asked_is_not_checked_and_says_so(
    tmp_path, monkeypatch, capsys, error
):
    def ask(url):
        raise error

    monkeypatch.setattr(verify, "ask", ask)
    assert verify.main(["x/y", str(tmp_path)]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("NOT CHECKED: x/y cannot be asked")
    assert line.isprintable()


@pytest.mark.parametrize("names", [[], ["b.bin", "c/d.json"]])
def test_a_listing_without_what_was_downloaded_is_not_checked(tmp_path, monkeypatch, capsys, names):
    listed = [{"rfilename": name} for name in names]
    monkeypatch.setattr(verify, "ask", lambda url: {"siblings": listed})
    assert verify.main(["x/y", str(tmp_path), "--include", "a/*"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"NOT CHECKED: x/y lists {len(names)} files, none of them a/*"


def test_what_another_download_cannot_mend_ends_the_download(download, serve):
    """The hub lists no file of the repository: it is not fetched a second time."""
    listing = "/api/models/hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v"
    address, _ = serve({f"{listing}?blobs=true": b'{"siblings": []}'})
    tools = {"hf": 'echo "hf $2"', "curl": "exit 6", "df": free(99)}
    result = download("--layout", "diffusers", tools=tools, HF_ENDPOINT=address)
    assert result.returncode == 2
    assert result.stdout.count("hf ") == 1
    assert result.stderr.splitlines()[-1].endswith("could not be checked, as the line above says")


def test_a_file_that_cannot_be_read_is_one_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(verify, "ask", lambda url: {"siblings": [{"rfilename": "x" * 300}]})
    assert verify.main(["x/y", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("File name too long")
