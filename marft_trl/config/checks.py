# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Check training arguments, alone and in combination, and set defaults that depend on other arguments."""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

import torch
from transformers import GenerationConfig

from ..algorithms.baselines import BASELINES, CREDITS
from ..algorithms.rows import LEVELS
from ..seams.trl import LOSSES
from ..system.hints import did_you_mean
from .options import INHERITED, Option, check_choice, check_number, collect_rules, has_effect


logger = logging.getLogger(__name__)  # accelerate's logger needs a state that the arguments create

CISPO_EPSILON_HIGH = 5.0  # as TRL recommends after ScaleRL (2510.13786)


def set_dependent_defaults(config: Any) -> None:
    if config.ddp_backend is not None and not _is_distributed(config.use_cpu):
        # accelerate would look for a process group that does not exist
        logger.warning(f"`ddp_backend={config.ddp_backend!r}` has no effect with a single process.")
        config.ddp_backend = None
    if config.ddp_broadcast_buffers is None:
        config.ddp_broadcast_buffers = False  # a collective in `forward`, which processes do not call equally often
    if config.loss_type is None:
        config.loss_type = LEVELS[config.level].loss_type if config.level in LEVELS else "dapo"
    if config.loss_type == "cispo" and config.epsilon_high is None:
        # `GRPOTrainer` would use `epsilon` = 0.2 as the maximum ratio, which is below almost every ratio
        config.epsilon_high = CISPO_EPSILON_HIGH
        logger.warning(f"`loss_type='cispo'` sets `epsilon_high`, the maximum ratio, to {CISPO_EPSILON_HIGH}.")
    if has_turn_ratio(config) and "use_bias_correction_kl" not in config.given:
        config.use_bias_correction_kl = False  # it would weight the KL of every token by the ratio of the turn
    if config.credit_kind is None:
        uses_reruns = config.credit in CREDITS and CREDITS[config.credit].reruns
        config.credit_kind = "rewards" if config.advantage == "gae" and not uses_reruns else "returns"
    if config.skip_rows_without_signal is None:
        config.skip_rows_without_signal = config.share_prefixes
    if config.continue_from is None and uses_candidates(config):
        config.continue_from = BASELINES[config.advantage].default_continue_from


def _is_distributed(use_cpu: bool) -> bool:
    """Return `True` if a launcher started this process, according to the variables that accelerate reads."""
    variables = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
    has_several_processes = any(int(os.environ.get(name, 1)) > 1 for name in variables)
    is_launched = has_several_processes or (not use_cpu and "LOCAL_RANK" in os.environ)
    return torch.distributed.is_initialized() or is_launched


EPISODE_RETRIES = 2  # maximum number of retries of a failed call, with `on_episode_error="retry"`

# Loss types that do not weight a turn by its number of tokens, or do so by design
_ACTION_LEVEL_LOSSES = tuple(name for name, loss in LOSSES.items() if loss.supports_actions)


def has_turn_ratio(args: Any) -> bool:
    return args.level in LEVELS and LEVELS[args.level].ratio == "sequence"


def completes_candidates(args: Any) -> bool:
    """`True` if candidates for a turn are compared by completing the episode from each of them."""
    return uses_candidates(args) and BASELINES[args.advantage].completes_episodes


def uses_candidates(args: Any) -> bool:
    return args.advantage in BASELINES and BASELINES[args.advantage].uses_candidates


# Settings of earlier versions or of TRL that `MARFTConfig` does not have, and what replaces them
_REMOVED_SETTINGS = {
    "max_prompt_length": "prompts are not truncated; `context_overflow` covers prompts that are too long",
    "critic_max_grad_norm": "`max_grad_norm` also applies to the critic",
    "dynamic_sampling_limit": "at most three times the prompts of a batch are drawn",
    "collapse_window": "`eval_reward` is compared with the best evaluation so far",
    "collapse_drop": "a collapse is a drop of `eval_reward` by more than 10 %",
    "max_tool_output_length": "tool results are truncated at 4096 characters; return only what the agent should see",
    "max_parallel_tools": "synchronous tools run one at a time; write tools that may run concurrently as `async def`",
    "candidate_reward": "`advantage='turn_itself'` replaces `advantage='turn'` with `candidate_reward='turn'`",
    "max_episode_retries": "a failed call is retried twice",
    "mixed_passes": "rows of several agents share passes in generation only",
    "max_unscored_batches": "a `TrainerCallback` may stop training by `frac_unscored`",
}


