"""A small imaginary model whose costs can be counted by hand."""

from dataclasses import replace

from sage_grpo.config.fields import Config
from sage_grpo.models.cost import Architecture
from sage_grpo.tools.plan.calibration import Calibration, Overhead, calibrate
from sage_grpo.tools.plan.model import Plan, TrainedParameters

MODEL = Architecture(layers=5, heads=4, width=64, mlp_ratio=4, parameters=1600, block=240, vae=100)
TRAINED = TrainedParameters(total=1200, matrices=1000)
CONFIG = Config(
    enable_fsdp=True, batch_size=4, num_generations=4, num_sampling_steps=5, reward_model=("videoalign",), dtype="bf16",
    guidance_scale=6.0, timestep_shift=5.0, num_frames=9, height=32, width=48, micro_batch_size=2, report_to=("none",),
)  # fmt: skip
# Nothing but computation takes time.
FREE_LINKS = replace(
    calibrate(),
    nvlink=1e30,
    nic=1e30,
    host=1e30,
    optimizer=1e30,
    trainer_overhead=Overhead(forward=1.0, backward=1.0),
)


def imaginary_plan(gpus: int = 4, rates: Calibration = FREE_LINKS, **flags: object) -> Plan:
    return Plan(replace(CONFIG, **flags), MODEL, TRAINED, gpus, text_tokens=2, rates=rates)
