"""Tencent's layout: every tensor has its place in both directions, and the loaded model is the same one."""

import json
import shutil

import pytest
import torch
from diffusers import AutoencoderKLHunyuanVideo15, HunyuanVideo15Transformer3DModel
from safetensors.torch import load_file, save_file
from transformers import Qwen2_5_VLTextModel

from sage_grpo.data.images import read_image
from sage_grpo.data.requests import Request
from sage_grpo.models.backbone import Guidance
from sage_grpo.models.hunyuan15.backbone import Hunyuan15
from sage_grpo.models.hunyuan15.folder import ModelFolder
from sage_grpo.models.hunyuan15.image import ImageFolder
from sage_grpo.models.hunyuan15.tencent import diffusers_config, read_version, to_diffusers
from sage_grpo.models.hunyuan15.text import glyph_tokens, load_tokenizers, qwen_text_model
from sage_grpo.models.registry import open_backbone
from sage_grpo.models.weights import STEM, open_folder
from scripts.export_checkpoint import save_tencent, tencent_transformer_config, to_tencent

REQUESTS = [
    Request('a green letter "B" moving right'),
    Request("a red circle moving left"),
    Request(""),
]
SINGLE = f"{STEM}.safetensors"
CPU = torch.device("cpu")
KINDS = {"transformer": HunyuanVideo15Transformer3DModel, "vae": AutoencoderKLHunyuanVideo15}


def full_size(kind, **settings):
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in kind(**settings).state_dict().items()}


def put_together(recipes, stored):
    """Apply recipes to tensors that are lists of rows."""

    def block(rows):
        size = len(stored[rows.source]) // rows.num_blocks
        return stored[rows.source][rows.block * size : (rows.block + 1) * size]

    return {
        name: [row for rows in recipe for row in block(rows)] for name, recipe in recipes.items()
    }


def linear(*modules):
    return {f"{module}.{leaf}" for module in modules for leaf in ("weight", "bias")}


def published_transformer_names(meanflow=False):
    """The modules of Tencent's transformer, written down apart from the table."""
    names = linear(
        "img_in.proj",
        "final_layer.linear",
        "final_layer.adaLN_modulation.1",
        "txt_in.input_embedder",
    )
    names |= linear("byt5_in.layernorm", *(f"byt5_in.fc{i}" for i in (1, 2, 3)))
    names |= linear(*(f"vision_in.proj.{i}" for i in (0, 1, 3, 4))) | {"cond_type_embedding.weight"}
    for time in ("time_in", "txt_in.t_embedder", *(["time_r_in"] if meanflow else [])):
        names |= linear(f"{time}.mlp.0", f"{time}.mlp.2")
    names |= linear("txt_in.c_embedder.linear_1", "txt_in.c_embedder.linear_2")
    for i in range(2):
        modules = (
            "norm1",
            "norm2",
            "self_attn_qkv",
            "self_attn_proj",
            "mlp.fc1",
            "mlp.fc2",
            "adaLN_modulation.1",
        )
        names |= linear(
            *(f"txt_in.individual_token_refiner.blocks.{i}.{module}" for module in modules)
        )
    for i in range(54):
        for stream in ("img", "txt"):
            modules = (
                "mod.linear",
                "attn_q",
                "attn_k",
                "attn_v",
                "attn_proj",
                "mlp.fc1",
                "mlp.fc2",
            )
            names |= linear(*(f"double_blocks.{i}.{stream}_{module}" for module in modules))
            names |= {f"double_blocks.{i}.{stream}_attn_{x}_norm.weight" for x in "qk"}
    return names


