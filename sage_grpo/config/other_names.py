"""Names that other trainers have for these flags, so that an error can suggest the right one."""

from collections.abc import Collection

# name elsewhere -> flags here; a program suggests the first of them that it has
OTHER_NAMES = {
    # model and files
    "model": ("pretrained_model_root", "model_path"),
    "model_id": ("pretrained_model_root", "model_path"),
    "model_name_or_path": ("pretrained_model_root", "model_path"),
    "pretrained_model_name_or_path": ("pretrained_model_root", "model_path"),
    "ckpt": ("checkpoint_path", "checkpoints", "init_from_checkpoint"),
    "checkpoint": ("checkpoint_path", "checkpoints", "init_from_checkpoint"),
    "resume": ("resume_from_checkpoint",),
    "resume_from": ("resume_from_checkpoint",),
    "out": ("output_dir", "output_path"),
    "out_dir": ("output_dir", "output_path"),
    "output": ("output_dir", "output_path"),
    "save_dir": ("output_dir", "output_path"),
    "work_dir": ("output_dir",),
    "data": ("train_prompts", "prompt_file"),
    "dataset": ("train_prompts", "prompt_file"),
    "dataset_name": ("train_prompts",),
    "train_data_dir": ("train_prompts",),
    "prompts": ("train_prompts", "prompt_file"),
    "validation_prompt": ("validation_prompts",),
    # training
    "lr": ("learning_rate",),
    "wd": ("weight_decay",),
    "lr_warmup_steps": ("warmup_steps",),
    "steps": ("max_steps", "num_inference_steps"),
    "iterations": ("max_steps",),
    "max_iters": ("max_steps",),
    "max_train_steps": ("max_steps",),
    "num_train_steps": ("max_steps",),
    "epochs": ("max_steps",),
    "num_epochs": ("max_steps",),
    "num_train_epochs": ("max_steps",),
    "bs": ("batch_size",),
    "train_batch_size": ("batch_size",),
    "per_device_train_batch_size": ("batch_size",),
    "group_size": ("num_generations",),
    "num_videos_per_prompt": ("num_generations", "num_videos"),
    "num_image_per_prompt": ("num_generations", "num_videos"),
    "grad_accum": ("gradient_accumulation_steps",),
    "gradient_accumulation": ("gradient_accumulation_steps",),
    "grad_clip": ("max_grad_norm",),
    "clip_grad_norm": ("max_grad_norm",),
    "gradient_checkpointing": ("enable_gradient_checkpointing",),
    "precision": ("dtype",),
    "mixed_precision": ("dtype",),
    "bf16": ("dtype",),
    "ema": ("ema_decay",),
    "fsdp": ("enable_fsdp",),
    "num_gpus": ("gpus",),
    # LoRA
    "lora": ("use_lora",),
    "use_peft": ("use_lora",),
    "rank": ("lora_r",),
    "lora_rank": ("lora_r",),
    "network_dim": ("lora_r",),
    "network_alpha": ("lora_alpha",),
    "target_modules": ("lora_target_modules",),
    "lora_path": ("pretrained_lora_path", "checkpoint_path"),
    # sampling
    "cfg": ("guidance_scale",),
    "cfg_scale": ("guidance_scale",),
    "guidance": ("guidance_scale",),
    "shift": ("timestep_shift",),
    "flow_shift": ("timestep_shift",),
    "sampling_steps": ("num_sampling_steps", "num_inference_steps"),
    "num_steps": ("num_sampling_steps", "num_inference_steps"),
    "num_inference_steps": ("num_sampling_steps",),
    "frames": ("num_frames",),
    "num_samples": ("num_videos",),
    "size": ("fixed_size", "height"),
    "resolution": ("height",),
    "noise_level": ("eta",),
    # objective and reward
    "beta": ("kl_weight",),
    "kl_beta": ("kl_weight",),
    "kl_ratio": ("kl_weight",),
    "epsilon": ("clip_range",),
    "clip_eps": ("clip_range",),
    "clip_ratio": ("clip_range",),
    "adv_clip": ("adv_clip_max",),
    "reward": ("reward_model", "score"),
    "reward_fn": ("reward_model", "score"),
    "reward_funcs": ("reward_model", "score"),
    # intervals and logs
    "logging_steps": ("log_interval",),
    "save_steps": ("save_interval",),
    "save_freq": ("save_interval",),
    "checkpointing_steps": ("save_interval",),
    "checkpoints_total_limit": ("keep_checkpoints",),
    "eval_steps": ("validation_interval",),
    "eval_freq": ("validation_interval",),
    "validation_steps": ("validation_interval",),
    "logger": ("report_to",),
}


def flags_for(name: str, known: Collection[str]) -> list[str] | None:
    """The flags among `known` that go by `name` elsewhere, best first; None if the table does not have that name.

    Names come with hyphens in front, or without; so do the known ones.
    """
    plain_name = name.lstrip("-")
    hyphens = name[: len(name) - len(plain_name)]
    candidates = OTHER_NAMES.get(plain_name.replace("-", "_").lower())
    if candidates is None:
        return None
    return [hyphens + flag for flag in candidates if hyphens + flag in known]
