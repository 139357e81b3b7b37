"""generate.py as a user runs it, on a tiny model with random weights."""

import json
import shutil

import imageio.v2 as imageio
import numpy as np
import pytest
import torch
from diffusers import HunyuanVideo15Transformer3DModel
from peft import LoraConfig
from safetensors.torch import load_file, save_file

import generate
from sage_grpo.data.requests import Request
from sage_grpo.models.hunyuan15.backbone import Hunyuan15
from sage_grpo.models.lora import LORA_FILE
from sage_grpo.models.registry import open_backbone
from tests.dist import run_ranks
from tests.smallest_run import slow

# imageio's reader leaves the pipes of its ffmpeg process to the garbage collector
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")

PROMPT = "a red circle moving left"
FAST = ("--num_inference_steps", "2", "--num_frames", "5", "--fixed_size", "16x24")


@pytest.fixture(scope="module")
def folder(tiny_folder, tmp_path_factory):
    """A model folder that says it knows the shapes world."""
    copy = tmp_path_factory.mktemp("model") / "tiny"
    shutil.copytree(tiny_folder, copy)
    (copy / "world.json").write_text('{"world": "shapes"}')
    return copy


def run(folder, output, *arguments):
    generate.main(["--model_path", str(folder), "--output_path", str(output), *FAST, *arguments])
    return written(output)


def written(output):
    """The clips in a folder and their records."""
    records = [json.loads(path.read_text()) for path in sorted(output.glob("*.json"))]
    return sorted(output.glob("*.mp4")), records


def frames(path):
    with imageio.get_reader(path) as reader:
        return np.stack(list(reader.iter_data()))


def refused(capsys, folder, output, *arguments):
    with pytest.raises(SystemExit) as stop:
        run(folder, output, *arguments)
    assert stop.value.code == 2
    return capsys.readouterr().err


def test_one_prompt_gives_a_playable_clip_and_its_record(folder, tmp_path):
    (clip,), (record,) = run(
        folder, tmp_path, "--prompt", PROMPT, "--score", "shapes", "--seed", "5"
    )
    assert len(frames(clip)) == 5
    assert (tmp_path / "sheet.png").is_file()
    assert (record["prompt"], record["seed"], record["num_steps"]) == (PROMPT, 5, 2)
    assert (record["frames"], record["height"], record["width"]) == (5, 16, 24)
    assert set(record["scores"]) == {"VQ", "MQ", "TA"}


def test_the_layout_of_the_folder_makes_no_difference(tiny_folder, tencent_folder, tmp_path):
    words = ("--prompt", PROMPT, "--pretrained_transformer_version", "480p_t2v")
    (ours,), _ = run(tiny_folder, tmp_path / "a", "--prompt", PROMPT)
    (theirs,), _ = run(tencent_folder, tmp_path / "b", *words)
    assert np.array_equal(frames(ours), frames(theirs))


def test_another_version_has_to_be_there(tencent_folder, tmp_path, capsys):
    arguments = ("--prompt", PROMPT, "--pretrained_transformer_version", "720p_t2v")
    assert "has no 720p_t2v; choose" in refused(
        capsys, tencent_folder, tmp_path / "out", *arguments
    )


def test_a_seed_gives_the_same_clip_whatever_the_batch(folder, tmp_path):
    """Alone, as one of several clips, and as a row of a file with another prompt before it."""
    prompts = tmp_path / "p.csv"
    prompts.write_text(f"prompt,seed\na green square moving up,1\n{PROMPT},5\n")
    (alone,), _ = run(folder, tmp_path / "a", "--prompt", PROMPT, "--seed", "5")
    several, _ = run(folder, tmp_path / "b", "--prompt", PROMPT, "--seed", "5", "--num_videos", "3")
    rows, _ = run(folder, tmp_path / "c", "--valid_video_csv", str(prompts))
    assert len(several) == 3
    assert len(rows) == 2
    assert np.array_equal(frames(alone), frames(several[0]))
    assert np.array_equal(frames(alone), frames(rows[1]))
    assert not np.array_equal(frames(several[0]), frames(several[1]))


def test_exploration_noise_changes_the_clip(folder, tmp_path):
    (ode,), _ = run(folder, tmp_path / "a", "--prompt", PROMPT)
    (sde,), (record,) = run(
        folder, tmp_path / "b", "--prompt", PROMPT, "--sde_type", "sage_grpo", "--eta", "1.0"
    )
    assert record["sde_type"] == "sage_grpo"
    assert not np.array_equal(frames(ode), frames(sde))


