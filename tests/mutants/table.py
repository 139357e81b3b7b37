"""60 deliberate mistakes, one per row, and the tests that should notice each. `run.py` tries them.

A row is a text replacement. When the code changes, `python -m tests.mutants.run --check_rows` names the rows whose old
text is no longer there exactly once; give them the same mistake in the new words.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mistake:
    name: str
    file: str  # below the root of the repository
    old: str  # occurs exactly once in the file
    new: str
    tests: tuple[str, ...]  # the smallest files that should notice it
    only: str = ""  # pytest's -k, where the rest of these files takes long

    @property
    def selection(self) -> tuple[str, ...]:
        """Arguments of pytest."""
        return (*self.tests, "-k", self.only) if self.only else self.tests


ALGO = (
    Mistake(
        "KL divided by the standard deviation instead of the variance",
        "sage_grpo/algo/sde.py",
        "_per_sample(self.b * self.inv_std, i, v)",
        "_per_sample(self.b * self.inv_std.sqrt(), i, v)",
        ("tests/algo/test_sde.py",),
    ),
    Mistake(
        "wrong sign of the score in the mean of a step",
        "sage_grpo/algo/sde.py",
        "sigma_next - sigma - var * (1 - sigma) / (2 * sigma)",
        "sigma_next - sigma + var * (1 - sigma) / (2 * sigma)",
        ("tests/algo/test_sde.py",),
    ),
    Mistake(
        "the logarithm of the variance starts above its ceiling",
        "sage_grpo/algo/sde.py",
        "(top - sigma_next) / (1 - top)",
        "(sigma - sigma_next) / (1 - top)",
        ("tests/algo/test_sde.py",),
    ),
    Mistake(
        "second-order correction twice as large",
        "sage_grpo/algo/solver.py",
        "/ (2 * h[..., :-1])",
        "/ h[..., :-1]",
        ("tests/algo/test_solver.py",),
    ),
    Mistake(
        "equalizer: median over all steps instead of the stochastic ones",
        "sage_grpo/algo/equalizer.py",
        "scale[trained].median()",
        "scale.median()",
        ("tests/algo/test_equalizer.py",),
    ),
    Mistake(
        "sample instead of population standard deviation of the batch",
        "sage_grpo/algo/grpo.py",
        "r.std(correction=0)",
        "r.std()",
        ("tests/algo/test_grpo.py",),
    ),
    Mistake(
        "NaN treated as a reward of 0 in the statistics of a group",
        "sage_grpo/algo/grpo.py",
        "    finite = rewards.isfinite()\n",
        "    rewards = rewards.nan_to_num()\n    finite = rewards.isfinite()\n",
        ("tests/algo/test_grpo.py",),
    ),
    Mistake(
        "clip on the wrong side: the better instead of the worse loss",
        "sage_grpo/algo/grpo.py",
        "torch.maximum(",
        "torch.minimum(",
        ("tests/algo/test_grpo.py",),
    ),
    Mistake(
        "the KL is subtracted from the minimized loss",
        "sage_grpo/algo/grpo.py",
        "(scale * policy + kl_lambda * kl).sum()",
        "(scale * policy - kl_lambda * kl).sum()",
        ("tests/algo/test_grpo.py",),
    ),
    Mistake(
        "the weight of the matching error carries a gradient",
        "sage_grpo/algo/matching.py",
        "gap.detach().abs()",
        "gap.abs()",
        ("tests/algo/test_matching.py",),
    ),
)

TRAIN = (
    Mistake(
        "the KL controller is not restored",
        "sage_grpo/train/state.py",
        '        self.controller.load_state_dict(numbers["controller"])\n',
        "",
        ("tests/train/test_resume.py",),
        "four_and_four or whatever_changes",
    ),
    Mistake(
        "a checkpoint counts rollouts whose gradients are not in the weights",
        "sage_grpo/train/state.py",
        "return self.step - self.step % self.gradient_accumulation_steps",
        "return self.step",
        ("tests/train/test_resume.py",),
        "accumulated",
    ),
    Mistake(
        "stale anchor: refreshed one optimizer step late",
        "sage_grpo/train/anchor.py",
        "self.age >= self.refresh_every",
        "self.age > self.refresh_every",
        ("tests/train/test_trainer.py",),
        "anchor",
    ),
    Mistake(
        "the lagging policy's velocity is taken for the anchor's",
        "sage_grpo/train/trainer.py",
        "self.anchor.age == 0 and not self.config.samples_with_old_policy",
        "self.anchor.age == 0",
        ("tests/train/test_algorithms.py",),
        "anchor",
    ),
    Mistake(
        "every rank takes the first rank's advantages",
        "sage_grpo/train/trainer.py",
        "first = self.ranks.dp_rank * num_rows",
        "first = 0",
        ("tests/train/test_layouts.py",),
        "gradients_of_an_iteration and dp2",
    ),
    Mistake(
        "accumulated rollouts add up instead of being averaged",
        "sage_grpo/train/trainer.py",
        "c.gradient_accumulation_steps * len(advantages.values) * len(turns)",
        "len(advantages.values) * len(turns)",
        ("tests/train/test_trainer.py",),
        "accumulation",
    ),
    Mistake(
        "the trained weights are validated instead of their average",
        "sage_grpo/train/trainer.py",
        "self.optimization.using(self.optimization.average)",
        "self.optimization.using({})",
        ("tests/train/test_trainer.py",),
        "average",
    ),
    Mistake(
        "wrong step index: the noise level after the step",
        "sage_grpo/train/rollout.py",
        "sigma=sigmas[steps]",
        "sigma=sigmas[steps + 1]",
        ("tests/train/test_trainer.py",),
        "first_ratio",
    ),
    Mistake(
        "permutation ignored: every clip trains its steps in order",
        "sage_grpo/train/rollout.py",
        "torch.stack([order[:num_kept] for order in orders])",
        "torch.stack([order[:num_kept].sort().values for order in orders])",
        ("tests/train/test_rollout.py",),
        "orders",
    ),
    Mistake(
        "the same noise in every iteration",
        "sage_grpo/train/rollout.py",
        "            iteration=self.iteration,\n",
        "            iteration=0,\n",
        ("tests/train/test_rollout.py",),
        "fresh_noise",
    ),
    Mistake(
        "a prompt that comes twice repeats its noise",
        "sage_grpo/train/batches.py",
        "first = sampled[prompt_index]",
        "first = 0",
        ("tests/train/test_rollout.py",),
        "twice",
    ),
    Mistake(
        "wrong window start: the last start is never reached",
        "sage_grpo/train/windows.py",
        "num_starts = len(noisy) - size + 1",
        "num_starts = max(1, len(noisy) - size)",
        ("tests/train/test_windows.py",),
        "places",
    ),
    Mistake(
        "the factor of the KL is not squared",
        "sage_grpo/train/update.py",
        "equalizer(self.schedule, c.use_kl_balancing).square()",
        "equalizer(self.schedule, c.use_kl_balancing)",
        ("tests/train/test_update.py",),
    ),
    Mistake(
        "nft reads advantages on another scale than they are clipped to",
        "sage_grpo/train/algorithms/nft.py",
        "largest=c.adv_clip_max",
        "largest=1.0",
        ("tests/train/test_algorithms.py",),
        "formulas",
    ),
    Mistake(
        "EMA decay inverted",
        "sage_grpo/train/optimization.py",
        "torch._foreach_lerp_(shards, targets, 1 - decay)",
        "torch._foreach_lerp_(shards, targets, decay)",
        ("tests/train/test_optimization.py",),
    ),
    Mistake(
        "a step on a gradient that is not finite",
        "sage_grpo/train/optimization.py",
        "return has_advantage and math.isfinite(grad_norm)",
        "return has_advantage",
        ("tests/train/test_guards.py",),
        "a_step_is_taken",
    ),
    Mistake(
        "drafts counted as checkpoints",
        "sage_grpo/train/checkpoint_folders.py",
        '[path for path in _list_with_drafts(folder) if path.suffix != ".tmp"]',
        "_list_with_drafts(folder)",
        ("tests/train/test_checkpoint.py",),
        "drafts",
    ),
    Mistake(
        "manifest check skipped before a resume",
        "sage_grpo/train/checkpoint_folders.py",
        "    manifest.check(path, share=slice(ranks.world_rank, None, ranks.world_size))\n",
        "",
        ("tests/train/test_durability.py",),
        "auto_steps_back or named_checkpoint",
    ),
    Mistake(
        "the copy for a save shares memory with the weights",
        "sage_grpo/train/checkpoint.py",
        "tensors = {name: host_copy(value) for name, value in tensors.items()}",
        "tensors = dict(tensors)",
        ("tests/train/test_saving.py",),
        "written_during_training",
    ),
    Mistake(
        "a signal stops the run without a checkpoint",
        "sage_grpo/train/guards.py",
        "                    save()\n",
        "",
        ("tests/train/test_guards.py",),
        "signal_is_heard",
    ),
    Mistake(
        "seed reused: all validation prompts get the same noise",
        "sage_grpo/train/validation.py",
        "[0], prompt=request.index)",
        "[0], prompt=0)",
        ("tests/train/test_validation.py",),
        "own_noise",
    ),
    Mistake(
        "signal share of the gradient with the wrong denominator",
        "sage_grpo/train/diagnosis_metrics.py",
        "/ (f - f**2)",
        "/ f",
        ("tests/train/test_diagnosis_metrics.py",),
        "told_apart",
    ),
)

MODELS = (
    Mistake(
        "wrong guidance branch: extrapolates from the positive one",
        "sage_grpo/models/backbone.py",
        "return v_neg + guidance.scale * (v_pos - v_neg)",
        "return v_pos + guidance.scale * (v_pos - v_neg)",
        ("tests/models/hunyuan15/test_backbone.py",),
        "guidance",
    ),
    Mistake(
        "the negative branch does not see the image",
        "sage_grpo/models/backbone.py",
        "guidance.negative.seeing(cond)",
        "guidance.negative",
        ("tests/models/hunyuan15/test_image.py",),
        "both_branches",
    ),
    Mistake(
        "VAE scaling factor multiplied instead of divided",
        "sage_grpo/models/latent.py",
        "latents.to(self.vae.device, wide) / factor + shift",
        "latents.to(self.vae.device, wide) * factor + shift",
        ("tests/models/hunyuan15/test_backbone.py",),
        "decoded_clip or scaled_once",
    ),
    Mistake(
        "LoRA scale: alpha is ignored",
        "sage_grpo/models/lora.py",
        "lora_alpha=alpha,",
        "lora_alpha=rank,",
        ("tests/models/test_lora.py",),
        "scaled_by_alpha",
    ),
    Mistake(
        "every denoising step draws the same noise",
        "sage_grpo/models/sample.py",
        'lambda i: draw("sde", samples, i)',
        'lambda i: draw("sde", samples)',
        ("tests/models/test_sample.py",),
    ),
    Mistake(
        "wrong rows on load: the second file is read from its first row",
        "sage_grpo/models/weights.py",
        "start = max(start - len(piece), 0)",
        "start = 0",
        ("tests/models/test_weights.py",),
        "rows",
    ),
    Mistake(
        "embeddings of another encoder are taken from the cache",
        "sage_grpo/models/embeddings.py",
        "if made_for == self.label(request) and names == expected_names:",
        "if names == expected_names:",
        ("tests/models/test_embeddings.py",),
    ),
    Mistake(
        "off by one: the first frame has no latent frame of its own",
        "sage_grpo/models/cost.py",
        "(frames - 1) // self.temporal + 1",
        "frames // self.temporal",
        ("tests/models/test_cost.py",),
    ),
)

REWARDS = (
    Mistake(
        "failed reward becomes 0",
        "sage_grpo/rewards/base.py",
        "torch.full((len(clips),), math.nan, dtype=torch.float64) for name in self.names",
        "torch.zeros(len(clips), dtype=torch.float64) for name in self.names",
        ("tests/rewards/test_composite.py",),
    ),
    Mistake(
        "a score of weight 0 spoils the total when it fails",
        "sage_grpo/rewards/base.py",
        "sum(weight * named[name] for name, weight in self.weights.items() if weight)",
        "sum(weight * named[name] for name, weight in self.weights.items())",
        ("tests/rewards/test_composite.py",),
    ),
    Mistake(
        "a null from the reward server becomes 0",
        "sage_grpo/rewards/remote.py",
        "math.nan if value is None else value",
        "0.0 if value is None else value",
        ("tests/rewards/test_remote.py",),
        "no_number",
    ),
    Mistake(
        "scores are multiplied by their standard deviation",
        "sage_grpo/rewards/videoalign/reward.py",
        '(values - self.norm[f"{name}_mean"]) / self.norm[f"{name}_std"]',
        '(values - self.norm[f"{name}_mean"]) * self.norm[f"{name}_std"]',
        ("tests/rewards/videoalign/test_reward.py",),
        "scores_are_those",
    ),
    Mistake(
        "motion per frame instead of per second",
        "sage_grpo/rewards/motion.py",
        "rate * change(clip)",
        "change(clip)",
        ("tests/rewards/test_motion.py",),
    ),
)

RUNS = (
    Mistake(
        "lock not released",
        "sage_grpo/runs/lock.py",
        "        if seen and seen.content == content:\n            path.unlink()\n",
        "",
        ("tests/runs/test_lock.py",),
        "names_its_process",
    ),
    Mistake(
        "a process with the number of a dead one keeps its lock",
        "sage_grpo/runs/lock.py",
        "_start_time(owner.pid) != owner.started",
        "not _start_time(owner.pid)",
        ("tests/runs/test_lock.py",),
        "number_of_a_dead_one",
    ),
    Mistake(
        "a resume drops the iteration that it continues from",
        "sage_grpo/runs/history.py",
        "if number <= step}",
        "if number < step}",
        ("tests/runs/test_history.py",),
    ),
    Mistake(
        "clips of different seeds are paired",
        "sage_grpo/runs/clips.py",
        "return self.prompt, self.seed, self.image",
        "return self.prompt, 0, self.image",
        ("tests/runs/test_clips.py",),
    ),
    Mistake(
        "reward hacking without a held-out reward that falls",
        "sage_grpo/runs/hacking.py",
        "if reward.sign > 0 > held_out.sign:",
        "if reward.sign > 0:",
        ("tests/runs/test_hacking.py",),
        "intervals or best",
    ),
)

TOOLS = (
    Mistake(
        "planner's factor 2: one moment of the optimizer instead of two",
        "sage_grpo/tools/plan/memory.py",
        "(2 * here - by_muon) * master",
        "(here - by_muon) * master",
        ("tests/tools/plan/test_memory.py",),
    ),
    Mistake(
        "planner's traffic between replicas: one way instead of both",
        "sage_grpo/tools/plan/times.py",
        "gradients / shards * 2 * (replicas - 1) / replicas",
        "gradients / shards * (replicas - 1) / replicas",
        ("tests/tools/plan/test_times.py",),
    ),
    Mistake(
        "a larger distance counts as better",
        "sage_grpo/tools/paired.py",
        'return -1 if column.endswith("distance") else 1',
        "return 1",
        ("tests/tools/test_paired.py",),
    ),
    Mistake(
        "HTML not escaped",
        "sage_grpo/tools/templating.py",
        'autoescape=jinja2.select_autoescape(["html"])',
        "autoescape=False",
        ("tests/tools/report/test_escaping.py",),
    ),
    Mistake(
        "audit: a rise counts by its mean instead of its interval",
        "sage_grpo/tools/audit.py",
        "if low > self.noise:",
        "if self.change.mean > self.noise:",
        ("tests/tools/test_audit.py",),
    ),
)

PARALLEL = (
    Mistake(
        "wrong reduction of gradients over ranks: the largest instead of the sum",
        "sage_grpo/parallel/ranks.py",
        "dist.all_reduce(flat)",
        "dist.all_reduce(flat, dist.ReduceOp.MAX)",
        ("tests/parallel/test_ranks.py",),
        "two_groups_of_two",
    ),
    Mistake(
        "FSDP averages gradients instead of summing them",
        "sage_grpo/parallel/fsdp.py",
        "unit.set_gradient_divide_factor(1.0)",
        "unit.set_gradient_divide_factor(float(mesh.size()))",
        ("tests/parallel/test_fsdp.py",),
    ),
    Mistake(
        "unsharded weights stay after the context and go stale",
        "sage_grpo/parallel/fsdp.py",
        "            unit.reshard()\n",
        "",
        ("tests/parallel/test_fsdp.py",),
    ),
    Mistake(
        "other values stay in the model after their context",
        "sage_grpo/parallel/fsdp.py",
        "        copy_into(parameters, originals)\n",
        "        pass\n",
        ("tests/train/test_optimization.py",),
        "average",
    ),
    Mistake(
        "Ulysses: heads split along the wrong axis",
        "sage_grpo/parallel/ulysses.py",
        '"three b s (count h) e -> (count s) three b h e"',
        '"three b s (h count) e -> (count s) three b h e"',
        ("tests/parallel/test_ulysses.py",),
        "velocity_and_gradients",
    ),
)

MISTAKES = (*ALGO, *TRAIN, *MODELS, *REWARDS, *RUNS, *TOOLS, *PARALLEL)
