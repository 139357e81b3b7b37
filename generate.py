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
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sage_grpo.config import argument_types
from sage_grpo.config.command_line import Parser, answering
from sage_grpo.config.fields import SDE_TYPES, SOLVERS, Config, flag_info
from sage_grpo.data.images import read_image
from sage_grpo.data.requests import Request, check_text, read_requests
from sage_grpo.files.json_files import read_object, write_json
from sage_grpo.files.paths import check_folder, make_folder
from sage_grpo.installed import require_packages
from sage_grpo.plugins import contained, trust
from sage_grpo.rewards.registry import REWARDS, SERVED

if TYPE_CHECKING:  # imported where it is used, after the command line has been checked
    from torch import Tensor

    from sage_grpo.algo.sde import Schedule
    from sage_grpo.models.backbone import Backbone, Guidance, Sampling
    from sage_grpo.parallel.ranks import Ranks
    from sage_grpo.rewards.base import Reward

TIMEOUT = 1800  # seconds that ranks wait for each other
AREAS = {"480p": 640 * 640, "720p": 960 * 960}  # pixels per frame, whatever the aspect ratio


@answering("generate.py: ")
def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(arguments)
    require_packages()
    check_folder(args.output_path, "output_path")
    requests = read_prompts(args)

    # these imports take seconds
    import torch
    from transformers.utils.logging import disable_progress_bar

    from sage_grpo.models.registry import device_for
    from sage_grpo.parallel.ranks import join_ranks

    disable_progress_bar()  # that of loading weights
    args.checkpoint_path = find_weights(args.checkpoint_path)
    device = device_for(args.device, args.model_path, args.pretrained_transformer_version)
    with torch.no_grad(), join_ranks(TIMEOUT, args.sp_size, device_type=device) as ranks:
        generate(args, requests, ranks)


def generate(args: argparse.Namespace, requests: Sequence[Request], ranks: "Ranks") -> None:
    """Sample this rank's share of the clips, score them and write them."""
    from tqdm import tqdm

    from sage_grpo.runs.media import contact_sheet, thumbnails, write_mp4

    # before weights are loaded; the names of clips with images depend on their size
    check_output(args, [request for request in requests if request.image is None])
    backbone = open_model(args, requests, ranks)
    sampler = build_sampler(args, backbone, requests, ranks)
    requests = sampler.sized(requests)
    check_output(args, requests)
    reward = build_scorer(args, requests, ranks) if ranks.is_leader else None
    make_folder(args.output_path, "output_path")

    clips = [(request, number) for request in requests for number in range(args.num_videos)]
    clips = clips[ranks.dp_rank :: ranks.dp_size]
    sampler.prepare([request for request, _ in clips])
    rows = []
    labels = []
    for request, number in tqdm(clips, "clips", unit="clip", disable=not ranks.is_first):
        seed = seed_of(args, request)
        latents = sampler.sample(request, seed, number)
        if not ranks.is_leader:
            continue  # this rank only helped to compute velocities; the clip is decoded once
        (clip,) = backbone.decode(latents).cpu()

        sampling = sampler.samplings[request.index]
        record = describe(args, request, seed, number, sampling)
        path = clip_path(args, request, number)
        write_mp4(path, clip, sampling.fps)
        if reward:
            record["scores"] = score(reward, clip, request, sampling.fps)
        write_json(path.with_suffix(".json"), record, ensure_ascii=False)
        rows.append(thumbnails(clip))
        labels.append(label(record))

    if rows:
        name = "sheet.png" if ranks.dp_size == 1 else f"sheet-{ranks.dp_rank}.png"
        sheet = args.output_path / name
        contact_sheet(sheet, rows, labels)
        noun = "clip" if len(rows) == 1 else "clips"
        print(f"wrote {len(rows)} {noun} and {sheet}")


# Requests and weights


def read_prompts(args: argparse.Namespace) -> list[Request]:
    """What the command line or its prompt file asks for, with images that can be used."""
    if args.valid_video_csv:
        return read_requests(args.valid_video_csv)
    check_text(args.prompt, "--prompt")
    image = read_image(args.image, "--image") if args.image else None
    return [Request(args.prompt, image=image)]


def find_weights(path: str | None) -> str | None:
    """The weights that `--checkpoint_path` names; a run folder means its newest checkpoint."""
    if path is None:
        return None

    from sage_grpo.train.checkpoint_folders import weights_of

    return str(weights_of(Path(path), "checkpoint_path"))