def published_vae_names():
    """Five levels; the encoder has two blocks in each, the decoder three; all but the last change the size."""

    def block(module):
        convs = linear(f"{module}.conv1.conv", f"{module}.conv2.conv")
        return convs | {f"{module}.norm1.gamma", f"{module}.norm2.gamma"}

    names = set()
    for half, way, resize, blocks in (
        ("encoder", "down", "downsample", 2),
        ("decoder", "up", "upsample", 3),
    ):
        names |= linear(f"{half}.conv_in.conv", f"{half}.conv_out.conv")
        names.add(f"{half}.norm_out.gamma")
        names |= block(f"{half}.mid.block_1")
        names |= block(f"{half}.mid.block_2")
        names.add(f"{half}.mid.attn_1.norm.gamma")
        names |= linear(*(f"{half}.mid.attn_1.{x}" for x in ("q", "k", "v", "proj_out")))
        for level in range(5):
            for number in range(blocks):
                names |= block(f"{half}.{way}.{level}.block.{number}")
            if level < 4:
                names |= linear(f"{half}.{way}.{level}.{resize}.conv.conv")
    return names


@pytest.mark.parametrize(
    ("part", "settings", "published", "count"),
    [
        ("transformer", {}, published_transformer_names(), 1793),
        ("transformer", {"use_meanflow": True}, published_transformer_names(meanflow=True), 1797),
        ("vae", {}, published_vae_names(), 218),
    ],
)
def test_the_tables_cover_the_full_size_model_one_to_one(part, settings, published, count):
    shapes = full_size(KINDS[part], **settings)
    tencent = to_tencent(part, shapes)
    diffusers = to_diffusers(part, published)
    assert set(tencent) == published and len(published) == count
    assert set(diffusers) == set(shapes)
    for forth, back in ((diffusers, tencent), (tencent, diffusers)):
        stored = {name: [(name, row) for row in range(6)] for name in back}
        assert put_together(back, put_together(forth, stored)) == stored


def test_stacked_and_swapped_tensors_by_value(tiny_folder, tmp_path):
    stored = load_file(tiny_folder / "transformer" / SINGLE)
    save_tencent(tmp_path, "transformer", ModelFolder(tiny_folder).weights("transformer"))
    exported = load_file(tmp_path / SINGLE)
    for leaf in ("weight", "bias"):
        for i in range(2):
            refiner = f"context_embedder.token_refiner.refiner_blocks.{i}.attn"
            q, k, v = (stored[f"{refiner}.to_{x}.{leaf}"] for x in "qkv")
            qkv = exported[f"txt_in.individual_token_refiner.blocks.{i}.self_attn_qkv.{leaf}"]
            assert torch.equal(qkv, torch.cat([q, k, v]))

        scale, shift = stored[f"norm_out.linear.{leaf}"].chunk(2)
        assert not torch.equal(scale, shift)
        modulation = exported[f"final_layer.adaLN_modulation.1.{leaf}"]
        assert torch.equal(modulation, torch.cat([shift, scale]))

        plain = exported[f"double_blocks.1.txt_mlp.fc1.{leaf}"]
        assert torch.equal(plain, stored[f"transformer_blocks.1.ff_context.net.0.proj.{leaf}"])


