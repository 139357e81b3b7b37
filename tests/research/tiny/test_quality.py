import torch

from research.tiny.quality import quality, random_prompts, sample_clips
from sage_grpo.algo.sde import build_schedule, flow_sigmas
from sage_grpo.models.hunyuan15.backbone import Hunyuan15
from sage_grpo.worlds.shapes.scenes import ATTRIBUTES, captions, parse, render, sample_scenes


def test_random_prompts_are_distinct_and_name_everything():
    prompts = random_prompts(40, seed=1)
    assert len(set(prompts)) == 40 and all(
        set(parse(prompt)) == set(ATTRIBUTES) for prompt in prompts
    )
    assert prompts == random_prompts(40, seed=1) != random_prompts(40, seed=2)


def test_perfect_clips_are_perfect_and_a_wrong_word_costs_its_attribute():
    scenes = sample_scenes(24, torch.Generator().manual_seed(0))
    clips, sentences = render(scenes, 9, 32, 32), captions(scenes)
    perfect = quality(clips, sentences)
    assert (
        perfect["match"] == 1.0 and perfect["distance"] < 1e-4 and perfect["prompt_distance"] < 1e-4
    )
    assert all(perfect[name] == 1.0 for name in ATTRIBUTES)
    slow = [i for i, sentence in enumerate(sentences) if " slowly" in sentence]
    wrong = [sentence.replace(" slowly", " fast") for sentence in sentences]
    result = quality(clips, wrong)
    assert result["match"] == result["speed"] == 1 - len(slow) / 24 and result["colour"] == 1.0
    assert result["prompt_distance"] > 0.01 and result["distance"] < 1e-4


def test_sampling_gives_clips_of_the_models_size(tiny_folder):
    backbone, schedule = Hunyuan15(tiny_folder), build_schedule("ode", flow_sigmas(2, 3.0), 0.0)
    batches = list(
        sample_clips(
            backbone, schedule, ["a red circle moving left", "a green square moving right"], 2, 1.0
        )
    )
    assert [tuple(batch.shape) for batch in batches] == [(2, 9, 32, 32, 3)] * 2
    assert not torch.equal(batches[0][0], batches[0][1]) and not torch.equal(batches[0], batches[1])
