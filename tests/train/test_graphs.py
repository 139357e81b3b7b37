"""Training with CUDA graphs, recorded ones on a CPU, is training without them: to the bit."""

import pytest
import torch

from sage_grpo.models.graphs import Graphs
from tests.recorded_graphs import record_graphs

LORA = {"use_lora": True}
CHEAP = {"sde_window": "random:1", "same_init_noise": True, "tail_steps": 2}


@pytest.mark.parametrize("changes", [{}, LORA, CHEAP, {"algorithm": "nft"}, {"enable_gradient_checkpointing": True}])
def test_a_run_is_the_same_to_the_bit(make, monkeypatch, changes):
    found = []
    for graphed in (False, True):
        trainer = make(overwrite=True, prompts_per_forward=2, update_ref_model_step=2, max_steps=3, **changes)
        if graphed:
            record_graphs(monkeypatch)
            graphs = Graphs(trainer.backbone.transformer)
        trainer.train()
        found.append({name: p.detach().clone() for name, p in trainer.optimization.parameters.items()})
    plain, replayed = found
    assert graphs.replays > 20 and len(graphs.pairs) < 10
    assert all(torch.equal(value, replayed[name]) for name, value in plain.items())
