"""Sample videos from a model folder, or from what post-training made of it.

    python generate.py --prompt "a small red circle moving left slowly on a black background"
    python generate.py --model_path FOLDER --valid_video_csv prompts.csv --num_videos 4
    python generate.py --model_path FOLDER --image boat.png --prompt "the boat sails away"      (image to video)
    torchrun --nproc_per_node 8 generate.py ...                        (the ranks share the prompts)
    torchrun --nproc_per_node 8 generate.py --sp_size 4 ...            (four share each clip)

Writes for each clip an mp4 and a JSON with prompt, seed, settings and scores, and one contact sheet for all. Clips are
sampled one at a time from noise that depends on the seed and the clip's number alone: a clip is independent of batch
and rank.
"""

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sage_grpo.config.command_line import Parser
from sage_grpo.config.fields import FIELDS, MAX_NUMBER, SDE_TYPES, SOLVERS
from sage_grpo.data.images import read_image
from sage_grpo.data.requests import MOST, Request, check_text, read_requests
from sage_grpo.files.json_files import write_json
from sage_grpo.plugins import in_file, resolved
from sage_grpo.rewards.registry import REWARDS

if TYPE_CHECKING:
    from torch import Tensor

    from sage_grpo.models.backbone import Backbone, Sampling
    from sage_grpo.parallel.ranks import Ranks
    from sage_grpo.rewards.base import Reward

TIMEOUT = 1800  # seconds that processes wait for each other
AREAS = {"480p": 640 * 640, "720p": 960 * 960}  # pixels per frame, whatever the aspect ratio


def main(arguments: list[str] | None = None) -> None:
    try:
        args = parse_arguments(arguments)  # before imports that take seconds
        prompts = requests_of(args)
        import torch
        from transformers.utils.logging import disable_progress_bar

        from sage_grpo.models.registry import device_for
        from sage_grpo.parallel.ranks import join_ranks

        disable_progress_bar()  # that of loading weights
        args.checkpoint_path = checkpoint_of(args.checkpoint_path)
        device = device_for(args.device, args.model_path, args.pretrained_transformer_version)
        with torch.no_grad(), join_ranks(TIMEOUT, args.sp_size, device_type=device) as ranks:
            generate(args, prompts, ranks)
    except (ValueError, FileNotFoundError) as error:
        print(f"generate.py: {error}", file=sys.stderr)
        sys.exit(2)


def checkpoint_of(path: str | None) -> str | None:
    """The weights that `--checkpoint_path` names; a run folder means its newest checkpoint."""
    if path is None or not (Path(path) / "checkpoints").is_dir():
        if path is not None and not Path(path).exists():
            raise FileNotFoundError(f"checkpoint_path {path} does not exist")
        return path
    from sage_grpo.train.checkpoint_folders import list_checkpoints

    if not (complete := list_checkpoints(Path(path) / "checkpoints")):
        raise FileNotFoundError(
            f"checkpoint_path {path} is a run folder that holds no checkpoint yet"
        )
    return str(complete[-1])


def requests_of(args: argparse.Namespace) -> list[Request]:
    """What the command line or its file asks for, with images that can be used."""
    check_text(args.prompt or "", "--prompt")
    if args.valid_video_csv:
        return read_requests(args.valid_video_csv)
    return [Request(args.prompt, image=read_image(args.image, "--image") if args.image else None)]


def open_model(args: argparse.Namespace, prompts: Sequence[Request], ranks: "Ranks") -> "Backbone":
    """The backbone with the weights to sample, which can serve the prompts."""
    import torch

    from sage_grpo.models.registry import open_backbone

    dtype = torch.bfloat16 if ranks.device.type == "cuda" else torch.float32
    backbone = open_backbone(
        args.model_path, ranks.device, dtype, version=args.pretrained_transformer_version
    )
    backbone.check_requests(prompts)
    backbone.load_weights(args.checkpoint_path)
    backbone.transformer.requires_grad_(False).split_sequence(ranks.sequence_group)
    backbone.transformer.prepare_blocks(compiled=args.compile)
    return backbone