def check_output(args: argparse.Namespace, requests: Sequence[Request]) -> None:
    """Reject clips whose files exist and are of other weights, unless they may be overwritten."""
    if args.overwrite:
        return
    weights = os.path.abspath(args.checkpoint_path or args.model_path)
    for request in requests:
        for number in range(args.num_videos):
            file = clip_path(args, request, number).with_suffix(".json")
            try:
                record = read_object(file)
            except (ValueError, OSError):  # there is none, or it is not of a clip
                continue
            other = str(record.get("checkpoint_path") or record.get("model_path"))
            if os.path.abspath(other) != weights:
                raise ValueError(
                    f"{file.with_suffix('.mp4')} is a clip of {other}; "
                    "give another --output_path, or --overwrite to replace such clips"
                )


def clip_path(args: argparse.Namespace, request: Request, number: int) -> Path:
    """The mp4 of a clip."""
    return args.output_path / f"{request.name}-{seed_of(args, request)}-{number}.mp4"


def seed_of(args: argparse.Namespace, request: Request) -> int:
    return args.seed if request.seed is None else request.seed


# Sampling


def open_model(args: argparse.Namespace, requests: Sequence[Request], ranks: "Ranks") -> "Backbone":
    """The backbone with the weights to sample; an error if it cannot serve the requests."""
    import torch

    from sage_grpo.models.registry import open_backbone

    dtype = torch.bfloat16 if ranks.device.type == "cuda" else torch.float32
    backbone = open_backbone(
        args.model_path, ranks.device, dtype, version=args.pretrained_transformer_version
    )
    backbone.check_requests(requests)
    backbone.load_weights(args.checkpoint_path)
    backbone.transformer.requires_grad_(False).split_sequence(ranks.sequence_group)
    backbone.transformer.prepare_blocks(compiled=args.compile)
    return backbone


@dataclass
class Sampler:
    """Samples one clip at a time, by the ODE or with exploration noise."""

    backbone: "Backbone"
    samplings: dict[int, "Sampling"]  # by the index of a request; they differ in the size alone
    sigmas: "Tensor"  # (steps + 1,)
    schedule: "Schedule"
    solver: str | None  # of the ODE; None: exploration noise
    negative: Request
    guidance: "Guidance | None" = None

    def sized(self, requests: Sequence[Request]) -> list[Request]:
        """The requests, with images cropped to the sizes of their clips."""
        sizes = [self.samplings[request.index] for request in requests]
        return [
            request.sized(size.height, size.width)
            for request, size in zip(requests, sizes, strict=True)
        ]

    def prepare(self, requests: Sequence[Request]) -> None:
        """Encode all prompts, and free the encoders."""
        from sage_grpo.models.backbone import Guidance

        self.backbone.prepare([self.negative, *requests])
        sampling = next(iter(self.samplings.values()))
        (negative,) = self.backbone.encode([self.negative])
        self.guidance = Guidance(sampling.guidance, negative, scale_2=sampling.guidance_2)

    def sample(self, request: Request, seed: int, number: int) -> "Tensor":
        """Latents (1, C, T, y, x) of the clip with this number."""
        from sage_grpo.models.sample import counter_noise, denoise, integrate

        sampling = self.samplings[request.index]
        shape = self.backbone.latent_shape(sampling.frames, sampling.height, sampling.width)
        (cond,) = self.backbone.encode([request])
        x, noise = counter_noise(self.backbone.free_shape(shape, cond), seed, [number])
        x = x.to(self.backbone.device)
        if self.solver:
            x = integrate(self.backbone, self.sigmas, x, cond, self.guidance, self.solver)
        else:
            x = denoise(self.backbone, self.schedule, x, cond, self.guidance, noise)
        return self.backbone.full_latents(x, cond)


def build_sampler(
    args: argparse.Namespace, backbone: "Backbone", requests: Sequence[Request], ranks: "Ranks"
) -> Sampler:
    """The sampler that the flags describe; an error if the model cannot sample the requests that way."""
    from sage_grpo.algo.sde import flow_sigmas
    from sage_grpo.models.sample import schedule_of
    from sage_grpo.worlds.registry import check_prompts

    samplings = {request.index: sampling_for(args, backbone, request) for request in requests}
    first = samplings[requests[0].index]
    if ranks.is_first:
        print(f"sampling: {first}", flush=True)
    check_prompts(backbone.folder, [request.text for request in requests])
    sigmas = flow_sigmas(first.num_steps, first.shift)
    schedule = schedule_of(args.sde_type, sigmas, args.eta).to(ranks.device)
    for sampling in samplings.values():  # rejects sizes that the model does not have
        backbone.latent_shape(sampling.frames, sampling.height, sampling.width)

    negative = backbone.negative_prompt if args.negative_prompt is None else args.negative_prompt
    return Sampler(
        backbone=backbone,
        samplings=samplings,
        sigmas=sigmas,
        schedule=schedule,
        solver=args.solver if args.sde_type == "ode" else None,
        negative=Request(negative),
    )


