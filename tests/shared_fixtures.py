"""Models shared by the tests, with real classes and random weights, and the smallest run of each.

`tests/conftest.py` makes this module a plugin of the processes that run tests.
"""

import fcntl
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers import (
    HunyuanVideo15ImageToVideoPipeline,
    HunyuanVideo15Pipeline,
    WanImageToVideoPipeline,
)
from diffusers.pipelines.wan import pipeline_wan, pipeline_wan_i2v
from matplotlib.figure import Figure
from PIL import Image
from transformers import SiglipImageProcessorPil, SiglipVisionConfig, SiglipVisionModel

from research.benchmarks.random_wan import TINY_SAMPLING, build_tiny_wan
from research.tiny.tiny import TinyConfig, build_tiny
from sage_grpo.config.parse import from_values
from sage_grpo.files.torch_files import convert
from sage_grpo.models.backbone import Sampling
from sage_grpo.models.registry import BACKBONES
from sage_grpo.parallel.ranks import Ranks
from sage_grpo.train.build import build_trainer
from sage_grpo.worlds.shapes import world as shapes
from tests.dist import fork_server
from tests.models.hunyuan15.tencent_folder import write_tencent_folder
from tests.narrow_glyphs import GLYPH_DIM
from tests.smallest_run import PIPELINE, QUICK, TRIVIAL, smallest_run, write_trivial_model

FIXTURES = Path(__file__).parent / "fixtures"
DEVICE = torch.device(os.environ.get("TEST_DEVICE", "cpu"))  # of trainers; cuda where there is one
WORDS = ("a", "the", "red", "green", "circle", "square", "moving", "left", "right", "letter")
SAMPLING = Sampling(frames=9, height=32, width=32, fps=8, shift=5.0, guidance=6.0, num_steps=20)


def pytest_sessionstart():
    fork_server()


@pytest.fixture(autouse=True)
def same_kernels():
    """On a processor without bf16, the first bf16 product makes torch turn oneDNN off for the rest of the process.

    Later fp32 runs in that process would use other kernels than a process of their own, and differ in the last bits.
    """
    before = torch.backends.mkldnn.enabled
    yield
    torch.backends.mkldnn.set_flags(before)


@pytest.fixture(autouse=True)
def quick_limits(monkeypatch):
    """What the VAE alone costs is measured on few clips: otherwise it takes every run on shapes a second or more."""
    monkeypatch.setattr(shapes, "FLOOR_CLIPS", 2)


