"""Every setting has an effect, is refused, or is listed as unused."""

import dataclasses
import hashlib
import re
import shutil
from pathlib import Path

from marft_trl import AgentSpec, MARFTConfig
from marft_trl.config.options import UNUSED
from marft_trl.tiny import tiny_agents, tiny_dataset

import pytest
import torch
from transformers.utils import logging as transformers_logging

from .helpers import lora, team_trainer, varied_reward, weights


CRITIC = {"advantage": "gae", "critic": "shared"}
MOVED = {"num_iterations": 2, "learning_rate": 0.05}  # ratios far from 1
EVALUATED = {"eval_strategy": "steps", "eval_steps": 1, "num_generations_eval": 2, "per_device_eval_batch_size": 8}
SAVED = {"save_strategy": "steps", "save_steps": 1}
BEST = {**EVALUATED, **SAVED, "load_best_model_at_end": True, "max_steps": 4, "metric_for_best_model": "reward"}
ONE_PASS = {"max_steps": -1, "num_train_epochs": 1}
REFERENCE = {"beta": 0.5, "learning_rate": 0.05, "max_steps": 3}
SYNCED = {**REFERENCE, "sync_ref_model": True, "ref_model_sync_steps": 1}
ENTROPY = {"use_adaptive_entropy": True, "max_steps": 4, "entropy_target": 9.0}
CANDIDATES = {"advantage": "turn"}
WORKERS = {"dataloader_num_workers": 1}


def alike(effect, *names):
    return dict.fromkeys(names, effect)


