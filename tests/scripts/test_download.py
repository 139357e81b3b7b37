"""download_weights.sh and the scripts it calls: planned actions, what stops it, what is verified."""

import hashlib
import shutil
import subprocess
import sys
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


@pytest.fixture
def download(tmp_path):
    """download(*options, tools={name: shell text}) runs a copy of the script with only these programs and the usual."""
    copy = tmp_path / "repository"
    (copy / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "download_weights.sh", copy)
    for name in ("convert_weights", "verify_weights", "prompt_template"):
        shutil.copy(ROOT / "scripts" / f"{name}.py", copy / "scripts")

    def run(*options, tools=None):
        bin_folder = tmp_path / "bin"
        bin_folder.mkdir()
        for name in ("bash", "awk", "basename", "cat", "cut", "df", "dirname", "du", "mkdir", "mv", "realpath"):
            (bin_folder / name).symlink_to(shutil.which(name))
        for name, text in (tools or {}).items():
            (bin_folder / name).unlink(missing_ok=True)
            (bin_folder / name).write_text(f"#!{shutil.which('bash')}\n{text}\n")
            (bin_folder / name).chmod(0o755)
        environment = {"PATH": str(bin_folder), "PYTHON": sys.executable}
        environment |= {"HF_ENDPOINT": NOBODY, "MODELSCOPE_ENDPOINT": NOBODY}
        command = ["bash", str(copy / "download_weights.sh"), "--output", str(tmp_path / "ckpts"), *options]
        return subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)

    return run


def free(gigabytes):
    """A df that finds this much room."""
    return f'echo "Filesystem 1024-blocks Used Available Capacity Mounted"; echo "d 1 1 {gigabytes * 1000000} 1% /"'


def test_a_dry_run_names_every_part_and_does_nothing(download, tmp_path):
    result = download("--dry_run", tools={"df": free(1)})  # too little room, which it only mentions
    assert result.returncode == 0, result.stderr
    for repository in ("tencent/HunyuanVideo-1.5", "Qwen/Qwen2.5-VL-7B-Instruct", "google/byt5-small",
                       "KwaiVGI/VideoReward", "Qwen/Qwen2-VL-2B-Instruct"):  # fmt: skip
        assert f"hf download {repository} --include" in result.stdout
        assert f"scripts/verify_weights.py {repository}" in result.stdout
    assert "transformer 480p_t2v: up to 34 GB, 1 GB free" in result.stdout
    assert "transformer/480p_t2v/" in result.stdout and "Glyph-SDXL-v2/checkpoints/byt5_model.pt" in result.stdout
    assert "VideoAlign/219ab9db64c045e5181a2202d11f686439351292/prompt_template.py" in result.stdout
    assert result.stdout.rstrip().endswith(f"scripts/convert_weights.py {tmp_path / 'ckpts'}")
    assert not (tmp_path / "ckpts").exists()


def test_the_other_layout_is_one_repository(download):
    options = ("--dry_run", "--layout", "diffusers", "--version", "720p_t2v", "--skip_reward")
    lines = [line for line in download(*options).stdout.splitlines() if "download" in line]
    assert len(lines) == 1 and "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-720p_t2v" in lines[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "neither hf nor huggingface-cli is installed: pip install huggingface_hub, or make venv"),
        (("--layout", "other"), "layout is other; choose tencent or diffusers"),
        (("--version",), "--version needs a value"),
        (("--everything",), "unknown option --everything; see --help"),
    ],
)
def test_what_is_wrong_is_one_sentence(download, tmp_path, options, message):
    result = download(*options)
    assert result.returncode == 2 and result.stderr == f"download_weights.sh: {message}\n"
    assert not (tmp_path / "ckpts").exists()


def test_a_missing_curl_is_named(download):
    assert download(tools={"hf": "echo began"}).stderr == "download_weights.sh: curl is not installed\n"


def test_a_part_that_does_not_fit_is_not_begun(download, tmp_path):
    """32 GB are enough for neither a new transformer nor, with 1 GB of it there, the rest."""
    done = tmp_path / "ckpts" / "transformer" / "480p_t2v"
    done.mkdir(parents=True)
    tools = {"hf": "echo began", "df": free(32), "du": "printf '1000000\\t%s' $2", "curl": ""}
    result = download(tools=tools)
    assert result.returncode == 2 and "began" not in result.stdout
    assert result.stderr == (
        f"download_weights.sh: transformer 480p_t2v needs 33 GB more in {tmp_path / 'ckpts'}, but only 32 GB are free; "
        "make room or choose another --output\n"
    )


