"""Training with CUDA graphs, recorded ones on a CPU, is training without them: to the bit."""

import pytest
import torch

from sage_grpo.config.parse import from_values
from sage_grpo.models.graphs import Graphs
from sage_grpo.parallel.ranks import Ranks
from sage_grpo.train.build import build_trainer
from tests.recorded_graphs import record_graphs
from tests.smallest_run import slow

LORA = {"use_lora": True}
EXTREMES = {"batch_size": 8, "num_generations": 4, "train_clips": 2}
CHEAP = {"sde_window": "random:1", "same_init_noise": True, "tail_steps": 2}


@pytest.mark.parametrize(
    "changes",
    [
        slow({}),
        LORA,
        slow(CHEAP),
        slow({"algorithm": "nft"}),
        slow({"enable_gradient_checkpointing": True}),
        CHEAP | EXTREMES,
        {"algorithm": "nft"} | EXTREMES,
    ],
)
def test_a_run_is_the_same_to_the_bit(make, monkeypatch, changes):
    found = []
    for graphed in (False, True):
        trainer = make(
            overwrite=True, prompts_per_forward=2, update_ref_model_step=2, max_steps=3, **changes
        )
        if graphed:
            record_graphs(monkeypatch)
            graphs = Graphs(trainer.backbone.transformer)
        trainer.train()
        found.append(
            {name: p.detach().clone() for name, p in trainer.optimization.parameters.items()}
        )
    plain, replayed = found
    assert graphs.replays > 10 and len(graphs.pairs) < 10
    assert all(torch.equal(value, replayed[name]) for name, value in plain.items())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_run_on_a_gpu_is_the_same_to_the_bit(flags):
    found = []
    for graphed in (False, True):
        changes = {
            "overwrite": True,
            "prompts_per_forward": 2,
            "max_steps": 3,
            "device": "cuda",
            "cuda_graphs": graphed,
        }
        trainer = build_trainer(from_values(flags | changes), Ranks(0, 1, torch.device("cuda")))
        trainer.train()
        assert isinstance(trainer.backbone.transformer.forward, Graphs) is graphed
        found.append([p.detach().clone() for p in trainer.optimization.parameters.values()])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