def test_the_second_order_solver_gives_another_clip_and_is_recorded(folder, tmp_path, capsys):
    words = ("--prompt", PROMPT, "--num_inference_steps", "5")
    (euler,), (euler_record,) = run(folder, tmp_path / "euler", *words)
    (dpm,), (dpm_record,) = run(folder, tmp_path / "dpm", *words, "--solver", "dpm")
    assert (euler_record["solver"], dpm_record["solver"]) == ("euler", "dpm")
    assert (frames(euler) != frames(dpm)).any()
    error = refused(
        capsys, folder, tmp_path / "none", *words, "--solver", "dpm", "--sde_type", "cps"
    )
    assert "--solver dpm solves the ODE, and --sde_type cps adds noise" in error


def sample(ranks, *arguments):
    args = generate.parse_arguments(list(arguments))
    generate.generate(args, generate.read_prompts(args), ranks)


@pytest.mark.parametrize("world, sp_size", [(2, 1), slow(4, 2)])
def test_ranks_share_prompts_and_clips(folder, tmp_path, world, sp_size):
    """Slow: four ranks, two of which share a sequence."""
    arguments = ("--model_path", str(folder), *FAST, "--prompt", PROMPT, "--num_videos", "3")
    run_ranks(world, sample, *arguments, "--output_path", str(tmp_path / "many"), sp_size=sp_size)
    one, _ = run(folder, tmp_path / "one", "--prompt", PROMPT, "--num_videos", "3")
    many = sorted((tmp_path / "many").glob("*.mp4"))
    assert len(one) == 3
    assert [path.name for path in many] == [path.name for path in one]
    for shared, alone in zip(many, one, strict=True):
        # with a split sequence a pixel may round the other way; the codec adds to it
        assert np.abs(frames(shared).astype(int) - frames(alone)).max() <= 4


def test_checkpoints_full_and_lora_change_the_clip(folder, tmp_path):
    base = run(folder, tmp_path / "base", "--prompt", PROMPT)[0]
    model = HunyuanVideo15Transformer3DModel.from_pretrained(folder / "transformer")
    torch.nn.init.normal_(
        model.proj_out.weight, std=0.3, generator=torch.Generator().manual_seed(0)
    )
    model.save_pretrained(tmp_path / "full" / "transformer")
    full = run(
        folder, tmp_path / "a", "--prompt", PROMPT, "--checkpoint_path", str(tmp_path / "full")
    )[0]

    model = HunyuanVideo15Transformer3DModel.from_pretrained(folder / "transformer")
    model.add_adapter(
        LoraConfig(
            r=2, target_modules=r"transformer_blocks\.\d+\.attn\.to_q", init_lora_weights=False
        )
    )
    model.save_lora_adapter(tmp_path / "lora", weight_name=LORA_FILE)
    lora = run(
        folder, tmp_path / "b", "--prompt", PROMPT, "--checkpoint_path", str(tmp_path / "lora")
    )[0]
    clips = [frames(paths[0]) for paths in (base, full, lora)]
    assert not np.array_equal(clips[0], clips[1])
    assert not np.array_equal(clips[0], clips[2])