def generate(args: argparse.Namespace, prompts: Sequence[Request], ranks: "Ranks") -> None:
    from tqdm import tqdm

    from sage_grpo.algo.sde import build_schedule, flow_sigmas
    from sage_grpo.models.backbone import Guidance
    from sage_grpo.models.sample import counter_noise, denoise, integrate
    from sage_grpo.rewards.base import Setup, prompts_for
    from sage_grpo.rewards.build import build_reward
    from sage_grpo.runs.media import contact_sheet, thumbnails, write_mp4
    from sage_grpo.worlds.registry import check_prompts

    device, rank, world = ranks.device, ranks.rank, ranks.count
    backbone = open_model(args, prompts, ranks)
    settings = {prompt.index: resolve(args, backbone, prompt) for prompt in prompts}
    prompts = [
        prompt.sized(settings[prompt.index].height, settings[prompt.index].width)
        for prompt in prompts
    ]
    own = settings[prompts[0].index]
    if ranks.first:
        print(f"sampling: {own}", flush=True)
    check_prompts(backbone.folder, [prompt.text for prompt in prompts])
    sigmas = flow_sigmas(own.num_steps, own.shift)
    schedule = build_schedule(resolved(args.sde_type), sigmas, args.eta).to(device)
    shapes = {
        i: backbone.latent_shape(one.frames, one.height, one.width) for i, one in settings.items()
    }
    setup = Setup(Path(args.model_path) / "VideoReward", device)
    reward = build_reward(args.score, setup) if args.score and ranks.leader else None
    if reward:
        reward.check(prompts_for(reward, prompts))
    args.output_path.mkdir(parents=True, exist_ok=True)

    mine = [(prompt, number) for prompt in prompts for number in range(args.num_videos)][
        rank::world
    ]
    unwanted = backbone.negative_prompt if args.negative_prompt is None else args.negative_prompt
    negative, rows, labels = Request(unwanted), [], []
    backbone.prepare([negative, *(prompt for prompt, _ in mine)])
    guidance = Guidance(own.guidance, backbone.encode([negative])[0])
    for prompt, number in tqdm(mine, "clips", unit="clip", disable=not ranks.first):
        seed = args.seed if prompt.seed is None else prompt.seed
        x, noise = counter_noise(shapes[prompt.index], seed, [number])
        start = (x.to(device), *backbone.encode([prompt]), guidance)
        if args.sde_type == "ode":
            latents = integrate(backbone, sigmas, *start, args.solver)
        else:
            latents = denoise(backbone, schedule, *start, noise)
        if not ranks.leader:  # it has helped with the velocities; the clip is made once
            continue
        (clip,) = backbone.decode(latents).cpu()
        record = described(args, prompt, seed, number) | vars(settings[prompt.index])
        path = args.output_path / f"{prompt.name}-{seed}-{number}.mp4"
        write_mp4(path, clip, own.fps)
        if reward:
            record["scores"] = scored(reward, clip, prompt, own.fps)
        write_json(path.with_suffix(".json"), record, ensure_ascii=False)
        rows.append(thumbnails(clip))
        labels.append(label(record))
    if rows:
        sheet = args.output_path / ("sheet.png" if world == 1 else f"sheet-{rank}.png")
        contact_sheet(sheet, rows, labels)
        print(f"wrote {len(rows)} clip{'s' * (len(rows) > 1)} and {sheet}")


