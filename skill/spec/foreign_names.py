"""What other trainers call a key: the names of axolotl, Hugging Face, torchtitan and others.

They are no second spelling: a spec that has one is refused, and the message says which key is
meant and how it differs.
"""

from __future__ import annotations

# (key, other names, what the key is where the other name says something else)
MEANT = (
    (
        "precision.param_dtype",
        "dtype torch_dtype bf16 mixed_precision mixed_precision_param precision",
        "forward and backward compute in it: bfloat16 or float32",
    ),
    ("precision.master_dtype", "param_dtype_master full_bf16 pure_bf16", ""),
    ("precision.reduce_dtype", "mixed_precision_reduce grad_reduce_dtype", ""),
    ("precision.fp8", "float8 enable_float8", ""),
    ("model", "architecture", ""),
    ("model.kind", "model_type", ""),
    ("model.preset", "flavor model_size", "the size of a Llama 3, such as 8b"),
    (
        "model.pretrained",
        "base_model model_name_or_path pretrained_model_name_or_path pretrained_model model_name"
        " model_path",
        "a local folder with config.json and weights, of model.kind: transformers",
    ),
    ("model.layers", "num_hidden_layers num_layers n_layers n_layer depth", ""),
    ("model.width", "hidden_size d_model n_embd dim embed_dim", ""),
    ("model.heads", "num_attention_heads num_heads n_heads n_head", ""),
    ("model.kv_heads", "num_key_value_heads num_kv_heads n_kv_heads num_query_groups", ""),
    ("model.ffn", "intermediate_size hidden_dim ffn_dim ffn_hidden_size mlp_dim", ""),
    ("model.vocabulary", "vocab_size vocab n_vocab padded_vocab_size", ""),
    (
        "model.sequence_length",
        "seq_len seqlen seq_length max_seq_len max_seq_length sequence_len max_length block_size"
        " context_length max_position_embeddings cutoff_len",
        "",
    ),
    ("model.norm_eps", "rms_norm_eps layer_norm_epsilon norm_epsilon", ""),
    ("model.tied_embeddings", "tie_word_embeddings weight_tying", ""),
    ("model.window", "sliding_window", ""),
    ("model.experts.number", "num_experts num_local_experts n_routed_experts", ""),
    ("model.experts.top_k", "num_experts_per_tok moe_top_k", ""),
    ("data", "dataset datasets", ""),
    (
        "data.files",
        "path paths data_path data_files dataset_path train_file train_files dataset",
        "local files, folders or globs",
    ),
    ("data.kind", "dataset_type ds_type", ""),
    ("data.packing", "sample_packing pack packed", ""),
    ("data.validation_fraction", "val_set_size validation_split test_size", ""),
    ("data.field", "text_column text_field dataset_text_field", ""),
    ("data.tokenizer", "tokenizer_path tokenizer_name tokenizer_config hf_assets_path", ""),
    ("data.workers", "num_workers dataloader_num_workers", ""),
    ("finetune", "lora peft peft_config", ""),
    ("finetune.kind", "adapter peft_type", ""),
    ("finetune.rank", "r lora_r lora_rank", ""),
    ("finetune.alpha", "lora_alpha", ""),
    ("finetune.dropout", "lora_dropout", ""),
    ("finetune.targets", "lora_target_modules target_modules", ""),
    ("finetune.base_dtype", "load_in_4bit qlora", "nf4 is QLoRA"),
    ("parallel", "parallelism distributed fsdp fsdp_config", ""),
    (
        "parallel.dp_shard",
        "data_parallel_shard_degree dp_shard_size dp_shard_degree fsdp_size",
        "",
    ),
    ("parallel.dp_replicate", "data_parallel_replicate_degree dp_replicate_size dp hsdp", ""),
    ("parallel.tp", "tensor_parallel_degree tensor_parallel_size tp_size tp_degree", ""),
    ("parallel.cp", "context_parallel_degree context_parallel_size cp_size cp_degree", ""),
    ("parallel.ep", "expert_parallel_degree expert_parallel_size ep_size ep_degree", ""),
    (
        "parallel.reshard_after_forward",
        "sharding_strategy zero_stage fsdp_reshard_after_forward",
        "true is FULL_SHARD (ZeRO-3), false SHARD_GRAD_OP (ZeRO-2)",
    ),
    ("parallel.cpu_offload", "offload offload_params fsdp_offload_params enable_cpu_offload", ""),
    (
        "memory.activation_checkpointing",
        "gradient_checkpointing activation_checkpoint ac recompute",
        "none, full or op-selective",
    ),
    ("memory.compile", "torch_compile", ""),
    ("optimizer", "optim", ""),
    ("optimizer.kind", "optimizer_type optim", ""),
    ("optimizer.lr", "learning_rate max_lr peak_lr", ""),
    ("optimizer.betas", "beta1 beta2 adam_beta1 adam_beta2", "both in one list: [0.9, 0.95]"),
    ("optimizer.eps", "epsilon adam_epsilon adam_eps", ""),
    ("schedule", "lr_scheduler scheduler", ""),
    ("schedule.kind", "lr_scheduler_type lr_schedule decay_type", ""),
    ("schedule.warmup_steps", "warmup warmup_ratio lr_warmup_steps warmup_iters", "in steps"),
    ("schedule.min_lr_ratio", "min_lr min_lr_factor lr_min", "a part of optimizer.lr"),
    ("train", "training trainer", ""),
    (
        "train.steps",
        "num_epochs epochs num_train_epochs max_epochs",
        "training is counted in optimizer steps: epochs x samples / train.global_batch",
    ),
    (
        "train.steps",
        "max_steps num_steps total_steps train_steps training_steps max_iters train_iters",
        "",
    ),
    (
        "train.global_batch",
        "batch_size train_batch_size global_batch_size",
        "samples of an optimizer step on all ranks; train.micro_batch are those of one forward"
        " pass on one rank",
    ),
    (
        "train.micro_batch",
        "micro_batch_size local_batch_size per_device_train_batch_size per_device_batch_size"
        " device_batch_size train_micro_batch_size_per_gpu",
        "samples of one forward pass on one rank",
    ),
    (
        "train.global_batch",
        "gradient_accumulation_steps gradient_accumulation grad_accum grad_accumulation_steps"
        " accumulate_grad_batches",
        "accumulation follows from it: train.global_batch / (train.micro_batch x ranks that read)",
    ),
    ("train.max_norm", "max_grad_norm grad_clip clip_grad gradient_clipping grad_norm_clip", ""),
    ("train.log_interval", "logging_steps log_freq log_every log_every_n_steps", ""),
    ("train.validate_interval", "eval_steps eval_interval eval_every val_interval", "in steps"),
    ("checkpoint", "checkpointing", ""),
    ("checkpoint.interval", "save_steps save_interval save_every saves_per_epoch", "in steps"),
    ("checkpoint.keep", "save_total_limit keep_last keep_latest_k", ""),
    ("checkpoint.directory", "output_dir out_dir save_dir checkpoint_dir", ""),
    ("checkpoint.mode", "async async_mode async_save", "thread and process save beside training"),
    ("launch.nodes", "num_nodes nnodes num_machines", ""),
    (
        "launch.devices_per_node",
        "gpus_per_node nproc_per_node num_gpus gpus n_gpus num_processes",
        "",
    ),
    ("launch.device_memory", "gpu_memory", "of one device, such as 80GiB"),
)
# names of what a spec does not have, and why
NOT_OFFERED = (
    (
        "pp pp_size pp_degree pipeline_parallel pipeline_parallel_degree pipeline_parallel_size"
        " pipeline_parallelism",
        "pipeline parallelism is not offered; the dimensions are dp_shard, dp_replicate, tp, cp"
        " and ep",
    ),
    (
        "fp16",
        "float16 is not offered, which needs its loss scaled; write precision.param_dtype:"
        " bfloat16",
    ),
    (
        "load_in_8bit",
        "a base in 8 bits is not offered; finetune.base_dtype: nf4 holds it in 4",
    ),
    (
        "resume_from_checkpoint auto_resume_from_checkpoints",
        "train.py takes it: --resume goes on from the newest checkpoint",
    ),
    ("deepspeed deepspeed_config", "DeepSpeed is not offered: FSDP2 shards the model"),
)
WITH_KINDS = ("model", "data", "finetune", "optimizer", "schedule")
KIND = ("type", "name", "class")
PLAIN = str.maketrans("-. ", "___")


def keys_of(section: str, name: str) -> list[tuple[str, str]]:
    """Each key that another trainer's `name`, found in this section, can stand for, and what it is;
    an empty key where there is none. Those of the section come first.
    """
    plain = name.lower().translate(PLAIN)
    if plain in KIND and section in WITH_KINDS:
        return [(f"{section}.kind", "")]
    found = [(key, what) for key, names, what in MEANT if plain in names.split()]
    found += [("", why) for names, why in NOT_OFFERED if plain in names.split()]
    found = [one for one in found if one[0] != section]
    return sorted(found, key=lambda one: one[0].rpartition(".")[0] != section)