def sampling_for(args: argparse.Namespace, backbone: "Backbone", request: Request) -> "Sampling":
    """The model's settings for a request, overridden by those of the command line."""
    from sage_grpo.models.backbone import Sampling

    default = backbone.sampling
    height, width = frame_size(args, backbone, request)
    return Sampling(
        frames=args.num_frames or default.frames,
        height=height,
        width=width,
        fps=default.fps,
        shift=default.shift if args.timestep_shift is None else args.timestep_shift,
        guidance=default.guidance if args.guidance_scale is None else args.guidance_scale,
        guidance_2=second_guidance(args, backbone),
        num_steps=args.num_inference_steps or default.num_steps,
    )


def second_guidance(args: argparse.Namespace, backbone: "Backbone") -> float | None:
    """The guidance of a second transformer: as the first one's if only that is given, as in stock pipelines."""
    backbone.check_second_guidance(args.guidance_scale_2)
    if args.guidance_scale_2 is None:
        return backbone.sampling.guidance_2 if args.guidance_scale is None else None
    return args.guidance_scale_2


def frame_size(args: argparse.Namespace, backbone: "Backbone", request: Request) -> tuple[int, int]:
    """Height and width: `--fixed_size`, else `--resolution` and `--aspect_ratio`, else the model's for this request."""
    if args.fixed_size:
        return args.fixed_size
    if not args.resolution and not args.aspect_ratio:
        return backbone.default_size(request)

    default = backbone.sampling
    area = AREAS[args.resolution] if args.resolution else default.height * default.width
    ratio = args.aspect_ratio or default.width / default.height

    def rounded_down(side: float) -> int:
        return max(backbone.multiple, int(side / backbone.multiple) * backbone.multiple)

    return rounded_down(math.sqrt(area / ratio)), rounded_down(math.sqrt(area * ratio))


# Scores and records


def build_scorer(
    args: argparse.Namespace, requests: Sequence[Request], ranks: "Ranks"
) -> "Reward | None":
    """The reward that `--score` names, if any; an error if it cannot score the requests."""
    if not args.score:
        return None

    from sage_grpo.rewards.base import Setup, reward_inputs
    from sage_grpo.rewards.build import build_reward

    reward = build_reward(args.score, Setup(args.model_path / "VideoReward", ranks.device))
    with contained(f"--score {args.score} cannot check the prompts"):
        reward.check(reward_inputs(reward, requests))
    return reward


def score(reward: "Reward", clip: "Tensor", request: Request, fps: int) -> dict[str, float]:
    """The named scores of one clip; an error if one is not a number."""
    import torch

    from sage_grpo.rewards.base import reward_inputs

    scores = {}
    with contained("the reward failed"):
        named = reward.score([clip], reward_inputs(reward, [request]), fps)
        values = {name: torch.as_tensor(value).item() for name, value in named.items()}
    for name, value in values.items():
        scores[name] = round(value, 6)
        if not math.isfinite(scores[name]):
            raise ValueError(
                f"the reward gives {name} {scores[name]} for the prompt {request.text[:80]!r}: "
                "it is broken"
            )
    return scores


def describe(
    args: argparse.Namespace, request: Request, seed: int, number: int, sampling: "Sampling"
) -> dict[str, Any]:
    """What the JSON of a clip says, except for its scores."""
    record = {
        "prompt": request.text,
        "seed": seed,
        "number": number,
        "model_path": str(args.model_path),
        "checkpoint_path": args.checkpoint_path,
        "sde_type": args.sde_type,
        "eta": args.eta,
        "solver": args.solver,
    }
    if request.image:
        record["image"] = str(request.image.path)
    return record | vars(sampling)


def label(record: dict[str, Any]) -> str:
    """The line of a clip on the contact sheet."""
    scores = "  ".join(f"{name} {value:.2f}" for name, value in record.get("scores", {}).items())
    return f"{record['seed']}/{record['number']}  {scores}  {record['prompt']}"


# Flags


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(
        "generate.py",
        __doc__,
        usage="generate.py (--prompt TEXT | --prompt_file FILE) [--FLAG VALUE ...]",
    )
    add_model_flags(parser.add_argument_group("Model"))
    add_prompt_flags(parser.add_argument_group("Prompts"))
    add_sampling_flags(
        parser.add_argument_group(
            "Sampling; the defaults are the model's, and the size follows the image's aspect ratio"
        )
    )
    add_output_flags(parser.add_argument_group("Machine and output"))
    args = parser.parse_args(arguments)
    if args.image and args.valid_video_csv:
        parser.error(
            "--image belongs to --prompt; a prompt file names images in its column `image`"
        )
    if args.solver != "euler" and args.sde_type != "ode":
        parser.error(
            f"--solver {args.solver} solves the ODE, and --sde_type {args.sde_type} adds noise: "
            "leave one out"
        )
    trust(args.sde_type, args.score)
    return args