def check_names(names: Iterable[str], known: Sequence[str]) -> None:
    """Raise a `TypeError` with the nearest setting, or the replacement, if a name is not a setting."""
    for name in names:
        if name in _REMOVED_SETTINGS:
            raise TypeError(
                f"`MARFTConfig` no longer has the setting `{name}`: {_REMOVED_SETTINGS[name]}. Leave it out."
            )
        if name not in known:
            raise TypeError(f"`MARFTConfig` has no setting `{name}`.{did_you_mean(name, known)}")


def check_numbers(args: Any) -> None:
    for name, rule in collect_rules(type(args), INHERITED).items():
        if rule.bounds or rule.integer:
            check_number(name, getattr(args, name), rule)
    # The argument parser of transformers replaces the types of fields, but not the annotations
    classes = reversed(type(args).__mro__)
    annotations = {name: value for cls in classes for name, value in vars(cls).get("__annotations__", {}).items()}
    for field in fields(args):
        value = getattr(args, field.name)
        is_flag = isinstance(field, Option) and annotations.get(field.name) in ("bool", "bool | None", bool)
        or_none = ", or None" if field.default is None else ""
        if is_flag and not (isinstance(value, bool) or (value is None and or_none)):  # texts such as "no" are true
            raise ValueError(f"`{field.name}` must be True or False{or_none}; got {value!r}.")
    weights = args.reward_weights
    is_list = isinstance(weights, Sequence) and all(isinstance(weight, (int, float)) for weight in weights)
    if weights is not None and not is_list:
        raise ValueError(f"`reward_weights` must be a list of numbers, one for each reward function; got {weights!r}.")
    if not all(map(math.isfinite, weights or ())):
        raise ValueError(f"`reward_weights` must be finite numbers, one for each reward function; got {weights!r}.")


def check_values(args: Any) -> None:
    for name, rule in collect_rules(type(args), INHERITED).items():
        if rule.choices is not None:
            check_choice(name, getattr(args, name), rule.known)


def check_combinations(args: Any) -> None:
    """Raise a `ValueError` with a fix if settings contradict each other, or one disables another."""
    conflicts = _critic_conflicts(args) | _level_conflicts(args) | _credit_conflicts(args) | _order_conflicts(args)
    for message, applies in (conflicts | _sampling_conflicts(args) | _failure_conflicts(args)).items():
        if applies:
            of_preset, names = args.preset_settings, dict.fromkeys(re.findall(r"`(\w+)[`=]", message))
            sets = ", ".join(f"`{name}={of_preset[name]!r}`" for name in names if name in of_preset)
            raise ValueError(message + (f" `preset={args.preset!r}` sets {sets}." if sets else ""))
    rules, defaults = collect_rules(type(args), INHERITED), type(args).__dataclass_fields__
    for name in sorted(args.given & rules.keys(), key=list(defaults).index):
        if getattr(args, name) == defaults[name].default:
            continue
        for other, required in rules[name].only_if:
            if has_effect(args, name, other, required, rules):
                continue
            # Credit rules that re-run episodes always compute returns, so setting `credit_kind` would not help
            can_set = not (other == "credit_kind" and CREDITS[args.credit].reruns)
            fix = f"Set `{other}={required!r}`, or leave `{name}` out." if can_set else f"Leave `{name}` out."
            raise ValueError(
                f"`{name}={getattr(args, name)!r}` has no effect with `{other}={getattr(args, other)!r}`. {fix}"
            )


# Conflicts of settings: each message, and whether it applies


