"""Keys of other trainers and their names here: data alone, read by `dhp.config.vocabulary`.

L is LLaMA-Factory, S ms-swift, T transformers' TrainingArguments, M names that several others use (Megatron,
torchtitan, TRL, PEFT).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Foreign:
    """One row. theirs: names, separated by spaces. of: letters of the trainers. here: our keys, separated by spaces;
    none: there is no such key. say: what to bear in mind, or why there is none.
    """

    theirs: str
    of: str
    here: str = ""
    say: str = ""

    @property
    def names(self) -> list[str]:
        return self.theirs.split()

    @property
    def keys(self) -> list[str]:
        return self.here.split()


def _both(key: str) -> str:
    return f"vision.{key} text.{key}"


_ADAMW = "the optimizer is AdamW; training.betas, eps and weight_decay are its keys"
_OTHER_OPTIMIZER = "AdamW over all that is trained is the only optimizer; ZeRO stages and LoRA save memory"
_OTHER_ADAPTER = "of adapters there is LoRA (with DoRA and rank stabilization) alone"
_QUANTIZED = "of quantized weights there is lora.quantization=nf4 alone, in four bits with scales in eight"
_SUPERVISED = "training is supervised, on answers alone; there are no preferences, rewards or rollouts"
_NO_GENERATION = "answers during training are greedy and not scored; export a checkpoint for more"
_NO_HUB = "nothing is uploaded; `python -m dhp export` writes a directory to upload"
_HUB_LOGIN = "`huggingface-cli login` or HF_TOKEN say who you are"
_BY_TEMPLATE = "the chat template says where answers are, and no other token is learned"
_ALWAYS = "it is always so"
_BY_ITSELF = "it is set by itself"
_NOT_STREAMED = "files are read sample by sample at their place, so nothing is streamed, tokenized ahead or cached"

# By topic, in the order of the page.
FOREIGN: dict[str, tuple[Foreign, ...]] = {
    "The model": (
        Foreign("model_name_or_path model model_id_or_path model_id base_model vision_tower", "LSM", "text.model_name", "vision.model_name may be left out"),
        Foreign("model_type processor_type llm_type model_class", "SM", "", "the model's config.json says its type"),
        Foreign("torch_dtype", "SM", _both("dtype")),
        Foreign("bf16 pure_bf16 use_bf16", "LST", _both("dtype"), "set to bfloat16; the optimizer keeps float32 weights"),
        Foreign("fp16", "LST", _both("dtype"), "float16 is not there, bfloat16 is"),
        Foreign("mixed_precision", "M", _both("dtype")),
        Foreign("attn_implementation attn_impl flash_attn use_flash_attn", "LSM", _both("attention_backend")),
        Foreign("torch_compile torch_compile_backend torch_compile_mode", "T", _both("compile"), "true or false, layer by layer"),
        Foreign(
            "enable_liger_kernel use_liger_kernel liger_kernel_config use_unsloth use_unsloth_gc tuner_backend use_v1_kernels use_kt kt_config kt_cpu_activation cross_entropy_loss_fusion bias_activation_fusion apply_rope_fusion moe_permute_fusion moe_grouped_gemm moe_shared_expert_overlap experts_impl", "LSTM", "",
            "no other kernels are put in; compile fuses small operations",
        ),
        Foreign("trust_remote_code custom_register_path external_plugins", "LSM", "", "nothing executes code that comes with a model or data"),
        Foreign("model_revision use_hf hub_token hf_hub_token ms_hub_token om_hub_token hub_revision", "LST", "", f"models are Hugging Face's or a directory; {_HUB_LOGIN}"),
        Foreign("cache_dir", "LM", "data.cache_dir", "of measured lengths; HF_HOME says where models are kept"),
        Foreign("rope_scaling max_model_len", "LS", "", "the model's config.json says it; edit it there"),
        Foreign("resize_vocab add_tokens add_special_tokens new_special_tokens new_special_tokens_config special_tokens pad_token eos_token eot_tokens", "LS", "", "add tokens to the model with transformers before, and save it"),
        Foreign("quantization_bit quant_bits load_in_4bit bnb_4bit_quant_type", "LSM", _both("lora.quantization"), "nf4, for the matrices beside LoRA; on GPUs"),
        Foreign("quant_config quantization_method quantization_type double_quantization quantization_device_map load_in_8bit quant_method bnb_4bit_compute_dtype bnb_4bit_use_double_quant", "LSM", "", _QUANTIZED),
        Foreign("fp8 fp8_backend", "LM", "", "float8 is planned; bfloat16 is there"),
        Foreign("device_map max_memory low_cpu_mem_usage offload_folder", "LS", "", "each rank loads its own slices; num_actors and the degrees say which"),
        Foreign("use_fast_tokenizer split_special_tokens use_cache use_kv_cache", "LT", "", _BY_ITSELF),
        Foreign("num_query_tokens drop_path_rate vision_select_layer mm_vision_select_layer mm_vision_select_feature mm_projector_type mm_use_im_start_end mm_use_im_patch_token mm_patch_merge_type mm_hidden_size down_sample_ratio ps_version mtp_num_layers", "M", "", "the model's config.json says how it is built; a checkpoint is trained as it was made"),
        Foreign("train_from_scratch init_strategy", "LS", "", "weights are loaded; save a model of random ones to begin with them"),
    ),
    "What is trained": (
        Foreign("finetuning_type train_type tuner_type sft_type", "LS", "training.trainable vision.lora.rank text.lora.rank", "full is what there is without further keys; freeze by training.trainable or frozen, LoRA by a rank"),
        Foreign("freeze_vision_tower freeze_vit freeze_vision freeze_backbone freeze_vision_backbone", "LSM", "training.frozen", "[vision]; vision and projector are frozen apart"),
        Foreign("freeze_multi_modal_projector freeze_aligner freeze_projector freeze_merger freeze_mlp freeze_mm_mlp_adapter", "LSM", "training.frozen", "[projector]"),
        Foreign("freeze_language_model freeze_llm", "LSM", "training.frozen", "[text]"),
        Foreign("train_mm_proj_only tune_mm_mlp_adapter", "LM", "training.trainable", "[projector]"),
        Foreign("freeze_mm_modules freeze_mm_vision_tower", "M", "training.frozen", "[vision, projector], or one of them"),
        Foreign("tune_mm_vision tune_mm_mlp tune_mm_llm tune_vision tune_llm mm_tunable_parts unfreeze_mm_vision_tower unfreeze_vis_layers", "M", "training.trainable", "each switch is one of [vision, projector, text]; list those that are on"),
        Foreign("freeze freeze_parameters freeze_parameters_regex", "SM", "training.frozen", "parts and patterns over parameter names"),
        Foreign("trainable_parameters trainable_parameters_regex freeze_trainable_modules freeze_extra_modules", "LS", "training.trainable", "parts and patterns over parameter names"),
        Foreign("freeze_trainable_layers freeze_parameters_ratio", "LS", "training.trainable", "a pattern over the names of the layers"),
        Foreign("vit_lr vision_lr vision_tower_lr", "SM", "training.groups.<name>.learning_rate", "of a group whose parameters are [vision]"),
        Foreign("aligner_lr merger_lr projector_lr", "SM", "training.groups.<name>.learning_rate", "of a group whose parameters are [projector]"),
        Foreign("optim_target_modules", "T", "training.groups.<name>.parameters"),
        Foreign("lora_rank lora_r", "LSM", _both("lora.rank"), "0: no LoRA"),
        Foreign("lora_alpha", "LSM", _both("lora.alpha")),
        Foreign("lora_dropout", "LSM", _both("lora.dropout")),
        Foreign("lora_target lora_target_modules target_modules target_regex target_parameters", "LSM", _both("lora.targets")),
        Foreign("use_dora", "LSM", _both("lora.dora")),
        Foreign("use_rslora", "LSM", _both("lora.rslora")),
        Foreign("use_lora peft use_peft lora_enable use_llm_lora use_backbone_lora llm_lora", "M", _both("lora.rank")),
        Foreign("adapter", "M", _both("lora.rank"), "there is LoRA alone; qlora is lora.quantization=nf4 beside"),
        Foreign("vision_lora", "M", "vision.lora.rank", "0: no LoRA"),
        Foreign("num_lora_modules lora_namespan_exclude lora_target_linear", "M", _both("lora.targets"), "patterns over names of the matrices"),
        Foreign("additional_target modules_to_save", "LS", "training.trainable", "beside LoRA, these are trained whole"),
        Foreign("loraplus_lr_ratio lorap_lr_ratio loraplus_lr_embedding", "LS", "training.groups.<name>.learning_rate", "of a group of the lora_B parameters"),
        Foreign("adapter_name_or_path adapters adapter_folder lora_model_dir lora_weight_path create_new_adapter ref_adapters", "LS", "", "training goes on from a checkpoint (training.resume); merge another trainer's adapter into the model before"),
        Foreign("oft_target oft_rank oft_block_size pissa_init pissa_iter pissa_convert init_weights lora_bias lora_dtype use_llama_pro llamapro_num_new_blocks lisa_activated_layers adalora_target_r adalora_init_r vera_rank boft_block_size fourier_n_frequency reft_rank", "LS", "", _OTHER_ADAPTER),
    ),
    "Data": (
        Foreign("dataset train_dataset train_files data_files meta_path dataset_use dataset_name dataset_config dataset_kwargs dataset_train_split test_datasets", "LSM", "data.datasets data.data_registry", "names in the one, where they lie in the other"),
        Foreign("dataset_dir", "L", "data.data_registry.<name>.annotation_path", "there is no dataset_info.json: each dataset says where it lies and how it is read"),
        Foreign("media_dir image_folder image_dir video_folder image_root", "LM", "data.data_registry.<name>.data_path"),
        Foreign("formatting", "L", "data.data_registry.<name>.format"),
        Foreign("columns", "LS", "data.data_registry.<name>.columns", "our names on the left, the file's on the right (ms-swift has them the other way round)"),
        Foreign("template conv_style version prompt_template chat_template_type chat_template_jinja tokenizer_chat_template", "LSM", "data.chat_template", "a Jinja file; null: the model's own, which is what fits it"),
        Foreign("use_chat_template template_backend default_system_template", "LS", "data.chat_template", "conversations are always written by a Jinja template"),
        Foreign("system default_system system_prompt", "LSM", "data.system_prompt", "a sample's own goes before it"),
        Foreign("enable_thinking loss_scale add_non_thinking_prefix", "LS", "data.learn_empty_thoughts", "every answer counts with weight 1, or 0 by the row's own mask; empty thoughts that a template writes are not learned by default"),
        Foreign("train_on_eos roles_to_train train_on_prompt mask_history train_on_inputs completion_only_loss assistant_only_loss train_on_responses_only ignore_pad_token_for_loss", "LM", "", _BY_TEMPLATE),
        Foreign("tool_format agent_template tools", "LS", "", "tool calls are not read"),
        Foreign("cutoff_len max_length max_seq_len max_seq_length model_max_length sequence_len", "LSM", "data.max_tokens", "a longer sample is refused or skipped, never cut"),
        Foreign("truncation_strategy", "S", "data.on_bad_sample", "of a sample beyond data.max_tokens: error or skip (as delete); nothing is cut"),
        Foreign("strict", "S", "data.on_bad_sample", "error or skip"),
        Foreign("packing neat_packing padding_free sample_packing use_packing packing_cache packing_strategy use_packed_ds data_flatten data_packing", "LSM", "data.packing", "samples of a row do not see each other; data.balance fills rows evenly"),
        Foreign("padding_side pad_to_sequence_len pad_to_multiple_of", "SM", "data.packing", "rows are packed, or else padded on the right"),
        Foreign("group_by_length train_sampling_strategy length_column_name", "LSTM", "data.balance", "length_group, or better balanced"),
        Foreign("max_samples", "L", "data.datasets", "name%50 uses half of a dataset"),
        Foreign("interleave_probs interleave_prob mix_strategy stopping_strategy", "LS", "data.data_registry.<name>.weight", "how often an epoch shows each sample"),
        Foreign("dataset_shuffle train_dataloader_shuffle disable_shuffling shuffle_dataset shuffle_merged_datasets", "LS", "data.shuffle"),
        Foreign("data_seed", "ST", "seed", "one for data and training"),
        Foreign("full_determinism", "ST", "training.deterministic", "a run is repeatable to the bit on a CPU anyway"),
        Foreign("lazy_preprocess dataset_prepared_path skip_prepare_dataset dataset_streaming streaming buffer_size shuffle_buffer_size overwrite_cache load_from_cache_file tokenized_path cached_dataset preprocessing_batch_size packing_length", "LS", "", _NOT_STREAMED),
        Foreign("lazy_tokenize remove_unused_columns label_names dataloader_drop_last dataloader_in_order accelerator_config dispatch_batches", "STM", "", "samples are preprocessed as steps need them, and none is dropped"),
        Foreign("dataloader_num_workers preprocessing_num_workers dataset_num_proc num_workers", "LSTM", "data.num_workers"),
        Foreign("dataloader_prefetch_factor prefetch_factor", "STM", "data.prefetch", "in steps, over all workers"),
        Foreign("dataloader_pin_memory", "ST", "data.pin_memory"),
        Foreign("dataloader_persistent_workers dataloader_multiprocessing_context", "ST", "", "samples come from actors through shared memory"),
        Foreign("ignore_data_skip", "ST", "", "a resumed run goes on with the sample after the last one"),
    ),
    "Pictures, videos, sound": (
        Foreign("image_max_pixels max_image_pixels", "LM", "data.max_pixels", "width × height"),
        Foreign("image_min_pixels min_image_pixels", "LM", "data.min_pixels"),
        Foreign("video_min_pixels", "LM", "data.min_pixels", "of images and frames alike"),
        Foreign("image_resolution force_image_size image_size image_resized_height image_resized_width video_resized_height video_resized_width", "LM", "data.max_pixels", "an area, not a side"),
        Foreign("max_slice_nums max_dynamic_patch", "M", "data.max_tiles", "of an image, a thumbnail not counted"),
        Foreign("video_maxlen fps_max_frames max_frames nframes frames_upbound video_max_frames_num max_num_frame", "LSM", "data.video_max_frames"),
        Foreign("fps", "SM", "data.video_fps"),
        Foreign("video_total_pixels", "SM", "data.video_max_pixels", "of one frame"),
        Foreign("audio_sampling_rate sampling_rate use_audio_in_video", "LS", "audio.num_actors", "1 or more has the model hear; its feature extractor says the rate, and a video's own sound is not read"),
        Foreign("image_do_pan_and_scan crop_to_patches norm_bbox model_kwargs image_aspect_ratio image_grid_pinpoints dynamic_image_size use_thumbnail scale_resolution slice_config", "LS", "", "the model's processor_config.json says it; boxes are text"),
    ),
    "Batch and length of the run": (
        Foreign("gradient_accumulation_steps", "LSTM", "training.batch_size", "samples a step over all replicas, which training.micro_batch_size cuts into as many micro-batches as it takes"),
        Foreign("per_device_train_batch_size micro_batch_size_per_gpu", "LSTM", "training.micro_batch_size", "samples that one text replica holds at a time"),
        Foreign("global_batch_size train_batch_size", "M", "training.batch_size"),
        Foreign("auto_find_batch_size", "LT", "", "a dry run (training.dry_run=true) tells the memory that weights take"),
        Foreign("num_train_epochs max_epochs epochs", "LSTM", "training.num_epochs"),
        Foreign("evals_per_epoch", "M", "training.eval_steps", "steps between two evaluations"),
        Foreign("train_steps total_steps max_train_steps train_iters", "M", "training.max_steps"),
    ),
    "Optimizer": (
        Foreign("lr", "M", "training.learning_rate"),
        Foreign("lr_scheduler", "M", "training.lr_scheduler_type"),
        Foreign("lr_scheduler_kwargs min_lr", "LSTM", "training.lr_scheduler_type", "constant, linear or cosine, down to 0"),
        Foreign("lr_warmup_steps num_warmup_steps", "M", "training.warmup_steps"),
        Foreign("adam_beta1 adam_beta2", "LST", "training.betas", "both in one list"),
        Foreign("adam_epsilon", "LST", "training.eps"),
        Foreign("gradient_clipping clip_grad", "M", "training.max_grad_norm"),
        Foreign("optim optim_args optimizer", "LSTM", "", _ADAMW),
        Foreign("use_galore galore_rank galore_target galore_scale use_apollo apollo_rank use_badam badam_mode use_adam_mini use_muon", "LS", "", _OTHER_OPTIMIZER),
        Foreign("loss_type label_smoothing_factor neftune_noise_alpha enable_dft_loss use_dft_loss enable_channel_loss use_eaft_loss", "LST", "", "the loss is cross-entropy over all targets of a step"),
        Foreign("average_tokens_across_devices", "ST", "", f"{_ALWAYS}: each target counts alike, whatever its rank and micro-batch"),
        Foreign("router_aux_loss_coef moe_aux_loss_coef moe_expert_capacity_factor", "LS", "", "a router's auxiliary loss is not added"),
    ),
    "Memory and parallelism": (
        Foreign("deepspeed deepspeed_config zero zero_stage_config", "LSTM", _both("zero_stage"), "1 to 3, each part's own; what else DeepSpeed needs is set by itself, and nothing is offloaded"),
        Foreign("fsdp fsdp_config fsdp_num", "LST", "vision.zero_stage text.zero_stage vision.zero_engine text.zero_engine", "stage 3 with engine fsdp is full sharding"),
        Foreign("zero_hpz_partition_size", "S", _both("zero_stage"), "over all replicas of a part"),
        Foreign("gradient_checkpointing use_gradient_checkpointing vit_gradient_checkpointing", "LSTM", _both("activation_checkpointing"), "or recompute for a choice of layers"),
        Foreign("disable_gradient_checkpointing use_reentrant_gc gradient_checkpointing_kwargs activation_checkpointing_kwargs", "LST", _both("recompute")),
        Foreign("recompute_granularity recompute_method recompute_num_layers recompute_modules", "SM", _both("recompute"), "which layers, and what of them"),
        Foreign("activation_offloading optimizer_cpu_offload optimizer_offload_fraction use_precision_aware_optimizer offload_model", "SM", "", "nothing is offloaded; ZeRO stages, recompute and LoRA save memory"),
        Foreign("use_distributed_optimizer", "SM", _both("zero_stage"), "1"),
        Foreign("upcast_layernorm upcast_lmhead_output", "L", _both("dtype"), "gradients are summed in float32 as it is"),
        Foreign("tf32 torch_empty_cache_steps", "T", "", _BY_ITSELF),
        Foreign("sequence_parallel_size ulysses_size ulysses_degree context_parallel_size cp_size", "LSM", "text.ulysses text.ring vision.ulysses vision.ring", "of each part by itself; text.parallelism=sequence splits the decoder's"),
        Foreign("tensor_model_parallel_size tensor_parallel_size tp_size", "M", "text.tensor vision.tensor"),
        Foreign("deepspeed_autotp_size", "S", "text.parallelism", "autotp, and text.tensor"),
        Foreign("pipeline_model_parallel_size pipeline_parallel_size pp_size", "M", "text.pipeline", "and training.schedule"),
        Foreign("expert_model_parallel_size expert_parallel_size ep_size", "M", "text.expert"),
        Foreign("data_parallel_size dp_size dp_shard dp_replicate parallelism_config", "TM", "vision.data text.data"),
        Foreign("nproc_per_node nnodes num_processes world_size num_gpus dist_config", "M", "vision.num_actors text.num_actors", "each part its own"),
        Foreign("use_ray ray_num_workers ray_exp_name ray_run_name ray_storage_path device_groups", "LS", "cluster.address", "a run is always on Ray"),
        Foreign("resources_per_worker placement_strategy", "L", "cluster.collocate"),
        Foreign("master_addr master_port node_rank", "M", "cluster.address", "Ray finds its nodes: ray start on each, then auto or HOST:PORT"),
        Foreign("ddp_timeout", "LST", "cluster.step_timeout_s", "seconds"),
        Foreign("ddp_backend ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph local_rank", "LST", "", _BY_ITSELF),
        Foreign("use_cpu no_cuda", "T", "cluster.device"),
    ),
    "Evaluation": (
        Foreign("eval_dataset val_dataset eval_data_path eval_dataset_name test_dataset", "LSM", "data.eval_datasets"),
        Foreign("val_size split_dataset_ratio", "LS", "data.eval_datasets", "name a dataset of its own; none is split off"),
        Foreign("eval_steps eval_on_start eval_delay", "LST", "training.eval_steps", "steps between two evaluations"),
        Foreign("eval_strategy evaluation_strategy do_eval", "LST", "training.eval_steps", "null: nothing is evaluated"),
        Foreign("per_device_eval_batch_size eval_batch_size eval_accumulation_steps", "LSTM", "training.micro_batch_size", "evaluation takes the same"),
        Foreign("metric_for_best_model greater_is_better load_best_model_at_end", "LST", "training.best_metric"),
        Foreign("predict_with_generate do_predict", "LST", "training.eval_answers", "how many; shown with their references, not scored"),
        Foreign("max_new_tokens", "LST", "training.eval_answer_tokens"),
        Foreign("eval_num_beams compute_accuracy generation_config", "LST", "", _NO_GENERATION),
        Foreign("prediction_loss_only include_for_metrics batch_eval_metrics eval_do_concat_batches eval_use_gather_object bf16_full_eval fp16_full_eval val_dataset_shuffle eval_on_each_dataset", "LST", "", "evaluation is the mean loss of the targets of each dataset of data.eval_datasets"),
    ),
    "Saving and resuming": (
        Foreign("output_dir", "LSTM", "run_dir"),
        Foreign("overwrite_output_dir", "LST", "overwrite"),
        Foreign("add_version", "S", "run_dir", "has the start's time in it unless you set it"),
        Foreign("save_strategy", "LST", "training.save_steps", "null: at the end alone; training.save_epochs=1: after each epoch; training.save_final=false: not at the end"),
        Foreign("save_total_limit", "LST", "training.save_total_limit"),
        Foreign("resume_from_checkpoint", "LST", "training.resume"),
        Foreign("saves_per_epoch", "M", "training.save_epochs", "1: after each epoch; training.save_steps for more"),
        Foreign("no_save_optim no_save_rng finetune", "SM", "", "a run that goes on (training.resume) needs all of its checkpoint; one from new weights names them as text.model_name"),
        Foreign("save_only_model resume_only_model save_safetensors", "LST", "", "a checkpoint holds weights (safetensors) and optimizer; `python -m dhp export` gives the weights alone"),
        Foreign("export_dir export_size merge_lora", "LS", "", "`python -m dhp export RUN OUT_DIR`"),
        Foreign("save_on_each_node enable_jit_checkpoint restore_callback_states_from_checkpoint", "LST", "", "checkpoints are written once, to training.checkpoint_dir, which all nodes see"),
        Foreign("push_to_hub hub_model_id hub_private_repo hub_strategy hub_always_push", "LST", "", _NO_HUB),
    ),
    "Logging": (
        Foreign("report_to use_swanlab use_wandb wandb", "LSTM", "training.loggers", "wandb, mlflow, swanlab; TensorBoard files and metrics.jsonl are always written"),
        Foreign("run_name swanlab_run_name wandb_run_name experiment_name", "LSTM", "name"),
        Foreign("project swanlab_project wandb_project wandb_entity wandb_watch wandb_log_model wandb_name swanlab_workspace swanlab_mode swanlab_api_key trackio_space_id trackio_bucket_id trackio_static_space_id", "LTM", "training.loggers", "each logger's own environment variables say the project, the mode and the key"),
        Foreign("logging_steps", "LST", "training.log_interval", "metrics.jsonl has every step"),
        Foreign("logging_dir", "LST", "run_dir", "TensorBoard files are in run_dir/tb"),
        Foreign("logging_strategy logging_first_step log_on_each_node logging_nan_inf_filter log_level log_level_replica disable_tqdm plot_loss print_param_status include_num_input_tokens_seen include_tokens_per_second include_num_tokens include_effective_tokens_per_second skip_memory_metrics", "LST", "training.log_interval", "of printed lines; all figures of every step are in metrics.jsonl"),
        Foreign("profile profiler enable_profiler", "M", "training.trace"),
        Foreign("debug", "T", "", "what each rank printed is in run_dir/logs"),
    ),
    "Other kinds of training": (
        Foreign("stage do_train task_type train_stage", "LSTM", "", "a run trains, supervised; there is nothing to choose"),
        Foreign("rlhf_type pref_beta pref_ftx pref_loss sample_backend dpo_label_smoothing kto_chosen_weight kto_rejected_weight simpo_gamma ppo_epochs ppo_buffer_size ppo_target ref_model reward_model reward_model_type reward_funcs num_generations", "LS", "", _SUPERVISED),
        Foreign("num_labels problem_type", "S", "", "models that generate text are trained, no classifiers"),
        Foreign("dataset_text_field", "M", "data.data_registry", "an entry's format is text, and its columns name the key, as {text: content}"),
        Foreign("ignore_args_error load_args config", "S", "", "a run is `python -m dhp.train_ray FILE.yaml`, and a key that does not exist is refused"),
    ),
}  # fmt: skip

# Variables that scripts of other trainers set; here the environment changes no setting.
ENVIRONMENT: tuple[Foreign, ...] = (
    Foreign("NPROC_PER_NODE NNODES", "S", "vision.num_actors text.num_actors", "each part its own, over all nodes"),
    Foreign("MAX_PIXELS IMAGE_MAX_PIXELS", "SM", "data.max_pixels", "width × height"),
    Foreign("MIN_PIXELS IMAGE_MIN_PIXELS", "SM", "data.min_pixels", "width × height"),
    Foreign("IMAGE_MAX_TOKEN_NUM", "S", "data.max_pixels", "an area: tokens × 28 × 28 for Qwen2.5-VL, × 32 × 32 for Qwen3-VL"),
    Foreign("IMAGE_MIN_TOKEN_NUM VIDEO_MIN_TOKEN_NUM", "S", "data.min_pixels", "an area: tokens × 28 × 28 for Qwen2.5-VL, × 32 × 32 for Qwen3-VL"),
    Foreign("VIDEO_MAX_PIXELS VIDEO_TOTAL_PIXELS", "SM", "data.video_max_pixels", "of one frame"),
    Foreign("VIDEO_MIN_PIXELS", "S", "data.min_pixels", "of images and frames alike"),
    Foreign("VIDEO_MAX_TOKEN_NUM", "S", "data.video_max_pixels", "an area of one frame: tokens × 28 × 28 for Qwen2.5-VL, × 32 × 32 for Qwen3-VL"),
    Foreign("FPS_MAX_FRAMES NFRAMES", "S", "data.video_max_frames"),
    Foreign("FPS", "S", "data.video_fps"),
    Foreign("FPS_MIN_FRAMES", "S", "", "at least 4 frames of a video are taken"),
    Foreign("MAX_NUM", "S", "", "the model's processor says how many tiles a picture has"),
    Foreign("ENABLE_AUDIO_OUTPUT USE_AUDIO_IN_VIDEO", "S", "", "answers are text, and a video's own sound is not read"),
    Foreign("SYSTEM_PROMPT", "S", "data.system_prompt"),
)  # fmt: skip