# Settings whose effect shows in a single process on the CPU: a value, and the settings it needs
ACTS = {
    "output_dir": ("elsewhere", {}),
    **alike((4, {}), "per_device_train_batch_size", "max_completion_length"),
    "num_train_epochs": (2, {"max_steps": -1, "per_device_train_batch_size": 64}),
    "max_steps": (3, {}),
    **alike((1e-2, {}), "learning_rate", "adam_epsilon"),
    "lr_scheduler_type": ("constant", {}),
    "lr_scheduler_kwargs": ({"num_cycles": 2}, {"lr_scheduler_type": "cosine_with_restarts", "max_steps": 4}),
    **alike((1, {}), "warmup_steps", "seed", "dataloader_num_workers", "agent_iteration_interval"),
    "optim": ("sgd", {}),
    "optim_args": ("momentum=0.5", {"optim": "sgd"}),
    **alike((0.5, {}), "weight_decay", "adam_beta1", "adam_beta2", "temperature", "top_p", "min_p"),
    **alike((0.5, {}), "top_entropy_quantile", "entropy_coef"),
    **alike((2, {}), "gradient_accumulation_steps", "logging_steps", "steps_per_generation", "top_k"),
    "num_iterations": (2, {}),
    "max_grad_norm": (0.01, {"optim": "sgd"}),
    "bf16": (True, {"use_cpu": True}),
    **alike((True, {}), "activation_checkpointing", "gradient_checkpointing", "full_determinism", "use_cache"),
    **alike((True, {}), "disable_dropout", "log_completions", "dynamic_sampling"),
    "activation_checkpointing_kwargs": ({"use_reentrant": True}, {"activation_checkpointing": True}),
    "gradient_checkpointing_kwargs": ({"use_reentrant": True}, {"gradient_checkpointing": True}),
    "logging_strategy": ("no", {}),
    "logging_first_step": (True, {"logging_steps": 2}),
    "include_num_input_tokens_seen": ("all", {}),
    "log_level": ("debug", {}),
    **alike((False, {}), "disable_tqdm", "dataloader_pin_memory", "skip_memory_metrics", "shuffle_dataset"),
    **alike((False, {}), "share_prefixes", "skip_rows_without_signal"),
    "eval_strategy": ("steps", {"eval_steps": 1}),
    **alike((2, EVALUATED), "eval_steps", "eval_delay"),
    **alike((4, EVALUATED), "per_device_eval_batch_size", "num_generations_eval"),
    "eval_on_start": (True, EVALUATED),
    "save_strategy": ("epoch", {**ONE_PASS, "per_device_train_batch_size": 64}),
    "save_steps": (2, SAVED),
    "save_total_limit": (1, SAVED),
    "load_best_model_at_end": (True, {**BEST, "load_best_model_at_end": False}),
    "metric_for_best_model": ("eval_agents/actor/completions/mean_length", BEST),
    "greater_is_better": (False, BEST),
    "accelerator_config": ({"even_batches": False}, {}),
    "dataloader_drop_last": (True, {**EVALUATED, "per_device_eval_batch_size": 12}),
    "dataloader_persistent_workers": (True, WORKERS),
    "dataloader_prefetch_factor": (3, WORKERS),
    "dataloader_multiprocessing_context": ("spawn", WORKERS),
    "dataloader_in_order": (False, WORKERS),
    "model_init_kwargs": ({"dtype": "bfloat16"}, {}),
    "num_generations": (8, {}),
    "generation_batch_size": (16, {}),
    "generation_kwargs": ({"top_k": 2}, {}),
    "repetition_penalty": (2.0, {}),
    "cache_implementation": ("static", {}),
    "beta": (0.5, {"learning_rate": 0.05}),
    "epsilon": (0.01, MOVED),
    "delta": (1.01, MOVED),
    "epsilon_high": (0.9, MOVED),
    **alike((3.0, {**MOVED, "loss_type": "sapo"}), "sapo_temperature_neg", "sapo_temperature_pos"),
    **alike((4.0, {**MOVED, "loss_type": "vespo"}), "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg"),
    "vespo_lambda_neg": (4.0, {**MOVED, "loss_type": "vespo"}),
    "importance_sampling_level": ("sequence", MOVED),
    "reward_weights": ([2.0], {"scale_rewards": "none"}),
    "multi_objective_aggregation": ("normalize_then_sum", {"reward_weights": [1.0, 3.0]}),
    "scale_rewards": ("none", {}),
    "loss_type": ("grpo", {}),
    "mask_truncated_completions": (True, {"max_completion_length": 6}),
    "sync_ref_model": (True, {**REFERENCE, "ref_model_sync_steps": 1}),
    "ref_model_mixup_alpha": (0.1, SYNCED),
    "ref_model_sync_steps": (2, SYNCED),
    "use_adaptive_entropy": (True, {"max_steps": 4, "entropy_target": 9.0}),
    "entropy_coef_min": (0.5, {**ENTROPY, "entropy_target": 0.2, "entropy_coef": 1.0, "entropy_coef_delta": 1.0}),
    "entropy_coef_max": (0.001, ENTROPY),
    "entropy_coef_delta": (0.5, ENTROPY),
    "entropy_target": (0.2, ENTROPY),
    "off_policy_mask_threshold": (0.001, MOVED),
    "use_bias_correction_kl": (False, {**MOVED, "beta": 0.5}),
    "num_completions_to_print": (1, {"log_completions": True}),
    "eval_sampling": ({"temperature": 0.1}, EVALUATED),
    "eval_k": ([1, 2], EVALUATED),
    "preset": ("dr-mas", {}),
    "advantage": ("leave_one_out", {}),
    "returns": ("agent", {}),
    "rae_decay": (0.1, {"advantage": "rae", "max_steps": 4}),
    "rae_column": ("source", {"advantage": "rae", "max_steps": 4}),
    "level": ("action", {}),
    "action_logprob": ("token", {**MOVED, "level": "action"}),
    "use_policy_ratio": (False, MOVED),
    "critic": ("multi_head", CRITIC),
    "normalize_values": (True, CRITIC),
    **alike((0.5, CRITIC), "gamma", "token_gamma"),
    **alike((0.1, CRITIC), "gae_lambda", "token_gae_lambda", "critic_learning_rate"),
    "normalize_advantages": ("none", CRITIC),
    "critic_warmup_steps": (1, CRITIC),
    "value_clip": (0.001, {**CRITIC, "num_iterations": 2, "critic_learning_rate": 0.1}),
    "value_loss": ("squared", {**CRITIC, "reward_weights": [30.0]}),
    "credit": ("step_discount", {}),
    "credit_discount": (0.1, {"credit": "step_discount"}),
    "credit_kind": ("returns", {**CRITIC, "credit": "step_discount"}),
    "own_reward_weight": (0.1, {"credit": "per_step"}),
    "counterfactual_samples": (2, {"credit": "counterfactual"}),
    **alike((2, CANDIDATES), "turn_candidates", "candidate_samples"),
    "target_kl": (1e-6, MOVED),
    "agent_weight": ("equal", {}),
    "update_order": ("sequential", {}),
    "sequential_clip": (0.01, {"update_order": "sequential", "learning_rate": 0.05}),
    "max_tokens_per_micro_batch": (64, {}),
}
# Settings that are always refused, or refused because of what this machine or run lacks
REFUSED = {
    "auto_find_batch_size": (True, "not supported"),
    "save_only_model": (True, "`save_only_model=True`.*could not resume from such checkpoints"),
    "ignore_data_skip": (True, "`ignore_data_skip=True`.*different rows"),
    "include_for_metrics": (["inputs"], "no predictions"),
    "neftune_noise_alpha": (5.0, "neftune_noise_alpha=5.0.*scored with another"),
    "use_transformers_continuous_batching": (True, "`use_transformers_continuous_batching=True`.*one policy"),
    "use_transformers_paged": (True, "one policy"),
    "cast_lm_head_to_fp32": (True, "with tied embeddings"),
    "router_aux_loss_coef": (0.1, "not a Mixture-of-Experts model"),
    "fsdp": ("full_shard", "accelerate has no device to shard a model on"),
    "max_staleness": (1, "use_vllm=True"),
    "log_completions_hub_repo": ("me/logs", "log_completions"),
    "torch_compile": (True, "share_prefixes=False"),
    "torch_compile_backend": ("eager", "share_prefixes=False"),
    "torch_compile_mode": ("default", "share_prefixes=False"),
}
# Settings whose effect is asserted in other files
ELSEWHERE = {
    **alike("test_persistence.py", "push_to_hub", "hub_model_id", "hub_token", "hub_strategy", "hub_always_push"),
    "chat_template_kwargs": "test_persistence.py",
    **alike("test_resume.py", "resume_from_checkpoint", "resume_changes"),
    "parallelism_config": "test_sharding.py",
    **alike("test_failures.py", "ddp_timeout", "tool_timeout", "workflow_timeout", "reward_timeout"),
    **alike("test_failures.py", "on_episode_error", "max_skipped_share", "max_episode_turns"),
    "on_collapse": "test_collapse.py",
    **alike("test_samples.py", "eval_right_at", "eval_right_by"),
    **alike("test_validation.py", "ddp_backend", "remove_unused_columns", "trust_remote_code"),
    **alike("test_tools.py", "max_tool_calls", "max_tool_calling_iterations", "context_overflow"),
    "continue_from": "test_own_returns.py",
    "critic_sees": "test_central_critic.py",
    "eval_reference_column": "test_evaluation.py",
    "show_reasoning": "test_reasoning.py",
    "completions_total_limit": "test_transcripts.py",
    "use_vllm": "test_vllm.py",
}
# Settings that cannot take effect here, and where they do
OUTSIDE = {
    **alike("a GPU", "fp16", "fp16_full_eval", "bf16_full_eval", "tf32", "use_cpu", "torch_empty_cache_steps"),
    **alike("packages for GPUs", "use_liger_kernel", "liger_kernel_config", "optim_target_modules", "deepspeed"),
    **alike("several machines", "save_on_each_node", "log_on_each_node", "log_level_replica"),
    **alike("several processes", "ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers"),
    "ddp_static_graph": "several processes",
    "fsdp_config": "FSDP2 on GPUs",
    **alike("trackers", "report_to", "run_name", "project", "log_unique_prompts", "trackio_space_id"),
    **alike("trackers", "trackio_bucket_id", "trackio_static_space_id"),
    **alike("the Hub", "hub_private_repo", "hub_revision"),
    "restore_callback_states_from_checkpoint": "callbacks with state",
    **alike("numbers that overflow", "debug", "logging_nan_inf_filter"),
}
_TIMES = re.compile(r"time|per_second|_memory|_mem_")
_PRINTED_TIMES = re.compile(r"[\d.]+ (s|min)\b")