def _critic_conflicts(args: Any) -> dict[str, bool]:
    has_one_episode = args.generation_batch_size == 1
    is_gae, has_critic, warmup = args.advantage == "gae", args.critic is not None, args.critic_warmup_steps
    normalizes = is_gae and has_turn_ratio(args) and args.normalize_advantages != "none"
    baseline = BASELINES.get(args.advantage)
    needs_group = baseline is not None and baseline.needs_group
    or_instead = ", or set `normalize_advantages='none'`" if is_gae else ""
    return {
        "`advantage='gae'` needs a critic, but `critic` is None. Set `critic='shared'`.": is_gae and not has_critic,
        f"`critic={args.critic!r}` predicts values that `advantage={args.advantage!r}` does not use. Set "
        "`advantage='gae'`, or leave `critic` out.": has_critic and not is_gae,
        f"`critic_warmup_steps={warmup}` needs a critic, but `critic` is None. Set "
        "`advantage='gae', critic='shared'`, or leave `critic_warmup_steps` out.": warmup > 0 and not has_critic,
        f"`num_generations=1` needs a critic: `advantage={args.advantage!r}` compares at least 2 episodes of a "
        "prompt. Set `advantage='gae', critic='shared'`, "
        "or `num_generations` to 2 or more.": needs_group and args.num_generations == 1,
        f"`advantage={args.advantage!r}` compares several candidates for a turn, but `turn_candidates` is "
        f"{args.turn_candidates}. Set it to 2 or more.": uses_candidates(args) and args.turn_candidates < 2,
        "`advantage='c3'` compares alternatives at observations that the policy reaches by sampling, but "
        "`continue_from='best'` continues every episode from the best alternative. Set `continue_from='sampled'`, "
        "or `advantage='turn'`.": args.advantage == "c3" and args.continue_from == "best",
        f"`remove_unused_columns=True` keeps only the column `prompt`, but `rae_column={args.rae_column!r}` reads "
        "another column. "
        "Set `remove_unused_columns=False`.": args.rae_column is not None and args.remove_unused_columns,
        "`rae_decay=1.0` keeps the baseline of `advantage='rae'` at 0 forever. "
        "Set it to a number below 1.": args.advantage == "rae" and args.rae_decay == 1,
        "A generation batch of one episode (`per_device_train_batch_size=1`) has no other episode to compare "
        f"with, so training with `advantage={args.advantage!r}` would learn nothing. Raise "
        f"`per_device_train_batch_size`{or_instead}.": (has_one_episode and (args.advantage == "batch" or normalizes)),
        f"`critic_warmup_steps` ({warmup}) is above `max_steps` ({args.max_steps}), so no agent "
        "would be trained. Lower `critic_warmup_steps`, or raise `max_steps`.": 0 < args.max_steps < warmup,
    }


def _level_conflicts(args: Any) -> dict[str, bool]:
    is_per_turn = has_turn_ratio(args)
    is_per_token = args.advantage == "gae" and not is_per_turn
    loss_type, masks = args.loss_type, args.off_policy_mask_threshold is not None
    return {
        f"`loss_type={loss_type!r}` weights a turn by its number of tokens, but at `level='action'` a turn "
        "is one action. Use one of "
        f"{', '.join(map(repr, _ACTION_LEVEL_LOSSES))}.": is_per_turn and loss_type not in _ACTION_LEVEL_LOSSES,
        f"`epsilon_high={args.epsilon_high}` is the maximum ratio of `loss_type='cispo'`, and a value below 1 "
        "scales every gradient down. Set it to 5.0, or leave it out.": loss_type == "cispo" and args.epsilon_high < 1,
        "`importance_sampling_level='sequence'` means `level='action'` with `action_logprob='token'`. Set these, "
        "and leave `importance_sampling_level` out.": is_per_turn and args.importance_sampling_level == "sequence",
        "`advantage='gae'` at `level='token'` computes an advantage per token, but "
        "`importance_sampling_level='sequence'` uses one ratio per turn. "
        "Set `level='action'`.": is_per_token and args.importance_sampling_level == "sequence",
        f"`loss_type={loss_type!r}` with `off_policy_mask_threshold={args.off_policy_mask_threshold}` needs "
        "one advantage per turn, but `advantage='gae'` at `level='token'` computes one per token. Set "
        "`level='action'`, or use another `loss_type` "
        "without `off_policy_mask_threshold`.": is_per_token and (LOSSES[loss_type].needs_same_advantage or masks),
        "`use_bias_correction_kl` at `level='action'` would weight the KL of every token by the ratio of the "
        "whole turn, which is unbounded. Leave it out.": is_per_turn and args.beta > 0 and args.use_bias_correction_kl,
        f"`top_entropy_quantile={args.top_entropy_quantile}` trains only some tokens of a turn, but at "
        "`level='action'` a turn is one action. "
        "Set `level='token'`, or leave `top_entropy_quantile` out.": is_per_turn and args.top_entropy_quantile < 1.0,
        "`target_kl` needs the policy ratio, which `use_policy_ratio=False` disables. "
        "Leave one of them out.": not args.use_policy_ratio and args.target_kl is not None,
        "`off_policy_mask_threshold` is not supported with `level='action'`. Set `target_kl` instead.": (
            is_per_turn and masks
        ),
    }