@pytest.mark.parametrize("part", ["transformer", "vae"])
def test_both_layouts_hold_the_same_numbers_in_every_range_of_rows(
    tiny_folder, tencent_folder, part
):
    diffusers = ModelFolder(tiny_folder).weights(part)
    tencent = ModelFolder(tencent_folder).weights(part)
    assert sorted(diffusers.names) == sorted(tencent.names)
    for name in diffusers.names:
        whole = diffusers.read(name)
        rows = len(whole)
        assert tencent.shape(name) == diffusers.shape(name)
        assert torch.equal(tencent.read(name), whole)
        middle = max(rows // 2 - 1, 0)
        for start, stop in ((0, 1), (middle, rows // 2 + 1), (rows // 3, rows), (rows, rows)):
            assert torch.equal(tencent.read(name, start, stop), whole[start:stop])


def test_there_and_back_gives_the_same_file(tiny_folder, tencent_folder, tmp_path):
    """A checkpoint in the layout of diffusers becomes the very tensors of a Tencent folder, in shards too."""
    weights = ModelFolder(tiny_folder).weights("transformer")
    save_tencent(tmp_path, "transformer", weights, max_shard_bytes=1e6)
    again = open_folder(tmp_path)
    first = load_file(tencent_folder / "transformer" / "480p_t2v" / SINGLE)
    assert sorted(again.names) == sorted(first)
    assert all(torch.equal(again.read(name), tensor) for name, tensor in first.items())


def assert_equal_conditions(conditions, expected):
    for cond, expected_cond in zip(conditions, expected, strict=True):
        assert vars(cond).keys() == vars(expected_cond).keys()
        for name, value in vars(cond).items():
            assert torch.equal(value, getattr(expected_cond, name))


def test_the_same_model_comes_from_both_layouts_bit_for_bit(tiny_folder, tencent_folder):
    diffusers = Hunyuan15(tiny_folder)
    tencent = Hunyuan15(tencent_folder)
    conditions = diffusers.encode(REQUESTS)
    assert len(conditions[0].glyph) > 0
    assert_equal_conditions(tencent.encode(REQUESTS), conditions)

    cond, _, negative = conditions
    guidance = Guidance(6.0, negative)
    shape = diffusers.latent_shape(9, 32, 32)
    noise = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        velocity = diffusers.velocity(noise, 0.7, cond, guidance)
        assert torch.equal(tencent.velocity(noise, 0.7, cond, guidance), velocity)

    clips = diffusers.decode(noise)
    assert torch.equal(tencent.decode(noise), clips) and clips.float().std() > 5
    assert torch.equal(tencent.encode_video(clips), diffusers.encode_video(clips))
    assert tencent.sampling == diffusers.sampling


def test_image_to_video_is_the_same_from_both_layouts_bit_for_bit(
    i2v_folder, tencent_i2v_folder, pictures
):
    """The names of the transformer are those of text to video; the vision model has a folder of its own."""
    diffusers = open_backbone(i2v_folder)
    tencent = open_backbone(tencent_i2v_folder, version="480p_i2v")
    image = read_image(pictures[0], "here")
    requests = [Request("a red circle moving left", image=image).sized(16, 24), Request("")]
    conditions = diffusers.encode(requests)
    assert_equal_conditions(tencent.encode(requests), conditions)

    cond, negative = conditions
    guidance = Guidance(6.0, negative)
    shape = diffusers.latent_shape(5, 16, 24)
    x = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        velocity = diffusers.velocity(x, 0.7, cond, guidance)
        assert torch.equal(tencent.velocity(x, 0.7, cond, guidance), velocity)
    config = ImageFolder(tencent_i2v_folder, "480p_i2v").config("transformer")
    assert (config["target_size"], config["task_type"]) == (640, "i2v")


@pytest.mark.parametrize("part, differing, absent", [
    ("transformer", {"target_size": 640}, {"num_refiner_layers", "qk_norm"}),
    ("vae", {}, set()),
])  # fmt: skip
def test_settings_of_both_layouts_agree(tiny_folder, tencent_folder, part, differing, absent):
    diffusers = ModelFolder(tiny_folder).config(part)
    tencent = ModelFolder(tencent_folder).config(part)
    assert {name: v for name, v in tencent.items() if diffusers[name] != v} == differing
    public = {name for name in diffusers if not name.startswith("_")}
    assert public - tencent.keys() == absent


def test_the_published_settings_are_the_defaults_of_diffusers():
    config = {
        "patch_size": [1, 1, 1],
        "in_channels": 32,
        "concat_condition": True,
        "out_channels": 32,
        "hidden_size": 2048,
        "heads_num": 16,
        "mlp_width_ratio": 4.0,
        "mm_double_blocks_depth": 54,
        "rope_dim_list": [16, 56, 56],
        "text_states_dim": 3584,
        "text_states_dim_2": None,
        "vision_states_dim": 1152,
        "rope_theta": 256,
        "use_meanflow": False,
    }
    stock = HunyuanVideo15Transformer3DModel
    settings = diffusers_config("transformer", config, "480p_t2v")
    assert full_size(stock, **settings) == full_size(stock)
    with torch.device("meta"):
        written = tencent_transformer_config(dict(stock().config))
    assert {name: written.get(name) for name in config} == config | {"rope_dim_list": (16, 56, 56)}
    vae = {
        "latent_channels": 32,
        "block_out_channels": [128, 256, 512, 1024, 1024],
        "layers_per_block": 2,
        "in_channels": 3,
        "out_channels": 3,
        "ffactor_spatial": 16,
        "ffactor_temporal": 4,
        "shift_factor": None,
    }
    settings = diffusers_config("vae", vae, "480p_t2v")
    stock = AutoencoderKLHunyuanVideo15
    assert full_size(stock, **settings) == full_size(stock)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("480p_t2v", (640, "t2v", False)),
        ("720p_i2v", (960, "i2v", False)),
        ("480p_i2v_distilled", (640, "i2v", True)),
        ("720p_t2v_cfg_distilled", (960, "t2v", True)),
        ("480p_i2v_step_distilled", (640, "i2v", True)),
    ],
)
def test_versions_tell_size_task_and_distillation(name, expected):
    assert read_version(name) == expected


@pytest.mark.parametrize(
    "name", ["720p_t2v_distilled_sparse", "1080p_sr_distilled", "480p_v2v", "480p", ""]
)
def test_versions_that_this_code_cannot_sample_are_refused(name):
    with pytest.raises(
        ValueError, match=r"^pretrained_transformer_version is .*; it must be 480p_t2v, .*\.$"
    ):
        read_version(name)


def test_a_missing_or_foreign_tensor_of_tencents_is_named(tencent_folder, tmp_path):
    folder = shutil.copytree(tencent_folder, tmp_path / "ckpts")
    path = folder / "transformer" / "480p_t2v" / SINGLE
    tensors = load_file(path)
    del tensors["txt_in.individual_token_refiner.blocks.0.self_attn_qkv.bias"]
    save_file(tensors | {"single_blocks.0.linear1.weight": torch.zeros(2)}, path)
    backbone = Hunyuan15(folder)
    with pytest.raises(ValueError) as error:
        backbone.transformer  # noqa: B018
    refiner = "context_embedder.token_refiner.refiner_blocks.0.attn"
    missing = f"{refiner}.to_q.bias, {refiner}.to_k.bias, {refiner}.to_v.bias"
    assert f"3 missing ({missing})" in str(error.value)
    assert "1 unexpected (single_blocks.0.linear1.weight)." in str(error.value)


def test_glyph_tokens_follow_those_of_byt5(tencent_folder):
    tokens = ["<color-0>", "<color-1>", "<color-2>", "<en-font-0>", "<cn-font-0>", "<en-font-1>"]
    assert glyph_tokens(tencent_folder / "text_encoder" / "Glyph-SDXL-v2") == tokens
    _, tokenizer = load_tokenizers(ModelFolder(tencent_folder))
    assert tokenizer.convert_tokens_to_ids(tokens) == list(range(384, 390))


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", ""])
def test_the_language_model_is_taken_out_of_a_whole_qwen(tiny_folder, tmp_path, prefix):
    """Whatever its names are: those of the published files, of newer ones, or of the language model alone."""
    source = tiny_folder / "text_encoder"
    tensors = load_file(source / "model.safetensors")
    stored = {f"{prefix}{name}": tensor for name, tensor in tensors.items()}
    if prefix:
        stored["model.visual.merger.weight"] = torch.zeros(2)
    save_file(stored, tmp_path / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    if prefix == "model.language_model.":
        config = {"model_type": "qwen2_5_vl", "text_config": config}
    (tmp_path / "config.json").write_text(json.dumps(config))
    ids = torch.tensor([[5, 3, 8, 1]])
    stock = Qwen2_5_VLTextModel.from_pretrained(source)
    model = qwen_text_model(tmp_path, CPU, torch.float32)
    with torch.no_grad():
        assert torch.equal(model(ids).last_hidden_state, stock(ids).last_hidden_state)