def test_no_setting_is_left_out():
    kinds = [ACTS.keys(), REFUSED.keys(), UNUSED.keys(), ELSEWHERE.keys(), OUTSIDE.keys()]
    names = [field.name for field in dataclasses.fields(MARFTConfig)]
    assert sorted(name for kind in kinds for name in kind) == sorted(names)
    for name, file in ELSEWHERE.items():
        assert re.search(rf"\b{name}\b", (Path(__file__).parent / file).read_text()), f"{file} has no {name}"


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_are_refused(model_folder, tmp_path, name):
    value, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        team_trainer(model_folder, tmp_path, settings={name: value})


def _rare(completions, **kwargs):
    return [float(sum(map(ord, str(completion))) % 5 == 0) for completion in completions]


def _length(completions, **kwargs):
    return [float(len(str(completion))) for completion in completions]


def _arguments(name: str, settings: dict) -> dict:
    """Arguments of the trainer that a setting needs to have an effect."""
    agents, arguments = tiny_agents(), {}
    if "multi_objective" in name or "reward_weights" in settings:
        arguments["reward_funcs"] = [varied_reward, _length][: len(settings.get("reward_weights", [1.0, 1.0]))]
    if name.startswith("dynamic") or name == "skip_rows_without_signal":
        arguments["reward_funcs"] = _rare
    if settings.get("credit") == "per_step":
        agents = [dataclasses.replace(agent, reward_funcs=_length) for agent in agents]
    if name == "agent_weight":
        agents = [dataclasses.replace(agent, adapter="both") for agent in agents]
    if "max_completion_length" in (name, *settings):
        agents = [AgentSpec("reasoner"), AgentSpec("actor")]
    if name == "disable_dropout":
        arguments["peft_config"] = lora(lora_dropout=0.5)
    if "eval_strategy" in (name, *settings):
        arguments["eval_dataset"] = tiny_dataset(8)
    rows = tiny_dataset(64)
    return {**arguments, "agents": agents, "train_dataset": rows.add_column("source", ["a", "b"] * 32)}