def test_clips_of_other_weights_are_not_replaced_in_silence(
    trivial_folder, quick, tmp_path, capsys
):
    other = shutil.copytree(trivial_folder, tmp_path / "other")
    checkpoint = ("--checkpoint_path", str(other))
    output = tmp_path / "out"
    (clip,), _ = run(trivial_folder, output, "--prompt", PROMPT)
    before = clip.read_bytes()

    assert "--overwrite" in refused(capsys, trivial_folder, output, "--prompt", PROMPT, *checkpoint)
    assert "--overwrite" in refused(capsys, other, output, "--prompt", PROMPT)
    assert clip.read_bytes() == before
    assert written(output)[1][0]["checkpoint_path"] is None

    run(trivial_folder, output, "--prompt", PROMPT)  # the same again
    run(trivial_folder, output, "--prompt", PROMPT, "--seed", "7", *checkpoint)  # another clip
    assert clip.read_bytes() == before
    run(trivial_folder, output, "--prompt", PROMPT, "--overwrite", *checkpoint)
    assert json.loads(clip.with_suffix(".json").read_text())["checkpoint_path"] == str(other)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--prompt", PROMPT, "--guidance_scale_2", "3"),
            "guidance_scale_2 is 3.0, but the model has one transformer for all noise levels: leave it out",
        ),
        (("--prompt", "a purple circle moving left"), "unknown word 'purple'"),
        (("--prompt", PROMPT, "--num_frames", "6"), "num_frames 6 is not 4n + 1; the nearest is 5"),
        (("--prompt", PROMPT, "--fixed_size", "18x24"), "height 18 is not a multiple of 4"),
        (("--prompt", PROMPT, "--fixed_size", "wide"), "'wide' is not HEIGHTxWIDTH"),
        (("--prompt", PROMPT, "--aspect_ratio", "16/9"), "'16/9' is not WIDTH:HEIGHT"),
        (("--prompt", PROMPT, "--sde_type", "cps", "--eta", "2"), "eta is 2.0 with sde_type cps"),
        (
            ("--prompt", PROMPT, "--checkpoint_path", "nowhere"),
            "checkpoint_path nowhere does not exist",
        ),
        (
            ("--prompt", PROMPT, "--checkpoint_path", "tests/fixtures/sde/index.json"),
            "has neither transformer/",
        ),
        (("--prompt", PROMPT, "--score", "beauty"), "'beauty' is not one of videoalign"),
        (("--prompt", PROMPT, "--score", "judge"), "'judge' is not one of videoalign"),
        (("--prompt", PROMPT, "--guidance_scale", "nan"), "'nan' is not a finite number"),
        (("--prompt", PROMPT, "--eta", "1e308"), "'1e308' is not a finite number up to 1000000000"),
        (
            ("--prompt", PROMPT, "--num_inference_steps", "9" * 13),
            "is not a whole number from 1 to 999999",
        ),
        (("--prompt", PROMPT, "--num_frames", "9" * 400), "is not a whole number from 1 to 999999"),
        (
            ("--prompt", PROMPT, "--num_frames", "800001", "--fixed_size", "3200x3200"),
            "and no machine holds 16777216",
        ),
        (
            ("--prompt", PROMPT, "--seed", str(2**70)),
            "is not a whole number from 0 to 9223372036854775807",
        ),
        (("--prompt", PROMPT, "--fixed_size", "9999996x16"), "is not HEIGHTxWIDTH"),
        (
            ("--prompt", PROMPT, "--timestep_shift", "0"),
            "timestep_shift is 0.0; it must be positive",
        ),
        (("--valid_video_csv", "nowhere.csv"), "nowhere.csv does not exist"),
        ((), "one of the arguments --prompt --valid_video_csv"),
    ],
)
def test_bad_input_is_one_clear_sentence_and_writes_nothing(
    folder, tmp_path, capsys, arguments, message
):
    assert message in refused(capsys, folder, tmp_path / "out", *arguments)
    assert not (tmp_path / "out").exists()


def test_a_run_folder_means_its_newest_checkpoint_and_hyphens_are_fine(folder, tmp_path, capsys):
    model = HunyuanVideo15Transformer3DModel.from_pretrained(folder / "transformer")
    run_folder = tmp_path / "run"
    (run_folder / "checkpoints").mkdir(parents=True)
    words = ("--prompt", PROMPT, "--checkpoint-path")
    assert "holds no checkpoint yet" in refused(capsys, folder, tmp_path, *words, str(run_folder))
    for step, std in (("step-000001", 0.1), ("step-000010", 0.3)):
        torch.nn.init.normal_(
            model.proj_out.weight, std=std, generator=torch.Generator().manual_seed(0)
        )
        model.save_pretrained(run_folder / "checkpoints" / step / "transformer")
    newest = run_folder / "checkpoints" / "step-000010"
    (of_run,), _ = run(folder, tmp_path / "of_run", *words, str(run_folder))
    (of_newest,), _ = run(folder, tmp_path / "of_newest", *words, str(newest))
    assert "wrote 1 clip and " in capsys.readouterr().out
    assert np.array_equal(frames(of_run), frames(of_newest))


def test_a_checkpoint_of_another_model_is_refused(folder, tmp_path, capsys):
    weights = load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors")
    weights["proj_out.bias"] = torch.zeros(3)
    save_file(weights, tmp_path / "other.safetensors")
    arguments = ("--prompt", PROMPT, "--checkpoint_path", str(tmp_path / "other.safetensors"))
    message = refused(capsys, folder, tmp_path / "out", *arguments)
    assert "1 of another shape (proj_out.bias (3,) instead of (8,))" in message


def test_a_score_that_is_not_a_number_is_an_error(tiny_folder, tmp_path, capsys):
    (tmp_path / "broken.py").write_text(
        "def broken(clips, prompts):\n    return [float('nan')] * len(clips)\n"
    )
    flags = ("--prompt", PROMPT, "--score", f"{tmp_path / 'broken.py'}:broken")
    assert "the reward gives broken nan for the prompt" in refused(
        capsys, tiny_folder, tmp_path / "out", *flags
    )


def test_prompts_that_cannot_be_scored_are_refused_before_sampling(tiny_folder, tmp_path, capsys):
    message = refused(
        capsys, tiny_folder, tmp_path / "out", "--prompt", "a cat", "--score", "shapes"
    )
    assert "unknown word 'cat'" in message
    assert not (tmp_path / "out").exists()


def test_broken_weights_give_no_clip(folder, tmp_path, capsys):
    weights = load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors")
    save_file(
        weights | {"proj_out.bias": weights["proj_out.bias"] * torch.nan},
        tmp_path / "nan.safetensors",
    )
    arguments = ("--prompt", PROMPT, "--checkpoint_path", str(tmp_path / "nan.safetensors"))
    assert "not finite" in refused(capsys, folder, tmp_path / "out", *arguments)
    assert not list((tmp_path / "out").glob("*.mp4"))