def _credit_conflicts(args: Any) -> dict[str, bool]:
    baseline, rule = BASELINES.get(args.advantage), CREDITS[args.credit]
    per_objective = baseline is not None and baseline.takes_normalized_objectives
    return {
        f"`scale_rewards='batch'` has no effect with `advantage={args.advantage!r}`: it applies only to "
        f"{', '.join(repr(name) for name, entry in BASELINES.items() if entry.scales)}. "
        "Leave it out.": args.scale_rewards == "batch" and not (baseline is not None and baseline.scales),
        f"`credit={args.credit!r}` scores every turn by the outcome of the whole episode, so summing over turns "
        "(`credit_kind='rewards'`) would credit an agent for its teammates' turns. "
        "Set `credit_kind='returns'`.": rule.reruns and args.credit_kind == "rewards",
        f"`advantage={args.advantage!r}` scores each candidate for a turn separately, so there is nothing for "
        f"`credit={args.credit!r}` to divide. "
        "Use `credit='equal'` or `'per_step'`.": uses_candidates(args) and args.credit not in ("equal", "per_step"),
        f"`candidate_samples={args.candidate_samples}` completes several episodes from each candidate, but "
        "`advantage='turn_itself'` scores candidates without completing the episode. Leave `candidate_samples` "
        "out, or set `advantage='turn'`.": args.candidate_samples > 1 and not completes_candidates(args),
        f"`advantage={args.advantage!r}` computes the return of every candidate, so `credit_kind='rewards'` does "
        "not apply. Leave `credit_kind` out.": uses_candidates(args) and args.credit_kind == "rewards",
        "`multi_objective_aggregation='normalize_then_sum'` normalizes rewards over a group of episodes, which "
        f"needs `advantage='group'` or `'agent'` and `credit='equal'`; got `advantage={args.advantage!r}`, "
        f"`credit={args.credit!r}`.": (
            args.multi_objective_aggregation == "normalize_then_sum" and not (per_objective and args.credit == "equal")
        ),
    }


def _order_conflicts(args: Any) -> dict[str, bool]:
    micro_steps, accumulation = args.steps_per_generation * args.num_iterations, args.gradient_accumulation_steps
    is_on_policy = accumulation % micro_steps == 0
    updates_in_turn, interval = args.update_order != "joint", args.agent_iteration_interval
    least, most = args.entropy_coef_min, args.entropy_coef_max
    return {
        f"`target_kl={args.target_kl}` has no effect: with `num_iterations={args.num_iterations}` and "
        f"`steps_per_generation={args.steps_per_generation}` every update is the first on its episodes, so the "
        "policy has not moved. "
        "Raise one of them, or leave `target_kl` out.": args.target_kl is not None and is_on_policy,
        f"`update_order={args.update_order!r}` and `agent_iteration_interval={interval}` "
        "both set which agent is trained in a step. Leave one of them out.": updates_in_turn and interval > 0,
        f"`agent_iteration_interval` ({interval}) leaves no step of `max_steps` "
        f"({args.max_steps}) for the second agent. Lower it, or raise `max_steps`.": 0 < args.max_steps <= interval,
        f"`update_order={args.update_order!r}` trains every agent for whole optimizer steps on a generation "
        f"batch, so `steps_per_generation * num_iterations` ({micro_steps}) must be a multiple of "
        f"`gradient_accumulation_steps` ({accumulation}).": updates_in_turn and micro_steps % accumulation != 0,
        f"`update_order='sequential'` multiplies ratios along an episode, but with `advantage={args.advantage!r}` "
        "most rows are candidates outside the episode. "
        "Use `update_order='joint'` or `'resampled'`.": args.update_order == "sequential" and uses_candidates(args),
        "`sync_ref_model=True` has no effect with `beta=0.0`: the reference is not used. Leave it out, or set "
        "`beta` to a number above 0.": args.sync_ref_model and args.beta == 0.0,
        f"`entropy_coef_min` ({least}) is above `entropy_coef_max` ({most}). "
        "Lower `entropy_coef_min`, or raise `entropy_coef_max`.": args.use_adaptive_entropy and least > most,
    }


