"""Plans of the full-size model, without its weights."""

from pathlib import Path

from sage_grpo.config.parse import parse
from sage_grpo.tools.plan.model import Plan
from sage_grpo.tools.plan.planner import plan_of

ROOT = Path(__file__).parents[3]
# One clip per forward, adapters of a model that is not really sharded
LORA = "--use_lora True --enable_fsdp True --batch_size 2 --num_generations 2 --micro_batch_size 1 --guidance_scale 1"


def full_size_plan(flags: str, gpus: int = 1) -> Plan:
    return plan_of(parse(["--pretrained_model_root", "no/such/folder", *flags.split()]), gpus)
