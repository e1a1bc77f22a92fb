"""Keys that people know from other trainers, and what they are called here, or why there is none."""

_NO_EVALUATION = "nothing is evaluated during training; export a checkpoint and evaluate that"
_ALL_WEIGHTS = "all weights are trained, and none is frozen, adapted or quantized"
_BOTH = ("vision", "text")


def _of_both(key: str) -> str:
    return " and ".join(f"{part}.{key}" for part in _BOTH)


_SAYS = "TensorBoard files in run_dir/tb and metrics.jsonl are always written"

# Last name of a foreign key → the key here.
_HERE = {
    "adam_beta1": "training.betas",
    "adam_beta2": "training.betas",
    "adam_epsilon": "training.eps",
    "attn_implementation": _of_both("attention_backend"),
    "bf16": f"{_of_both('dtype')}, set to bfloat16",
    "fp16": f"{_of_both('dtype')}; float16 is not there, bfloat16 is",
    "mixed_precision": _of_both("dtype"),
    "cutoff_len": "data.max_tokens",
    "max_length": "data.max_tokens",
    "max_seq_len": "data.max_tokens",
    "max_seq_length": "data.max_tokens",
    "model_max_length": "data.max_tokens",
    "dataloader_num_workers": "data.num_workers",
    "dataloader_prefetch_factor": "data.prefetch",
    "dataset": "data.datasets",
    "dataset_dir": "data.data_registry.<name>.data_path",
    "image_folder": "data.data_registry.<name>.data_path",
    "media_dir": "data.data_registry.<name>.data_path",
    "torch_compile": _of_both("compile"),
    "ddp_timeout": "cluster.step_timeout_s",
    "deepspeed": f"{_of_both('zero_stage')}; what else DeepSpeed needs is set by itself",
    "deepspeed_config": f"{_of_both('zero_stage')}; what else DeepSpeed needs is set by itself",
    "zero": _of_both("zero_stage"),
    "fsdp": f"{_of_both('zero_stage')}, which cuts what FSDP cuts",
    "flash_attn": _of_both("attention_backend"),
    "use_flash_attn": _of_both("attention_backend"),
    "gradient_accumulation_steps": "training.batch_size (samples a step), which training.micro_batch_size cuts",
    "gradient_checkpointing": f"{_of_both('activation_checkpointing')}, or recompute for a choice of layers",
    "use_gradient_checkpointing": f"{_of_both('activation_checkpointing')}, or recompute for a choice of layers",
    "global_batch_size": "training.batch_size",
    "train_batch_size": "training.batch_size",
    "per_device_train_batch_size": "training.micro_batch_size",
    "image_max_pixels": "data.max_pixels",
    "image_min_pixels": "data.min_pixels",
    "logging_steps": "training.log_interval",
    "lr": "training.learning_rate",
    "lr_scheduler": "training.lr_scheduler_type",
    "gradient_clipping": "training.max_grad_norm",
    "clip_grad": "training.max_grad_norm",
    "model_name_or_path": "text.model_name",
    "neat_packing": "data.packing",
    "num_train_epochs": "training.num_epochs",
    "train_steps": "training.max_steps",
    "total_steps": "training.max_steps",
    "output_dir": "run_dir",
    "overwrite_output_dir": "overwrite",
    "resume_from_checkpoint": "training.resume",
    "sequence_parallel_size": "vision.ulysses and vision.ring",
    "ulysses_size": "vision.ulysses",
    "tensor_model_parallel_size": "text.tensor",
    "tensor_parallel_size": "text.tensor",
    "tp_size": "text.tensor",
}

# Last name of a foreign key → why there is no such key.
_NOT_HERE = {
    **dict.fromkeys(
        ("do_eval", "eval_batch_size", "eval_dataset", "eval_steps", "eval_strategy", "evaluation_strategy",
         "load_best_model_at_end", "metric_for_best_model", "per_device_eval_batch_size", "val_size"),
        _NO_EVALUATION,
    ),
    **dict.fromkeys(
        ("finetuning_type", "freeze", "freeze_vision_tower", "freeze_vit", "load_in_4bit", "load_in_8bit", "lora",
         "lora_alpha", "lora_dropout", "lora_r", "lora_rank", "lora_target", "peft", "quantization_bit", "use_lora"),
        _ALL_WEIGHTS,
    ),
    **dict.fromkeys(("logging_dir", "report_to", "use_wandb", "wandb", "wandb_project"), _SAYS),
    "optim": "the optimizer is AdamW; training.betas, eps and weight_decay are its keys",
    "optimizer": "the optimizer is AdamW; training.betas, eps and weight_decay are its keys",
    "pipeline_parallel_size": "the two parts are the only stages; training.schedule=vision_ahead overlaps them",
    "pp_size": "the two parts are the only stages; training.schedule=vision_ahead overlaps them",
    "save_total_limit": "old checkpoints are not removed; training.save_steps says how many there are",
    "save_only_model": "a checkpoint always holds the optimizer too; `python -m dhp export` gives the weights alone",
    "streaming": "files are read sample by sample at their place, so there is nothing to switch on",
    "template": "the model directory's own chat template is used",
}  # fmt: skip


def foreign_hint(path: str) -> str:
    """What to say of a key that other trainers have, by its last name; empty when it is none that is known."""
    name = path.rpartition(".")[2].lower()
    if name in _HERE:
        return f"; here it is {_HERE[name]}"
    if name in _NOT_HERE:
        return f"; there is none: {_NOT_HERE[name]}"
    return ""