def _course(model: str, folder: Path, name: str, settings: dict) -> dict:
    """Everything that a run computes, logs and writes, except times."""
    transformers_logging.set_verbosity_warning()
    torch.use_deterministic_algorithms(False)
    trainer = team_trainer(model, folder, settings=settings, **_arguments(name, settings))
    trainer.train()
    loader, optimizer = trainer.get_train_dataloader(), trainer.optimizer.optimizer
    base = next(parameter for key, parameter in trainer.model.named_parameters() if "lora" not in key)
    data = b"".join(tensor.float().numpy().tobytes() for _, tensor in sorted(weights(trainer).items()))
    context = getattr(loader, "multiprocessing_context", None)
    functions = [getattr(module, "_gradient_checkpointing_func", None) for module in trainer.model.modules()]
    return {
        "weights": hashlib.sha256(data).hexdigest(),
        "logs": [{key: log[key] for key in log if not _TIMES.search(key)} for log in trainer.state.log_history],
        "memory": sorted({key for row in trainer.state.log_history for key in row if "_mem_" in key}),
        "files": sorted(str(path) for path in folder.parent.rglob("*") if path.is_file()),
        "optimizer": str([{**group, "params": len(group["params"])} for group in optimizer.param_groups]),
        "loader": [getattr(loader, key, None) for key in ("num_workers", "prefetch_factor", "persistent_workers")],
        "workers": (getattr(loader, "in_order", None), loader.pin_memory, context and context.get_start_method()),
        "accelerator": f"{trainer.accelerator.dataloader_config} {trainer.accelerator.mixed_precision}",
        "model": (base.dtype, trainer.model.is_gradient_checkpointing, trainer.model.config.use_cache),
        "checkpointing": str([function.keywords for function in functions if function is not None]),
        "process": (torch.are_deterministic_algorithms_enabled(), transformers_logging.get_verbosity()),
        "callbacks": [type(callback).__name__ for callback in trainer.callback_handler.callbacks],
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ACTS, "nothing"])
def test_every_setting_acts(model_folder, tmp_path, capsys, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    value, needed = ACTS.get(name, (None, BEST))
    courses = []
    for settings in ({**needed}, {**needed, name: value} if name in ACTS else {**needed}):
        folder = tmp_path / settings.pop("output_dir", "run")
        folder.mkdir()
        course = _course(model_folder, folder, name, settings)
        courses.append({**course, "output": _PRINTED_TIMES.sub("", capsys.readouterr().out)})
        shutil.rmtree(folder)
    torch.use_deterministic_algorithms(False)
    transformers_logging.set_verbosity_warning()
    acts = courses[0] != courses[1]
    assert acts == (name in ACTS), f"`{name}={value!r}` has no effect" if name in ACTS else "two runs differ"