def test_what_is_already_there_counts(download, tmp_path):
    (tmp_path / "ckpts" / "transformer" / "480p_t2v").mkdir(parents=True)
    tools = {"hf": "echo began; exit 7", "df": free(32), "du": "printf '4000000\\t%s' $2", "curl": ""}
    result = download(tools=tools)
    assert result.returncode == 7 and "began" in result.stdout


def test_the_older_program_does_as_well(download):
    tools = {"huggingface-cli": 'echo "$@"; exit 7', "df": free(99), "curl": ""}
    result = download("--layout", "diffusers", tools=tools)
    assert result.returncode == 7 and "download hunyuanvideo-community/" in result.stdout


def test_all_parts_in_turn_then_the_conversion(download, tmp_path):
    torch.save({"final_layer_norm.weight": torch.ones(2)}, tmp_path / "glyph.pt")
    curl = f'while [[ $1 != --output ]]; do shift; done\ncat {tmp_path / "glyph.pt"} > "$2"'
    result = download("--skip_reward", tools={"hf": 'echo "hf $2"', "curl": curl, "df": free(99)})
    assert result.returncode == 0, result.stderr
    fetched = [line.split()[1] for line in result.stdout.splitlines() if line.startswith("hf ")]
    assert fetched == ["tencent/HunyuanVideo-1.5"] * 4 + ["Qwen/Qwen2.5-VL-7B-Instruct", "google/byt5-small"]
    assert "NOT CHECKED: AI-ModelScope/Glyph-SDXL-v2 cannot be asked for its sha256 sums" in result.stderr
    assert (tmp_path / "ckpts" / GLYPH).with_suffix(".safetensors").is_file()
    assert result.stdout.endswith(f"{tmp_path / 'ckpts'} is complete\n")


def test_another_prompt_template_is_refused(download, tmp_path):
    made_up = template.CONSTANT + ' = "another {text_prompt}"'
    curl = f"while [[ $1 != --output ]]; do shift; done\necho '{made_up}' > \"$2\""
    result = download("--layout", "diffusers", tools={"hf": "", "curl": curl, "df": free(99)})
    assert result.returncode == 1
    assert result.stderr.rstrip().endswith(f"instead of {template.SHA256}; nothing was written.")
    assert not (tmp_path / "ckpts" / "VideoReward" / "prompt_template.txt").exists()


def test_files_are_compared_with_the_published_sums(tmp_path):
    (tmp_path / "good.bin").write_bytes(b"abc")
    (tmp_path / "bad.bin").write_bytes(b"abd")
    (tmp_path / "small.json").write_text("{}")
    right = hashlib.sha256(b"abc").hexdigest()
    published = {"good.bin": right, "bad.bin": right, "small.json": None, "gone.json": None}
    wrong = verify.differences(tmp_path, published)
    assert len(wrong) == 2 and f"bad.bin has sha256 {hashlib.sha256(b'abd').hexdigest()} instead of {right}" in wrong[0]
    assert wrong[1].endswith("gone.json is missing; run download_weights.sh again.")


def test_answers_of_both_hubs_are_read(monkeypatch):
    small, large = {"rfilename": "a.json"}, {"rfilename": "b.bin", "lfs": {"sha256": "12", "size": 3}}
    monkeypatch.setattr(verify, "ask", lambda url: {"siblings": [small, large]})
    assert verify.of_huggingface("x/y") == {"a.json": None, "b.bin": "12"}
    folder, file = {"Path": "d", "Type": "tree", "Sha256": ""}, {"Path": "d/b.pt", "Type": "blob", "Sha256": "34"}
    monkeypatch.setattr(verify, "ask", lambda url: {"Data": {"Files": [folder, file]}})
    assert verify.of_modelscope("x/y") == {"d/b.pt": "34"}


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
    content = {"epoch": 1, "state_dict": prefixed | {"module.logit_scale": torch.ones(1)}} if whole else tensors
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
    assert first.startswith("wrote") and second.endswith("model.safetensors is up to date")
    torch.save({"w": torch.ones(2)}, path)
    convert.main([str(tmp_path)])
    assert load_file(path.with_suffix(".safetensors"))["w"].sum() == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "has none of text_encoder/"), ({"state_dict": {"x": torch.ones(1)}}, "holds none of the expected tensors")],
)
def test_nothing_to_convert_is_one_sentence(tmp_path, capsys, content, message):
    if content:
        torch_file(tmp_path, content)
    with pytest.raises(SystemExit) as stop:
        convert.main([str(tmp_path)])
    assert stop.value.code == 2 and message in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.safetensors"))