def test_a_missing_model_folder_is_named(tmp_path, capsys):
    message = refused(capsys, tmp_path / "no_model", tmp_path / "out", "--prompt", PROMPT)
    assert "no_model" in message
    assert "does not exist" in message


def test_the_defaults_are_those_of_the_model_and_are_printed(folder, tmp_path, capsys):
    generate.main(
        ["--model_path", str(folder), "--output_path", str(tmp_path / "out"), "--prompt", PROMPT]
    )
    record = json.loads(next((tmp_path / "out").glob("*.json")).read_text())
    assert (record["frames"], record["height"], record["width"]) == (9, 32, 32)
    assert record["num_steps"] == 20
    printed = capsys.readouterr().out
    assert "sampling: 9 frames of 32 x 32, 20 steps, shift 5, guidance 6\n" in printed


@pytest.mark.parametrize("version, size", [("480p_t2v", "480 x 848"), ("720p_t2v", "720 x 1280")])
def test_the_published_models_are_sampled_as_their_authors_do(tmp_path, version, size):
    """The folder stands for the published model: nothing but its configuration is needed."""
    backbone = open_backbone(tmp_path / "absent", version=version, complete=False)
    args = generate.parse_arguments(["--prompt", PROMPT])
    sampling = generate.sampling_for(args, backbone, Request(PROMPT))
    assert str(sampling).startswith(f"121 frames of {size}, 50 steps, shift ")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--resolution", "480p", "--aspect_ratio", "16:9"), (480, 852)),
        (("--resolution", "480p", "--aspect_ratio", "9:16"), (852, 480)),
        (("--aspect_ratio", "2:1"), (20, 44)),
        ((), (32, 32)),
    ],
)
def test_frame_sizes(tiny_folder, arguments, expected):
    args = generate.parse_arguments(["--prompt", PROMPT, *arguments])
    assert generate.frame_size(args, Hunyuan15(tiny_folder), Request(PROMPT)) == expected


@pytest.fixture
def image_file(pictures, tmp_path):
    path = tmp_path / "images.csv"
    copies = [shutil.copy(picture, tmp_path) for picture in pictures]
    path.write_text("\n".join(["prompt,image", *(f"{PROMPT},{picture}" for picture in copies), ""]))
    return path


def animate(folder, output, *arguments):
    """Without a size, which is then that of the image."""
    fast = ("--num_inference_steps", "2", "--num_frames", "5")
    generate.main(["--model_path", str(folder), "--output_path", str(output), *fast, *arguments])
    return written(output)


def test_images_are_animated_each_in_its_own_size(i2v_folder, pictures, image_file, tmp_path):
    _, records = animate(
        i2v_folder, tmp_path / "a", "--prompt_file", str(image_file), "--score", "first_frame"
    )
    sizes = [(record["height"], record["width"]) for record in records]
    assert [record["image"] for record in records] == [
        str(tmp_path / path.name) for path in pictures
    ]
    wide, tall, square = sizes
    assert wide[0] < wide[1]
    assert tall[0] > tall[1]
    assert square == (32, 32)
    assert all(0 < record["scores"]["first_frame"] < 1 for record in records)
    words = ("--prompt", PROMPT, "--image")
    (first,), _ = animate(i2v_folder, tmp_path / "b", *words, str(pictures[0]))
    (second,), _ = animate(i2v_folder, tmp_path / "c", *words, str(pictures[1]))
    assert np.array_equal(frames(first), frames(tmp_path / "a" / first.name))
    assert frames(first).shape != frames(second).shape


def test_a_given_size_is_that_of_the_clip(i2v_folder, pictures, tmp_path):
    _, (record,) = run(i2v_folder, tmp_path, "--prompt", PROMPT, "--image", str(pictures[1]))
    assert (record["height"], record["width"]) == (16, 24)


def test_images_and_models_must_fit(
    i2v_folder, tiny_folder, pictures, image_file, tmp_path, capsys
):
    out = tmp_path / "out"
    image = ("--image", str(pictures[0]))
    assert "animates images" in refused(capsys, i2v_folder, out, "--prompt", PROMPT)
    assert "is a text-to-video model" in refused(
        capsys, tiny_folder, out, "--prompt", PROMPT, *image
    )
    assert "--image belongs to --prompt" in refused(
        capsys, i2v_folder, out, "--prompt_file", str(image_file), *image
    )
    missing = refused(
        capsys, i2v_folder, out, "--prompt", PROMPT, "--image", str(tmp_path / "no.png")
    )
    assert f"--image: the image {tmp_path}/no.png does not exist" in missing
    assert not out.exists()
