"""The denoising loop: its steps, its noise, and independence of the batch."""

import torch

from sage_grpo.algo.sde import build_schedule, flow_sigmas
from sage_grpo.data.requests import Request
from sage_grpo.models.backbone import Guidance
from sage_grpo.models.hunyuan15.backbone import Hunyuan15
from sage_grpo.models.sample import counter_noise, denoise

PROMPT = Request("a red circle moving left")
NEGATIVE = Request("")


def finished(backbone, schedule, samples, seed=3):
    shape = backbone.latent_shape(5, 16, 16)
    cond, negative = backbone.encode([PROMPT, NEGATIVE])
    x, noise = counter_noise(shape, seed, samples)
    with torch.no_grad():
        return denoise(backbone, schedule, x, cond, Guidance(3.0, negative), noise)


def test_each_step_is_the_schedules_with_the_noise_of_its_number(tiny_folder):
    backbone = Hunyuan15(tiny_folder)
    schedule = build_schedule("sage_grpo", flow_sigmas(4, 5.0), 0.5)
    x, noise = counter_noise(backbone.latent_shape(5, 16, 16), 3, [0, 1])
    cond, negative = backbone.encode([PROMPT, NEGATIVE])
    with torch.no_grad():
        for i, sigma in enumerate(schedule.sigmas[:-1]):
            velocity = backbone.velocity(x, sigma.expand(2), cond, Guidance(3.0, negative))
            x, _ = schedule.step(i, x, velocity, noise(i))
    assert torch.equal(finished(backbone, schedule, [0, 1]), x)


def test_without_noise_every_sampler_is_the_euler_ode(tiny_folder):
    backbone = Hunyuan15(tiny_folder, dtype=torch.float64)
    sigmas = flow_sigmas(4, 5.0)
    last = finished(backbone, build_schedule("ode", sigmas, 0.0), [0])
    x, _ = counter_noise(backbone.latent_shape(5, 16, 16), 3, [0])
    cond, negative = backbone.encode([PROMPT, NEGATIVE])
    with torch.no_grad():
        for sigma, after in zip(sigmas[:-1].float(), sigmas[1:].float(), strict=True):
            x = x + (after - sigma) * backbone.velocity(x, sigma, cond, Guidance(3.0, negative))
    torch.testing.assert_close(last, x, rtol=1e-5, atol=1e-6)
    for sde_type in ("sage_grpo", "cps", "precise"):
        quiet = finished(backbone, build_schedule(sde_type, sigmas, 0.0), [0])
        torch.testing.assert_close(quiet, last, rtol=1e-5, atol=1e-6)


def test_any_split_of_the_clips_has_the_same_noise():
    key = {"purpose": "rollout", "prompt": 7, "iteration": 3}
    whole, whole_noise = counter_noise((4, 3, 5), 42, range(8), **key)
    for samples in (range(3), [6], [1, 4, 7]):
        x, noise = counter_noise((4, 3, 5), 42, samples, **key)
        assert torch.equal(x, whole[list(samples)])
        assert torch.equal(noise(1), whole_noise(1)[list(samples)])
    other_prompt, _ = counter_noise((4, 3, 5), 42, range(8), **key | {"prompt": 8})
    assert not torch.equal(whole, other_prompt)
    assert not torch.equal(whole_noise(0), whole_noise(1))


def test_a_clip_does_not_depend_on_its_batch(tiny_folder):
    backbone = Hunyuan15(tiny_folder)
    schedule = build_schedule("sage_grpo", flow_sigmas(4, 5.0), 0.5)
    together = finished(backbone, schedule, [0, 1, 2])
    alone = finished(backbone, schedule, [1])
    torch.testing.assert_close(together[1:2], alone, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(together[0], together[1], atol=0.1)
    assert not torch.allclose(finished(backbone, schedule, [1], seed=4), alone, atol=0.1)