def scored(reward: "Reward", clip: "Tensor", prompt: Request, fps: int) -> dict[str, float]:
    """The named scores of one clip; an error if one is not a number."""
    import torch

    from sage_grpo.rewards.base import prompts_for

    found = reward.score([clip], prompts_for(reward, [prompt]), fps)
    scores = {name: round(torch.as_tensor(value).item(), 6) for name, value in found.items()}
    if broken := next((name for name, value in scores.items() if not math.isfinite(value)), None):
        raise ValueError(
            f"the reward gives {broken} {scores[broken]} for the prompt {prompt.text[:80]!r}: it is broken"
        )
    return scores


def described(args: argparse.Namespace, prompt: Request, seed: int, number: int) -> dict:
    """What the JSON of a clip says, but for its sizes and scores."""
    record = {
        "prompt": prompt.text,
        "seed": seed,
        "number": number,
        "model_path": str(args.model_path),
    }
    record |= {
        name: getattr(args, name) for name in ("checkpoint_path", "sde_type", "eta", "solver")
    }
    return record | ({"image": str(prompt.image.path)} if prompt.image else {})


def label(record: dict) -> str:
    scores = "  ".join(f"{name} {value:.2f}" for name, value in record.get("scores", {}).items())
    return f"{record['seed']}/{record['number']}  {scores}  {record['prompt']}"


def resolve(args: argparse.Namespace, backbone: "Backbone", request: Request) -> "Sampling":
    """The model's own settings for a request, with those of the command line on top."""
    from sage_grpo.models.backbone import Sampling

    own = backbone.sampling
    height, width = frame_size(args, backbone, request)
    return Sampling(
        frames=args.num_frames or own.frames,
        height=height,
        width=width,
        fps=own.fps,
        shift=own.shift if args.timestep_shift is None else args.timestep_shift,
        guidance=own.guidance if args.guidance_scale is None else args.guidance_scale,
        num_steps=args.num_inference_steps or own.num_steps,
    )


def frame_size(args: argparse.Namespace, backbone: "Backbone", request: Request) -> tuple[int, int]:
    """`--fixed_size`, else the area of `--resolution` in the shape of `--aspect_ratio`, else the model's own."""
    own = backbone.sampling
    if args.fixed_size:
        return args.fixed_size
    if not args.resolution and not args.aspect_ratio:
        return backbone.default_size(request)
    area = AREAS[args.resolution] if args.resolution else own.height * own.width
    ratio, multiple = args.aspect_ratio or own.width / own.height, backbone.multiple
    sides = math.sqrt(area / ratio), math.sqrt(area * ratio)
    height, width = (max(multiple, int(side / multiple) * multiple) for side in sides)
    return height, width