def add_model_flags(group: Any) -> None:
    add = group.add_argument
    defaults = Config()
    add(
        "--model_path",
        type=Path,
        metavar="FOLDER",
        default=Path(defaults.pretrained_model_root),
        help=flag_info("pretrained_model_root").help,
    )
    add(
        "--pretrained_transformer_version",
        metavar="NAME",
        default=defaults.pretrained_transformer_version,
        help=flag_info("pretrained_transformer_version").help,
    )
    add(
        "--checkpoint_path",
        metavar="PATH",
        help="run folder, or weights: a folder with transformer/ or a LoRA, or a .safetensors file "
        "(default: the weights of the model folder)",
    )


def add_prompt_flags(group: Any) -> None:
    add = group.add_argument
    source = group.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT", help="prompt of the clips")
    source.add_argument(
        "--valid_video_csv",
        "--prompt_file",
        metavar="FILE",
        help="prompts in a .csv, .txt or .jsonl file",
    )
    add(
        "--image",
        type=Path,
        metavar="FILE",
        help="first frame of the clips of --prompt, "
        "resized and cropped around its center to the size of the clip",
    )
    add(
        "--negative_prompt",
        metavar="TEXT",
        help="negative prompt for guidance (default: the model's)",
    )
    add(
        "--num_videos",
        type=argument_types.count,
        metavar="N",
        default=1,
        help="clips per prompt",
    )
    add(
        "--seed",
        type=argument_types.seed,
        metavar="N",
        default=42,
        help="seed of prompts that specify none",
    )


def add_sampling_flags(group: Any) -> None:
    add = group.add_argument
    add("--resolution", choices=AREAS, help="area of a frame")
    add(
        "--aspect_ratio",
        type=argument_types.aspect_ratio,
        metavar="W:H",
        help="shape of a frame, such as 16:9",
    )
    add(
        "--fixed_size",
        type=argument_types.frame_size,
        metavar="HxW",
        help="exact size of a frame; overrides the two above",
    )
    add("--num_frames", type=argument_types.count, metavar="N", help="frames per clip")
    add("--num_inference_steps", type=argument_types.count, metavar="N", help="denoising steps")
    add(
        "--guidance_scale",
        type=argument_types.finite_number,
        metavar="X",
        help="classifier-free guidance scale",
    )
    add(
        "--guidance_scale_2",
        type=argument_types.finite_number,
        metavar="X",
        help="that of the transformer for low noise levels, in a model with two",
    )
    add(
        "--timestep_shift",
        type=argument_types.finite_number,
        metavar="X",
        help="timestep shift of the noise schedule",
    )
    add(
        "--solver",
        choices=SOLVERS,
        default="euler",
        help="ODE solver; dpm and unipc are second-order, dpm3 is third-order: they need fewer steps",
    )
    add(
        "--sde_type",
        type=argument_types.name_or_code(("ode", *SDE_TYPES)),
        metavar="NAME",
        default="ode",
        help=f"sample with the exploration noise of {', '.join(SDE_TYPES)} or FILE.py:NAME",
    )
    add(
        "--eta",
        type=argument_types.finite_number,
        metavar="X",
        default=0.5,
        help="noise scale of --sde_type",
    )


def add_output_flags(group: Any) -> None:
    add = group.add_argument
    rewards = [name for name in REWARDS if name not in SERVED]
    add(
        "--device",
        choices=flag_info("device").choices,
        default=Config().device,
        help=flag_info("device").help,
    )
    add(
        "--sp_size",
        type=argument_types.count,
        metavar="N",
        default=1,
        help="number of ranks that share each clip; the groups share the prompts",
    )
    add(
        "--compile",
        action="store_true",
        help="compile the transformer blocks; faster from the second clip on",
    )
    add(
        "--output_path",
        type=Path,
        metavar="FOLDER",
        default=Path("outputs/generated"),
        help="folder to write clips to",
    )
    add(
        "--overwrite",
        action="store_true",
        help="replace clips of other weights that have the same name",
    )
    add(
        "--score",
        type=argument_types.name_or_code(rewards),
        metavar="REWARD",
        help=f"reward whose scores are written to each JSON: {', '.join(rewards)} or FILE.py:NAME",
    )


if __name__ == "__main__":
    main()
