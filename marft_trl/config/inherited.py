# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""The rules of settings that `GRPOConfig` and `TrainingArguments` declare (TRL 1.16, transformers 5.23)."""

from __future__ import annotations

from .options import ABOVE_0, AT_LEAST_0, AT_MOST_1, Rule


def _about(what: str, *names: str) -> dict[str, Rule]:
    return {name: Rule(about=what) for name in names}


# A setting without a line here may be anything, and is compared by a resumed run; so is one that a later version adds
INHERITED: dict[str, Rule] = {
    **dict.fromkeys(
        (
            *("beta", "epsilon_high", "max_grad_norm", "delta", "entropy_coef", "entropy_coef_min"),
            *("entropy_coef_max", "entropy_coef_delta", "entropy_target", "weight_decay", "router_aux_loss_coef"),
            *("off_policy_mask_threshold", "num_train_epochs"),
        ),
        Rule((AT_LEAST_0,)),
    ),
    **dict.fromkeys(
        (
            *("temperature", "sapo_temperature_neg", "sapo_temperature_pos", "repetition_penalty"),
            "adam_epsilon",
        ),
        Rule((ABOVE_0,)),
    ),
    **dict.fromkeys(
        (
            *("num_generations", "num_iterations", "steps_per_generation", "max_completion_length"),
            "max_tool_calling_iterations",
        ),
        Rule((ABOVE_0,), integer=True),
    ),
    "epsilon": Rule((AT_LEAST_0,), needed=True),
    "top_p": Rule((ABOVE_0, AT_MOST_1)),
    "min_p": Rule((AT_LEAST_0, AT_MOST_1)),
    "scale_rewards": Rule(choices=("group", "batch", "none")),
    "importance_sampling_level": Rule(choices=("token", "sequence")),
    "multi_objective_aggregation": Rule(choices=("sum_then_normalize", "normalize_then_sum")),
    "vllm_server_timeout": Rule((ABOVE_0,), needed=True, about="machines"),
    **_about(
        "files",
        *("output_dir", "overwrite_output_dir", "run_name", "project", "resume_from_checkpoint"),
        *("save_only_model", "save_strategy", "save_steps", "save_on_each_node", "save_total_limit"),
        *("push_to_hub", "hub_token", "hub_private_repo", "hub_model_id", "hub_strategy", "hub_always_push"),
        *("hub_revision", "enable_jit_checkpoint", "restore_callback_states_from_checkpoint"),
        *("logging_strategy", "logging_steps", "logging_first_step", "logging_nan_inf_filter", "log_on_each_node"),
        *("log_level", "log_level_replica", "log_completions", "log_completions_hub_repo"),
        *("log_unique_prompts", "num_completions_to_print", "report_to", "disable_tqdm"),
        *("include_num_input_tokens_seen", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"),
        *("debug", "skip_memory_metrics"),
    ),
    **_about(
        "evaluations",
        *("do_train", "do_eval", "do_predict", "per_device_eval_batch_size", "num_generations_eval"),
        *("eval_do_concat_batches", "eval_use_gather_object", "eval_accumulation_steps", "include_for_metrics"),
        *("batch_eval_metrics", "label_names"),
    ),
    **_about(
        "machines",
        *("local_rank", "use_cpu", "torch_empty_cache_steps", "fsdp", "fsdp_config", "deepspeed"),
        *("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph"),
        *("ddp_backend", "ddp_timeout", "parallelism_config"),
        *("dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers"),
        *("dataloader_prefetch_factor", "dataloader_multiprocessing_context", "dataloader_in_order"),
        *("vllm_model_impl", "vllm_enable_sleep_mode", "vllm_server_host", "vllm_server_port"),
        *("vllm_gpu_memory_utilization", "vllm_max_model_length", "vllm_tensor_parallel_size"),
    ),
}