def size(text: str) -> tuple[int, int]:
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(part.isdigit() and len(part) < 7 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not HEIGHTxWIDTH, such as 480x848")
    return int(parts[0]), int(parts[1])


def aspect(text: str) -> float:
    parts = text.split(":")
    if len(parts) != 2 or not all(part.isdigit() and len(part) < 7 and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not WIDTH:HEIGHT, such as 16:9")
    return int(parts[0]) / int(parts[1])


def finite(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not abs(number) <= MAX_NUMBER:
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number up to {MAX_NUMBER}")
    return number


def positive(text: str) -> int:
    if not text.isdigit() or len(text) > 6 or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to 999999")
    return int(text)


def one_of(names: Iterable[str]) -> Callable[[str], str]:
    """Accepts one of `names`, or a plug-in."""

    def convert(text: str) -> str:
        if text not in names and not in_file(text):
            raise argparse.ArgumentTypeError(
                f"{text!r} is not one of {', '.join(names)}, or FILE.py:NAME"
            )
        return text

    return convert


def seed_number(text: str) -> int:
    if not text.isdigit() or len(text) > 19 or int(text) > MOST:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to {MOST}")
    return int(text)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(
        "generate.py",
        __doc__,
        usage="generate.py (--prompt TEXT | --prompt_file FILE) [--FLAG VALUE ...]",
    )
    add = parser.add_argument_group("Model").add_argument
    names = ("pretrained_model_root", "pretrained_transformer_version", "device")
    root, version, device = (FIELDS[name] for name in names)
    add(
        "--model_path",
        type=Path,
        metavar="FOLDER",
        default=Path(root.default),
        help=root.metadata["help"],
    )
    add(f"--{version.name}", metavar="NAME", default=version.default, help=version.metadata["help"])
    weights = "a run, or weights: a folder with transformer/ or a LoRA, or a .safetensors file"
    add("--checkpoint_path", metavar="PATH", help=f"{weights}; without it, the model as it is")
    group = parser.add_argument_group("Prompts")
    what, add = group.add_mutually_exclusive_group(required=True), group.add_argument
    what.add_argument("--prompt", metavar="TEXT", help="prompt of the clips")
    what.add_argument(
        "--valid_video_csv",
        "--prompt_file",
        metavar="FILE",
        help="prompts in a .csv, .txt or .jsonl file",
    )
    cropped = "resized and cropped around its center to the size of the clip"
    add(
        "--image",
        type=Path,
        metavar="FILE",
        help=f"first frame of the clips of --prompt, {cropped}",
    )
    add(
        "--negative_prompt",
        metavar="TEXT",
        help="prompt of the negative branch of guidance (default: the model's)",
    )
    add("--num_videos", type=positive, metavar="N", default=1, help="clips per prompt")
    add("--seed", type=seed_number, metavar="N", default=42, help="seed of prompts that name none")
    sampling = "Sampling; what is not given is the model's own, and the size that of its sizes closest to the image's"
    add = parser.add_argument_group(sampling).add_argument
    add("--resolution", choices=AREAS, help="area of a frame")
    add("--aspect_ratio", type=aspect, metavar="W:H", help="shape of a frame, such as 16:9")
    add(
        "--fixed_size",
        type=size,
        metavar="HxW",
        help="exact size of a frame; overrides the two above",
    )
    add("--num_frames", type=positive, metavar="N", help="frames of a clip")
    add("--num_inference_steps", type=positive, metavar="N", help="denoising steps")
    add("--guidance_scale", type=finite, metavar="X", help="classifier-free guidance")
    add("--timestep_shift", type=finite, metavar="X", help="shift of the noise schedule")
    add(
        "--solver",
        choices=SOLVERS,
        default="euler",
        help="ODE solver; dpm has second order and needs fewer steps",
    )
    noise = f"look at the exploration noise of {', '.join(SDE_TYPES)} or FILE.py:NAME"
    add("--sde_type", type=one_of(("ode", *SDE_TYPES)), metavar="NAME", default="ode", help=noise)
    add("--eta", type=finite, metavar="X", default=0.5, help="exploration scale of --sde_type")
    add = parser.add_argument_group("Machine and output").add_argument
    add(
        "--device",
        choices=device.metadata["choices"],
        default=device.default,
        help=device.metadata["help"],
    )
    add(
        "--sp_size",
        type=positive,
        metavar="N",
        default=1,
        help="ranks that share each clip; the others share prompts",
    )
    add(
        "--compile",
        action="store_true",
        help="compile the transformer blocks: faster from the second clip on",
    )
    add(
        "--output_path",
        type=Path,
        metavar="FOLDER",
        default=Path("outputs/generated"),
        help="where clips are written",
    )
    rewards = [name for name in REWARDS if name != "remote"]
    score = f"write scores into each JSON: {', '.join(rewards)} or FILE.py:NAME"
    add("--score", type=one_of(rewards), metavar="REWARD", help=score)
    args = parser.parse_args(arguments)
    if args.image and args.valid_video_csv:
        parser.error(
            "--image belongs to --prompt; a prompt file names images in its column `image`"
        )
    if args.solver != "euler" and args.sde_type != "ode":
        parser.error(
            f"--solver {args.solver} solves the ODE, and --sde_type {args.sde_type} adds noise: leave one out"
        )
    return args


if __name__ == "__main__":
    main()