def _sampling_conflicts(args: Any) -> dict[str, bool]:
    if not args.dynamic_sampling:
        return {}
    baseline = BASELINES.get(args.advantage)
    is_relative = baseline is not None and (baseline.needs_group or baseline.uses_candidates)
    return {
        "`dynamic_sampling=True` skips prompts whose episodes all have the same reward, but with "
        f"`advantage={args.advantage!r}` such episodes still give a gradient. Set `advantage='group'`, 'agent', "
        "'leave_one_out', 'turn', 'turn_itself' or 'c3', or leave `dynamic_sampling` out.": not is_relative,
        "`dynamic_sampling=True` skips prompts whose episodes all have the same reward, but with "
        f"`credit={args.credit!r}` their turns still differ. Set `credit='equal'`, or leave `dynamic_sampling` "
        "out.": args.credit != "equal",
        "`dynamic_sampling=True` draws further prompts once the rewards of a batch are known, but "
        f"`max_staleness={args.max_staleness}` samples batches ahead of training. Set `max_staleness=0`, or leave "
        "`dynamic_sampling` out.": args.max_staleness > 0,
    }


def _failure_conflicts(args: Any) -> dict[str, bool]:
    restores = args.on_collapse == "restore"
    return {
        f"`on_episode_error={args.on_episode_error!r}` does not support candidates for turns "
        "(`advantage='turn'`, `'turn_itself'`, `'c3'`) or re-runs (`credit='counterfactual'`, `'removed'`): training "
        "would use them even if their episode failed. Set `on_episode_error='raise'`.": (
            args.on_episode_error != "raise" and (uses_candidates(args) or CREDITS[args.credit].reruns)
        ),
        "`on_collapse='restore'` restores the adapters of the best evaluation, but this run has none. Set "
        "`eval_strategy='steps'` and pass an `eval_dataset`.": restores and args.eval_strategy == "no",
        "`on_collapse='restore'` restores adapters, but not the references that follow them "
        "(`sync_ref_model=True`), which would pull the adapters back to the collapsed policy. Set "
        "`on_collapse='warn'`, or `sync_ref_model=False`.": restores and args.sync_ref_model,
    }


def check_timeouts(args: Any, process_timeout: float | None) -> None:
    """Raise a `ValueError` if a function may hang for longer than other processes wait, `process_timeout` seconds."""
    if process_timeout is None:
        return
    tries = EPISODE_RETRIES + 1 if args.on_episode_error == "retry" else 1
    for name in ("reward_timeout", "workflow_timeout", "tool_timeout"):
        limit = getattr(args, name)
        if limit is not None and limit * tries >= process_timeout:
            times = f" times {tries} tries" if tries > 1 else ""
            raise ValueError(
                f"`{name}` ({limit:g} s{times}) must be below the {process_timeout:g} s that the other processes wait "
                f"(`ddp_timeout`). Otherwise they fail without naming the function that hangs. Lower `{name}`, or "
                "raise `ddp_timeout`."
            )