@pytest.fixture(scope="session")
def made_once(request, tmp_path_factory):
    """made_once(NAME, make) -> a folder that `make(folder)` fills once for all processes of xdist. Only read it."""
    root = tmp_path_factory.getbasetemp()
    if hasattr(request.config, "workerinput"):
        root = root.parent  # of all processes

    def folder_of(name, make):
        folder = root / name
        complete = root / f"{name}.complete"
        with (root / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not complete.exists():
                shutil.rmtree(folder, ignore_errors=True)  # of a call that failed
                folder.mkdir()
                make(folder)
                complete.touch()
        return folder

    return folder_of


@pytest.fixture(scope="session")
def tiny_folder(made_once):
    """A tiny HunyuanVideo-1.5, which needs `narrow_glyphs` to load. Read-only: copy it before changing a file."""
    return made_once("tiny", lambda folder: write_tiny(folder, GLYPH_DIM))


@pytest.fixture(scope="session")
def program_folder(made_once):
    """`tiny_folder` in diffusers' own width, for programs that do not import the tests. Read-only."""
    return made_once("tiny_of_programs", lambda folder: write_tiny(folder, TinyConfig.glyph_dim))


def write_tiny(folder, glyph_dim):
    config = TinyConfig(rope=(4, 6, 6), layers=2, latent_channels=8, glyph_dim=glyph_dim)
    pipe = build_tiny(0, WORDS, config)
    pipe.vae.register_to_config(
        scaling_factor=0.4
    )  # far from 1, so that a missing or doubled scaling shows
    with torch.no_grad():
        for parameter in (
            pipe.transformer.parameters()
        ):  # no norm weight stays at 1, where a swap would not show
            parameter.add_(
                0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
            )
    pipe.save_pretrained(folder)
    SAMPLING.to_json(folder / "sampling.json")


@pytest.fixture(scope="session")
def tencent_folder(tiny_folder, made_once):
    """`tiny_folder` in Tencent's layout. Read-only: copy it before changing a file."""
    return made_once("ckpts", lambda folder: write_tencent_folder(tiny_folder, folder))


@pytest.fixture(scope="session")
def i2v_folder(tiny_folder, made_once):
    """`tiny_folder` as an image-to-video model that sees 9 tokens of an image. Read-only: copy it to change a file."""
    return made_once("i2v", lambda folder: write_i2v(folder, tiny_folder))


def write_i2v(folder, tiny_folder):
    parts = HunyuanVideo15Pipeline.from_pretrained(tiny_folder).components
    config = SiglipVisionConfig(hidden_size=16, num_attention_heads=2, image_size=42, patch_size=14)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        vision = SiglipVisionModel(
            SiglipVisionConfig(**config.to_dict() | {"num_hidden_layers": 2})
        ).eval()
    processor = SiglipImageProcessorPil(size={"height": 42, "width": 42})
    HunyuanVideo15ImageToVideoPipeline(
        **parts, image_encoder=vision, feature_extractor=processor
    ).save_pretrained(folder)
    SAMPLING.to_json(folder / "sampling.json")


@pytest.fixture(scope="session")
def tencent_i2v_folder(i2v_folder, made_once):
    """`i2v_folder` in Tencent's layout. Read-only: copy it before changing a file."""
    return made_once(
        "ckpts_i2v", lambda folder: write_tencent_folder(i2v_folder, folder, "480p_i2v")
    )


@pytest.fixture(scope="session")
def pictures(tmp_path_factory):
    """Paths of three images of different shapes, none of them that of a clip."""
    folder = tmp_path_factory.mktemp("pictures")
    for number, size in enumerate([(40, 30), (24, 48), (33, 33)]):
        pixels = torch.randint(
            0, 256, (6, 6, 3), generator=torch.Generator().manual_seed(number), dtype=torch.uint8
        )
        Image.fromarray(pixels.numpy()).resize(size, Image.Resampling.BICUBIC).save(
            folder / f"{number}.png"
        )
    return sorted(folder.iterdir())


def wan_writer(sampling, *version):
    """What writes a tiny Wan, by default 2.1, into a folder."""

    def write(folder):
        build_tiny_wan(0, WORDS, *version).save_pretrained(folder)
        sampling.to_json(folder / "sampling.json")

    return write


@pytest.fixture(scope="session")
def wan_folder(made_once):
    """A tiny Wan 2.1. Read-only: copy it before changing a file."""
    return made_once("wan", wan_writer(TINY_SAMPLING))


@pytest.fixture
def stock_image_to_video(monkeypatch):
    """The stock pipeline that animates images; by itself it needs ftfy, which only cleans prompts."""
    monkeypatch.setattr(pipeline_wan_i2v, "prompt_clean", pipeline_wan.prompt_clean)
    return WanImageToVideoPipeline


@pytest.fixture(scope="session")
def ti2v_folder(made_once):
    """A tiny Wan 2.2 TI2V. Read-only: copy it before changing a file."""
    return made_once("ti2v", wan_writer(TINY_SAMPLING, "wan22-ti2v-5b"))


@pytest.fixture(scope="session")
def a14b_folder(made_once):
    """A tiny Wan 2.2 A14B text to video. Read-only: copy it before changing a file."""
    sampling = replace(TINY_SAMPLING, guidance=4.0, guidance_2=3.0)
    return made_once("a14b", wan_writer(sampling, "wan22-t2v-a14b"))


@pytest.fixture(scope="session")
def animating_folder(made_once):
    """A tiny Wan 2.2 A14B image to video. Read-only: copy it before changing a file."""
    sampling = replace(TINY_SAMPLING, guidance=3.5, guidance_2=2.5)
    return made_once("animating", wan_writer(sampling, "wan22-i2v-a14b"))


@pytest.fixture
def stock(tiny_folder):
    """The stock pipeline in fp64, its padding shortened: it is masked anyway and only costs time."""
    pipe = HunyuanVideo15Pipeline.from_pretrained(tiny_folder, dtype=torch.float64)
    pipe.tokenizer_max_length, pipe.tokenizer_2_max_length, pipe.vision_num_semantic_tokens = (
        24,
        24,
        5,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="session")
def videoalign_folders(tmp_path_factory):
    """Two tiny VideoAlign folders, weights converted, by name. Read-only: copy one before changing a file."""
    target = tmp_path_factory.mktemp("videoalign")
    folders = {name: target / name for name in ("VideoReward", "VideoReward_split")}
    for name, folder in folders.items():
        shutil.copytree(FIXTURES / "videoalign" / name, folder)
        for source in folder.glob("checkpoint-*/*.pth"):
            convert(source)
            source.unlink()
    return folders


@pytest.fixture(scope="session")
def trivial_folder(tmp_path_factory):
    """The trivial model. Read-only: copy it before changing a file."""
    return write_trivial_model(tmp_path_factory.mktemp("trivial") / "model")


@pytest.fixture
def model():
    """Which model `flags` and `make` train: "trivial", or "tiny" for the classes of HunyuanVideo-1.5.

    Tests choose another one by parametrizing (`on_tiny`, `on_both`), a file by a fixture of this name.
    """
    return "trivial"


@pytest.fixture
def quick(monkeypatch):
    """The trivial model is known, and runs have neither drawings nor pauses."""
    monkeypatch.setitem(BACKBONES, PIPELINE, TRIVIAL)
    for owner, name, value in QUICK:
        monkeypatch.setattr(owner, name, value)


@pytest.fixture
def flags(quick, model, request, tmp_path):
    """Flags of the smallest run of `model`."""
    return smallest_run(request.getfixturevalue(f"{model}_folder"), tmp_path)


@pytest.fixture
def undrawn(monkeypatch):
    """Figures of reports are composed, but not drawn, which takes most of the time of a page."""
    monkeypatch.setattr(Figure, "savefig", lambda figure, file, format: file.write("<svg></svg>"))


@pytest.fixture
def make(flags):
    """make(flag=value, ...) -> a Trainer on one rank."""

    def build(**changes):
        return build_trainer(from_values(flags | changes), Ranks(0, 1, DEVICE))

    return build
