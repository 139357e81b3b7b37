"""The prompt cache filled ahead of a run: complete, resumable, shared by ranks, and sufficient for post_train.py."""

import shutil

import pytest
import torch

import post_train
from sage_grpo.models.hunyuan15 import text
from sage_grpo.parallel import device
from sage_grpo.train.inputs import BUNDLED_PROMPTS
from scripts import encode_prompts as script
from tests.programs import exit_code, flag_list


@pytest.fixture
def encode(tiny_folder, tmp_path, capsys):
    """encode(file, ...) -> what the script prints; with its exit status if it fails."""

    def run(*files, **options):
        flags = {"model_root": tiny_folder, "prompt_cache": tmp_path / "cache"} | options
        arguments = flag_list(flags)
        if files:
            arguments += ["--prompts", *map(str, files)]
        status = exit_code(script.main, arguments)
        printed = capsys.readouterr()
        return (status, printed.err) if status else printed.out

    return run


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.csv"
    path.write_text(
        "prompt,seed\na red circle moving left,1\na green square,2\na red circle moving left,3\n"
    )
    more = tmp_path / "more.txt"
    more.write_text("a red square moving right\n")
    return path, more


@pytest.fixture
def loads(monkeypatch):
    """Folders of which encoders were loaded."""
    folders = []
    load_encoders = text.load_encoders

    def recorded(folder, *rest):
        folders.append(folder)
        return load_encoders(folder, *rest)

    monkeypatch.setattr(text, "load_encoders", recorded)
    return folders


def test_it_encodes_what_is_missing_and_says_how_much(encode, prompts, loads, tmp_path):
    # two, and the negative one
    assert encode(prompts[0]).startswith("3 prompts, 3 of which were missing: ")
    printed = encode(*prompts)
    files = list((tmp_path / "cache").glob("*/*.safetensors"))
    size = sum(file.stat().st_size for file in files)
    assert printed.startswith("4 prompts, 1 of which were missing: ")
    assert " s on 1 rank(s)" in printed
    assert len(files) == 4
    assert f"{size:,} bytes in {files[0].parent}" in printed
    assert len(loads) == 2
    assert "4 prompts, 0 of which were missing" in encode(*prompts)
    assert len(loads) == 2  # nothing was missing, so nothing was loaded


def test_a_large_model_is_not_encoded_on_the_cpu_unless_asked(encode, prompts, monkeypatch):
    monkeypatch.setattr(device, "SMALL", 10**5)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    status, error = encode(prompts[1])
    assert status == 2
    assert error.startswith("encode_prompts.py: no GPU can be used: ")
    assert "2 prompts, 2 of which" in encode(prompts[1], device="cpu")


def test_precision_and_negative_prompt_are_those_of_the_run(encode, prompts, tmp_path):
    encode(prompts[1])
    assert "2 prompts, 2 of which" in encode(prompts[1], dtype="bf16")
    assert "2 prompts, 1 of which" in encode(prompts[1], negative_prompt="blurred")


def test_only_the_first_rank_talks_and_any_rank_is_enough(encode, prompts, monkeypatch, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert encode(*prompts) == ""
    monkeypatch.setenv("RANK", "0")
    assert "4 prompts, 0 of which were missing" in encode(*prompts)


def test_the_default_is_what_post_train_would_use(tiny_folder):
    def texts(files):
        return [prompt.text for prompt in script.prompts_to_encode(files, tiny_folder)]

    bundled = [str(BUNDLED_PROMPTS / f"{part}_long.csv") for part in ("train", "valid")]
    assert texts(None) == texts(bundled)


def test_the_text_encoders_are_enough(encode, prompts, tiny_folder, tmp_path):
    """Prompts can be encoded while the transformer is still downloading."""
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    for part in ("transformer", "vae"):
        shutil.rmtree(folder / part)
    (folder / "sampling.json").unlink()
    assert "3 prompts, 3 of which were missing" in encode(prompts[0], model_root=folder)
    assert "3 prompts, 0 of which were missing" in encode(prompts[0])  # the same encoders
    shutil.rmtree(folder / "text_encoder_2")
    status, error = encode(prompts[0], model_root=folder)
    assert status == 2
    assert "lacks" in error
    assert "text_encoder_2/config.json" in error
    assert error.count("\n") == 1


def test_a_missing_file_is_one_sentence(encode, tmp_path):
    missing = tmp_path / "nowhere.txt"
    status, error = encode(missing)
    assert status == 2
    assert error == f"encode_prompts.py: prompt file {missing} does not exist\n"


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_post_train_then_loads_no_encoder(encode, prompts, loads, tiny_folder, tmp_path):
    """Slow: trains from the encoded prompts; their tensors are compared in `make test`."""
    encode(*prompts)
    loads.clear()
    flags = {
        "pretrained_model_root": tiny_folder,
        "output_dir": tmp_path / "run",
        "prompt_cache": tmp_path / "cache",
        "validation_prompts": prompts[1],
        "reward_model": "shapes",
        "batch_size": 2,
        "num_generations": 2,
        "num_sampling_steps": 2,
        "num_frames": 5,
        "height": 16,
        "width": 16,
        "guidance_scale": 2,
        "max_steps": 1,
        "report_to": "none",
        "dtype": "fp32",
        "validation_num_inference_steps": 2,
        "validate_video_length": 5,
        "validation_fixed_size": "16x16",
    }
    assert post_train.main([*flag_list(flags), "--train_prompts", *map(str, prompts)]) == 0
    assert not loads
    assert len(list((tmp_path / "cache").glob("*/*"))) == 4