# Settings, and arguments of `generate`, that MARFTTrainer does not support: the reason and a fix
_UNSUPPORTED = {
    "save_only_model": "a run could not resume from such checkpoints. Set it to False.",
    "ignore_data_skip": "a resumed run would train on different rows. Set it to False.",
    "use_transformers_continuous_batching": "it serves one policy for all requests. Set it to False.",
    "include_for_metrics": "evaluations have no predictions. Leave it out.",
    "neftune_noise_alpha": "turns would be sampled with one noise and scored with another. Leave it out.",
}
_UNSUPPORTED_GENERATION_KWARGS = {
    "num_return_sequences": "every turn is one completion. Set `num_generations`, or leave it out.",
    "stop_strings": "pass `AgentSpec(stop=...)`, which also ends the turn there.",
    "return_dict_in_generate": "a turn is a list of token ids. Leave it out.",
}


def environment_flag_is_set(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in ("true", "1")


def check_engine(args: Any) -> None:
    """Raise a `ValueError` if the engine matches gradients of processes by position (`benchmarks/devices/zero.py`)."""
    stage = None
    if args.deepspeed or environment_flag_is_set("ACCELERATE_USE_DEEPSPEED"):
        stage = getattr(getattr(args, "deepspeed_plugin", None), "zero_stage", None)
        name = "DeepSpeed" if stage is None else f"DeepSpeed ZeRO {stage}"
    elif environment_flag_is_set("ACCELERATE_USE_MEGATRON_LM"):
        name = "Megatron"
    else:
        return
    fsdp2 = (
        "FSDP2, `accelerate launch --use_fsdp --fsdp_version 2 --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP` "
        "(docs/reference/sharding.md)"
    )
    advice = "" if stage is None else "Stages below 3 do not shard a frozen base. "
    advice += f"Use plain data parallelism, `accelerate launch --multi_gpu`, or to shard the base, {fsdp2}."
    if stage == 3:
        advice = f"To shard the base, use {fsdp2}."
    raise ValueError(
        f"MARFTTrainer does not support {name}, which reduces gradients as if all processes trained the same "
        f"parameters in a pass. Here, processes may train the adapters of different agents. {advice}"
    )


# Types of fields of transformers and TRL that are numbers
_NUMBERS = {int, float, "int | None", "float | None", int | None, float | None}


def check_texts(args: Any) -> None:
    """Raise a `ValueError` for a text where a number is needed, before transformers computes with it."""
    for field in fields(args):
        value = getattr(args, field.name)
        if isinstance(value, str) and field.type in _NUMBERS:
            raise ValueError(f"`{field.name}` must be a number, got {value!r}.")


def check_supported(args: Any) -> None:
    """Raise a `ValueError` with a fix for settings of [`~trl.GRPOConfig`] that a team does not support."""
    for name, reason in _UNSUPPORTED.items():
        if getattr(args, name):
            raise ValueError(f"`{name}={getattr(args, name)!r}` is not supported by MARFTTrainer: {reason}")
    accumulation = getattr(args.accelerator_config, "gradient_accumulation_kwargs", None) or {}
    if (num_steps := accumulation.get("num_steps")) not in (None, args.gradient_accumulation_steps):
        raise ValueError(
            f"`gradient_accumulation_kwargs` of `accelerator_config` has `num_steps={num_steps!r}`, but generation "
            f"batches are made for `gradient_accumulation_steps={args.gradient_accumulation_steps}`. Set only "
            "`gradient_accumulation_steps`."
        )
    generation = args.generation_kwargs if isinstance(args.generation_kwargs, dict) else {}
    known = GenerationConfig().to_dict()
    if unknown := [name for name in generation if name not in known]:
        raise ValueError(
            f"`generation_kwargs` has {unknown[0]!r}, which is not a setting of `GenerationConfig` and would have no "
            f"effect.{did_you_mean(unknown[0], known)}"
        )
    for name, reason in _UNSUPPORTED_GENERATION_KWARGS.items():
        value = generation.get(name)
        if value not in (None, 1, False):
            raise ValueError(f"`generation_kwargs` has `{name}={value!r}`, not supported by MARFTTrainer: {reason}")
    if generation.get("num_beams") not in (None, 1):
        logger.warning(
            f"`generation_kwargs` has `num_beams={generation['num_beams']!r}`: beam search returns the most "
            "likely turn, not a sample of the policy, so the policy gradient is biased, completions of a prompt "
            "differ less, and a saved team, which samples, answers differently. Leave `num_beams` out to sample."
        )
