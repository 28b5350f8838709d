# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Training arguments: every setting, declared once."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from transformers.utils import is_torch_bf16_gpu_available
from trl import GRPOConfig

from ..algorithms.baselines import BASELINES, CREDITS
from ..algorithms.critics import CRITICS
from ..algorithms.rows import LEVELS
from ..seams.libraries import checkpointing_fields
from ..seams.runs import timeout_also_on_cpu
from ..seams.trl import LOSSES, accepting_one_generation
from ..system.hints import did_you_mean
from ..system.redaction import is_published, without_paths, without_secrets
from . import checks
from .options import ABOVE_0, AT_LEAST_0, SHARE, check_choice, documented, option, say_unused
from .presets import PRESETS


class Copies:
    """Mixin: secrets are kept in copies of the config, and removed from files and logs."""

    def __getstate__(self):
        # The Trainer pickles its arguments into `training_args.bin`, which is uploaded, so secrets are removed.
        state = {name: without_secrets(value) for name, value in self.__dict__.items()}
        return {**(without_paths(state) if is_published.get() else state), "hub_token": None}

    def to_dict(self):
        return {name: without_secrets(value) for name, value in super().to_dict().items()}

    def __deepcopy__(self, memo):
        # By default, `copy` uses `__getstate__`, which would remove the token from the copy.
        memo[id(self)] = clone = copy.copy(self)
        clone.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return clone

    def __copy__(self):
        clone = object.__new__(type(self))
        clone.__dict__.update(self.__dict__)
        return clone


@documented
@dataclass
class LimitSettings:
    """
    Limits of episodes, tools and users' code, and what happens where something fails.

    Args:
        context_overflow (`str`, *optional*, defaults to `"raise"`):
            Behavior if an observation plus the agent's `max_completion_length` is longer than the model's window.
            `"raise"`: an error is raised. `"drop_oldest_turn"`: the oldest turns are left out (counted in
            `context/dropped_turns`), and an error is raised only if the prompt alone does not fit. `"end_episode"`:
            the episode ends with the turns it has (counted in `context/ended_episodes`).
        show_reasoning (`bool`, *optional*, defaults to `False`):
            Whether earlier turns, an agent's own and those of teammates, are shown with their reasoning where the chat
            template of the model cuts it off earlier messages (Qwen3, DeepSeek-R1, GPT-OSS).
        max_tool_calls (`int`, *optional*, defaults to `16`):
            Maximum number of tool calls before an agent's final turn. The first call beyond it gets an error message;
            further calls are ignored. If `max_tool_calling_iterations` is set, it also limits how often the agent
            continues after tool results.
        tool_timeout (`float`, *optional*, defaults to `30.0`):
            Maximum time in seconds of one tool call. After it, the agent gets an error message as the result.
        workflow_timeout (`float`, *optional*, defaults to `600.0`):
            Maximum time in seconds that a workflow may wait for something that is neither a turn nor a tool, such as
            an environment. Training then stops with an error. As long as functions called by other episodes keep
            returning, a workflow may queue to call its own; this wait is limited to `workflow_timeout` times the
            number of episodes. `None` disables the limit. With several processes, set it below `ddp_timeout`, the time
            after which the other processes fail.
        reward_timeout (`float`, *optional*, defaults to `900.0`):
            Maximum time in seconds of one call of a reward function. After it, the function has failed, see
            `on_episode_error`. `None` disables the limit. With several processes, it must be below `ddp_timeout`.
        on_episode_error (`str`, *optional*, defaults to `"raise"`):
            What happens if a reward function, a workflow or an environment fails. `"raise"`: the last complete step is
            saved, and training ends with the error. `"skip"`: the episode is left out, or the completion remains
            unscored; both are counted (`episodes/skipped`, `rewards/<name>/skipped`). `"retry"`: it is tried again
            twice, and training ends if it fails again. Tool errors are returned to the agent as
            results, and never end a run.
        max_skipped_share (`float`, *optional*, defaults to `0.5`):
            Largest share of the episodes of a generation batch that may be skipped. Above it, training ends.
        max_episode_turns (`int`, *optional*, defaults to `1000`):
            Maximum number of turns of an episode. A workflow that requests more has failed, see `on_episode_error`.
            `None` disables the limit.
    """

    context_overflow: str = option("raise", choices=("raise", "drop_oldest_turn", "end_episode"))
    show_reasoning: bool = option(False)
    max_tool_calls: int = option(16, ABOVE_0, integer=True)
    tool_timeout: float = option(30.0, ABOVE_0)
    workflow_timeout: float | None = option(600.0, ABOVE_0, none="no limit")
    reward_timeout: float | None = option(900.0, ABOVE_0, none="no limit")
    on_episode_error: str = option("raise", choices=("raise", "skip", "retry"))
    max_skipped_share: float = option(0.5, SHARE)
    max_episode_turns: int | None = option(1000, ABOVE_0, integer=True, none="no limit")


# Sampling settings of an evaluation, with their ranges
_SAMPLING = {"temperature": (0, None), "top_p": (0, 1), "top_k": (0, None), "min_p": (0, 1)}


@documented
@dataclass
class EvaluationSettings:
    """
    Settings of evaluations, in addition to those of [`~trl.GRPOConfig`]. `num_generations_eval` is the number of
    episodes of each question.

    Args:
        eval_sampling (`dict`, *optional*, defaults to `None`):
            Sampling settings of all agents in evaluations, instead of those of training: `temperature`, `top_p`,
            `top_k`, `min_p`. `{"temperature": 0.0}` decodes greedily.
        eval_k (`list[int]`, *optional*, defaults to `None`):
            Values of k for which evaluations report `pass@<k>` and `maj@<k>`, at most the number of episodes of each
            question; also reports `avg@<n>` of all `n` episodes, and writes `evaluations.jsonl`. If `None`, none of
            these.
        eval_right_at (`float`, *optional*, defaults to `1.0`):
            Reward from which the answer of an episode counts as right, for `eval_k`.
        eval_right_by (`str`, *optional*, defaults to `None`):
            Name of the reward function that decides whether an answer is right. If `None`, the reward of the episode.
        eval_reference_column (`str`, *optional*, defaults to `"solution"`):
            Column of the dataset that metrics of the `evaluate` package get as `references`, see `eval_metrics` of the
            trainer.
    """

    eval_sampling: dict | str | None = option(None, about="evaluations")
    eval_k: list[int] | None = option(None, about="evaluations")
    eval_right_at: float = option(1.0, about="evaluations")
    eval_right_by: str | None = option(None, about="evaluations")
    eval_reference_column: str = option("solution", about="evaluations")


def check_sampling(sampling: Any, what: str = "eval_sampling") -> None:
    """Raise a `TypeError` unless `sampling` is a mapping or `None`, and a `ValueError` for a wrong name or value."""
    if sampling is None:
        return
    if not isinstance(sampling, Mapping):
        raise TypeError(f'`{what}` must be a mapping such as {{"temperature": 0.6}}, got {sampling!r}.')
    for name, value in sampling.items():
        if name not in _SAMPLING:
            hint = did_you_mean(name, _SAMPLING)
            raise ValueError(f"`{what}` has no setting {name!r}; it has {', '.join(_SAMPLING)}.{hint}")
        least, most = _SAMPLING[name]
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or value < least or (most is not None and value > most):
            span = f"at least {least}" if most is None else f"from {least} to {most}"
            raise ValueError(f"`{name}` of `{what}` must be a number {span}, got {value!r}.")


def check_k(values: Any, samples: int, what: str = "eval_k") -> None:
    """Raise a `ValueError` unless the values of k are integers from 1 to `samples`, the episodes of each question."""
    if values is None:
        return
    if not isinstance(values, (list, tuple)) or not values:
        raise ValueError(f"`{what}` must be a list of integers such as [1, 4], got {values!r}.")
    for k in values:
        if not isinstance(k, int) or isinstance(k, bool) or k < 1:
            raise ValueError(f"`{what}` must be a list of integers of at least 1, got {values!r}.")
        if k > samples:
            raise ValueError(
                f"`{what}` ({k}) needs at least {k} episodes of each question, but evaluations run {samples}. Set "
                f"`num_generations_eval={k}` or more, or `num_samples={k}` or more for a single evaluation."
            )


@documented
@dataclass
class EngineSettings:
    """
    Settings of vLLM, in addition to those of [`~trl.GRPOConfig`]. They have an effect with `use_vllm=True`.

    Args:
        vllm_mode (`str`, *optional*, defaults to `"server"`):
            Where vLLM runs with `use_vllm=True`. `"server"`: on servers that you start with the command that
            `marft_trl.extras.engines.vllm_command` gives. `"colocate"`: every training process starts its own server,
            on the device that it trains on, with TRL's `vllm_gpu_memory_utilization`, `vllm_max_model_length`,
            `vllm_model_impl` and `vllm_enable_sleep_mode`. The server ends when the process does.
        vllm_python (`str`, *optional*, defaults to `None`):
            Interpreter of an environment with vLLM, such as `"/opt/vllm/bin/python"`, for `vllm_mode="colocate"`. If
            `None`, it is the environment variable `MARFT_VLLM_PYTHON`, or else the interpreter that trains.
        vllm_server_base_url (`str`, `list[str]` or `dict`, *optional*, defaults to `None`):
            Addresses of the vLLM servers, such as `["http://node1:8000", "http://node2:8000"]`. Each has a whole copy
            of the base. If `None`, there is one server, at `vllm_server_host` and `vllm_server_port`. For a team with
            several bases, a dictionary of addresses by the name of the model.
        vllm_server_timeout (`float`, *optional*, defaults to `240.0`):
            Time in seconds that training waits while a server does not answer. After it, training stops with an error.
        vllm_request_timeout (`float`, *optional*, defaults to `600.0`):
            Maximum time in seconds of the generation of one turn. After it, the turn is requested again, three times
            in all.
        vllm_max_inflight (`int`, *optional*, defaults to `256`):
            Maximum number of turns that a server generates at the same time. Set it to the server's `--max-num-seqs`.
        vllm_adapter_dir (`str`, *optional*, defaults to `None`):
            Folder from which the servers load adapters. All servers must see it under the same path. If
            `None`, it is `_adapters` in `output_dir`.
        max_staleness (`int`, *optional*, defaults to `0`):
            Number of generation batches that vLLM servers sample ahead of training. With `0`, rollouts and training
            take turns, and every turn is sampled by the present weights. With `n`, training on a batch runs while the
            next `n` are sampled, each from the weights of `n` publications ago; how long rollouts and training take
            does not change which. The loss is corrected by `vllm_importance_sampling_mode`.
        fidelity_tolerance (`float`, *optional*, defaults to `None`):
            Largest mean difference between the log-probabilities of a server and those of the trainer, for the same
            tokens under the same weights. Above it, training stops with an error. If `None`, it is `1e-3` if both
            compute in float32, as far as the trainer knows, and `0.2` otherwise.
    """

    vllm_mode: str = option("server", choices=("server", "colocate"), about="machines")
    vllm_python: str | None = option(None, about="machines")
    vllm_server_base_url: list[str] | None = option(None, about="machines")
    vllm_request_timeout: float = option(600.0, ABOVE_0, about="machines")
    vllm_max_inflight: int = option(256, ABOVE_0, integer=True, about="machines")
    vllm_adapter_dir: str | None = option(None, about="machines")
    max_staleness: int = option(0, AT_LEAST_0, integer=True)
    fidelity_tolerance: float | None = option(None, ABOVE_0, about="evaluations")


def check_vllm(args: Any) -> None:
    if not args.use_vllm:
        if args.max_staleness:
            raise ValueError(
                f"`max_staleness={args.max_staleness}` needs servers that generate while training runs. Set "
                "`use_vllm=True`, or leave `max_staleness` out."
            )
        return
    sequence = args.vllm_importance_sampling_mode.startswith("sequence")
    corrects = args.vllm_importance_sampling_correction
    conflicts = {
        **(_colocate_conflicts(args) if args.vllm_mode == "colocate" else {}),
        "`vllm_structured_outputs_regex` is not supported: turns would be sampled from a different distribution "
        "than they are scored with. Leave it out.": args.vllm_structured_outputs_regex is not None,
        f"`vllm_importance_sampling_mode={args.vllm_importance_sampling_mode!r}` weights each token, but at "
        "`level='action'` a turn is one action. "
        "Set it to 'sequence_mask' or 'sequence_truncate'.": corrects and not sequence and checks.has_turn_ratio(args),
        "`loss_type='vespo'` needs `vllm_importance_sampling_mode='token_truncate'` or 'token_mask', got "
        f"{args.vllm_importance_sampling_mode!r}.": corrects and sequence and args.loss_type == "vespo",
        **(_staleness_conflicts(args) if args.max_staleness else {}),
    }
    for message, applies in conflicts.items():
        if applies:
            raise ValueError(message)


def _colocate_conflicts(args: Any) -> dict[str, bool]:
    return {
        "`vllm_server_base_url` names running servers, but `vllm_mode='colocate'` starts new servers. Leave "
        "`vllm_server_base_url` out, or set `vllm_mode='server'`.": args.vllm_server_base_url is not None,
        f"`vllm_tensor_parallel_size={args.vllm_tensor_parallel_size}` needs several devices for one server, but "
        "with `vllm_mode='colocate'` each process has only one. Start a server for them with "
        '`vllm_command(..., extra=["--tensor-parallel-size", ...])`, '
        "and set `vllm_mode='server'`.": args.vllm_tensor_parallel_size > 1,
        f"`max_staleness={args.max_staleness}` generates while training runs, so the server cannot sleep. Set "
        "`vllm_enable_sleep_mode=False`, "
        "or `max_staleness=0`.": args.vllm_enable_sleep_mode and args.max_staleness > 0,
    }


def _staleness_conflicts(args: Any) -> dict[str, bool]:
    stale = f"`max_staleness={args.max_staleness}`"
    is_bounded = args.vllm_importance_sampling_correction and args.vllm_importance_sampling_clip_max is not None
    return {
        f"{stale} trains on turns of earlier weights, and training collapses without a bounded correction. Set "
        "`vllm_importance_sampling_correction=True` and `vllm_importance_sampling_clip_max`.": not is_bounded,
        f"{stale} needs the clipped policy ratio, which `use_policy_ratio=False` disables.": not args.use_policy_ratio,
        f"{stale} weights turns by the ratio of the current to the earlier policy, which is unknown if `top_p`, "
        "`top_k` or `min_p` truncates the distribution. Leave them out, or set `max_staleness=0`.": (
            args.top_p not in (None, 1.0) or bool(args.top_k and args.top_k > 0) or bool(args.min_p)
        ),
        f"{stale} does not support candidates for turns (`advantage='turn'`, `'turn_itself'`, `'c3'`) or re-runs "
        "(`credit='counterfactual'`, `'removed'`), which are scored while episodes run. "
        "Set `max_staleness=0`.": checks.uses_candidates(args) or CREDITS[args.credit].reruns,
        f"{stale} samples ahead with weights that `on_collapse='restore'` may discard. Set `on_collapse='warn'`, "
        "or `max_staleness=0`.": args.on_collapse == "restore",
        f"{stale} does not support `update_order='resampled'`, which samples new episodes after every agent's "
        "update. Set `max_staleness=0`.": args.update_order == "resampled",
    }


_GAE, _TURN, _RAE = ("advantage", "gae"), ("advantage", "turn"), ("advantage", "rae")
_REWARDS = ("credit_kind", "rewards")


def _supports_bf16() -> bool:
    if torch.cuda.is_available():  # transformers also counts GPUs that emulate it, such as a T4, which is slow
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return is_torch_bf16_gpu_available()


@documented
@dataclass
class MARFTConfig(Copies, LimitSettings, EvaluationSettings, EngineSettings, GRPOConfig):
    r"""
    Configuration class for the [`MARFTTrainer`].

    This class includes all parameters of [`~trl.GRPOConfig`], which count episodes where GRPO counts completions. Only
    new parameters and those with a different default are listed below, those of vLLM in [`EngineSettings`], of
    evaluations in [`EvaluationSettings`], and limits in [`LimitSettings`]. Agents are not training arguments: see
    [`AgentSpec`].

    Args:
        learning_rate (`float`, *optional*, defaults to `1e-5`):
            Peak learning rate of every adapter whose agent does not set its own `learning_rate`. The default is ten
            times that of [`~trl.GRPOConfig`], as TRL's guide to LoRA takes it; without a `peft_config`, where whole
            models are trained, set a lower one.
        bf16 (`bool`, *optional*):
            Whether to use bfloat16 mixed precision. If `None`, bfloat16 is used if `fp16` and `use_cpu` are off and a
            GPU supports it (an NVIDIA GPU without emulation).
        loss_type (`str`, *optional*, defaults to `None`):
            Loss formulation, as in `GRPOConfig`. If `None`, `"dapo"` is used at token level, and `"grpo"` at action
            level, so that every turn has the same weight.
        preset (`str`, *optional*, defaults to `None`):
            Settings of a publication: `"marft-a"`, `"marft-t"`, `"grpo"`, `"magrpo"`, `"dr-mas"`, `"at-grpo"`,
            `"reinforce++"`, `"rloo"`, `"mappo"`, `"c3"` or `"ccpo"`. Parameters that you pass explicitly override the
            preset; `print(config)` lists which values come from the preset and which from you. On the command line, a
            value that equals the default counts as not passed.
        advantage (`str`, *optional*, defaults to `"group"`):
            Baseline that the return of a turn is compared with. `"group"`: the episodes of the same prompt; `"agent"`:
            the turns of the same agent in these episodes; `"turn"` and `"c3"`: the other candidates for the same turn,
            standardized or as they are; `"turn_itself"`: as `"turn"`, with candidates that are scored as if they were
            the answer, as in AT-GRPO's code, which needs no further generation; `"leave_one_out"`: the other episodes
            of the same prompt; `"batch"`: all episodes of the generation batch; `"rae"`: the mean of earlier batches;
            `"none"`: no baseline; `"gae"`: the values of a critic.
        returns (`str`, *optional*, defaults to `None`):
            Rewards that an agent learns from. `"agent"`: those that it receives itself, which are rewards for all, and
            rewards by its name (a mapping from an environment or from `episode.earn`). Turns are then compared with
            turns of the same agent, and GAE runs over the agent's own turns. `"team"`: the sum of all rewards. If
            `None`, it is `"agent"` from the first batch on in which an agent is rewarded by name, and `"team"` before.
        rae_decay (`float`, *optional*, defaults to `0.95`):
            Decay per generation batch of the running means of `advantage="rae"`, in `[0, 1]`.
        rae_column (`str`, *optional*, defaults to `None`):
            Dataset column, such as the name of a game, whose values have running means of their own.
        level (`str`, *optional*, defaults to `"token"`):
            Unit that the policy ratio (and, with `advantage="gae"`, the advantage) is computed for: each `"token"`
            (MARFT-T), or each turn as a single `"action"` (MARFT-A).
        action_logprob (`str`, *optional*, defaults to `"sum"`):
            Log-probability of a turn at action level: the `"sum"` over its tokens, this sum divided by the number of
            tokens (`"token"`), or this sum divided by the number of words (`"word"`).
        use_policy_ratio (`bool`, *optional*, defaults to `True`):
            Whether to use the clipped ratio between the current policy and the sampling policy in the loss. If
            `False`, every update uses the plain policy gradient (REINFORCE): log-probability times advantage.
        critic (`str`, *optional*, defaults to `None`):
            Architecture of the critic, which predicts values for `advantage="gae"`. `"shared"`: one value head and one
            LoRA adapter for the whole team; `"per_agent"`: a value head and a LoRA adapter for each agent;
            `"multi_head"`: one LoRA adapter for the team and a value head for each agent; `"frozen"`: an MLP on the
            last hidden state of the base, which is not trained.
        critic_sees (`str`, *optional*, defaults to `"observation"`):
            What the critic reads before it values a turn: the `"observation"` of its agent (IPPO), or the whole
            `"history"`, all turns, feedback and messages of applications before the joint step (MAPPO), which takes
            longer passes.
        normalize_values (`bool`, *optional*, defaults to `False`):
            Whether the critic predicts returns normalized by their running mean and standard deviation.
        gamma (`float`, *optional*, defaults to `1.0`):
            Discount factor per joint step, in `[0, 1]`.
        gae_lambda (`float`, *optional*, defaults to `0.95`):
            GAE decay (lambda) per joint step, in `[0, 1]`.
        token_gamma (`float`, *optional*, defaults to `1.0`):
            Discount factor per token within a turn, in `[0, 1]`. The paper uses `1.0`.
        token_gae_lambda (`float`, *optional*, defaults to `1.0`):
            GAE decay (lambda) per token within a turn, in `[0, 1]`.
        normalize_advantages (`str`, *optional*, defaults to `"batch"`):
            Set of positions that GAE advantages are standardized over: all scored positions of the generation batch
            (`"batch"`), or the scored positions of each agent separately (`"agent"`). `"none"` disables
            standardization.
        critic_learning_rate (`float`, *optional*, defaults to `5e-5`):
            Peak learning rate of the critic.
        critic_warmup_steps (`int`, *optional*, defaults to `0`):
            Number of optimizer steps at the start of training in which only the critic is trained.
        value_clip (`float`, *optional*, defaults to `0.2`):
            Clip range of the value loss: values may move at most this far from those of the rollout. `None` disables
            clipping.
        value_loss (`str`, *optional*, defaults to `"huber"`):
            Loss of the critic: `"huber"`, which is linear for errors above 10, or `"squared"`.
        credit (`str`, *optional*, defaults to `"equal"`):
            Rule that assigns the team's reward to turns. `"equal"`: every turn gets the reward of the episode;
            `"step_discount"`: earlier turns get less; `"per_step"`: each turn has its own reward, from
            `AgentSpec.reward_funcs` or `Workflow.reward_funcs`; `"counterfactual"`: each turn gets the reward that is
            lost in re-runs of the episode in which the agent's reference generates this turn; `"removed"`: the reward
            that is lost in re-runs in which teammates see an empty turn in its place.
        credit_discount (`float`, *optional*, defaults to `1.0`):
            Factor that `credit="step_discount"` applies once for every turn that follows, in `[0, 1]`.
        credit_kind (`str`, *optional*, defaults to `None`):
            Meaning of the values that `credit` assigns to turns. `"rewards"`: rewards, which GAE (or, without a
            critic, the discounted sum from the turn on) accumulates into returns; `"returns"`: returns, which are used
            as they are. If `None`, `"rewards"` is used with a critic and `"returns"` without one. With
            re-runs (`"counterfactual"`, `"removed"`), `None` always means `"returns"`.
        own_reward_weight (`float`, *optional*, defaults to `1.0`):
            Weight of a turn's own reward with `credit="per_step"`, in `[0, 1]`. The team's reward has the remaining
            weight, `1 - own_reward_weight`.
        counterfactual_samples (`int`, *optional*, defaults to `1`):
            Number of re-runs for each turn with `credit="counterfactual"` or `"removed"`.
        turn_candidates (`int`, *optional*, defaults to `4`):
            Number of candidates that are sampled for each turn with `advantage="turn"`, `"turn_itself"` or `"c3"`.
        candidate_samples (`int`, *optional*, defaults to `1`):
            Number of episodes that are completed from each candidate. Its return is their mean reward.
        continue_from (`str`, *optional*, defaults to `None`):
            Candidate that the episode continues from: the `"best"` one, which biases the observations that follow, or
            a randomly `"sampled"` one. If `None`, it is `"best"` with `advantage="turn"` and `"sampled"` with `"c3"`.
        dynamic_sampling (`bool`, *optional*, defaults to `False`):
            Whether groups that teach nothing are replaced by groups of further prompts (DAPO), which are drawn from
            the dataset at random, up to three times the prompts of the batch: those whose episodes all earned the
            same, or, with candidates for turns, episodes whose candidates do not differ. `reward` is then the mean
            over all that was drawn; `dynamic_sampling/*` has the number of prompts, the share with a signal, and the
            share of the batch that was filled.
        target_kl (`float`, *optional*, defaults to `None`):
            Maximum KL divergence from the sampling policy. An agent's update is skipped above it. `None` disables the
            limit.
        agent_weight (`str`, *optional*, defaults to `"size"`):
            Weight of agents that share an adapter. `"size"`: all their turns (or tokens, see `loss_type`) count alike,
            so an agent that speaks more learns more. `"equal"`: the loss is a mean over agents of the mean over the
            turns of each.
        agent_iteration_interval (`int`, *optional*, defaults to `0`):
            Number of optimizer steps for which only one agent is trained, before the next agent follows. `0` trains
            all agents in every step.
        update_order (`str`, *optional*, defaults to `"joint"`):
            Order in which agents are updated. `"joint"`: all agents are updated in every step. `"sequential"`: agents
            are updated one after the other on the same episodes; advantages are multiplied by the policy ratios of the
            agents that were updated before, within the same joint action (HAPPO). `"resampled"`: agents are updated
            one after the other, each on new episodes.
        sequential_clip (`float`, *optional*, defaults to `0.5`):
            Clip range of the ratio products of `update_order="sequential"`, which are clipped to
            `[1 - sequential_clip, 1 + sequential_clip]`. `None` disables clipping.
        on_collapse (`str`, *optional*, defaults to `"warn"`):
            What happens if `eval_reward` drops below its best by more than a tenth and by more than five standard
            errors. `"warn"`: log one warning. `"restore"`: also restore all trained adapters and their optimizer state
            as they were at the best evaluation. `"ignore"`: do nothing.
        max_tokens_per_micro_batch (`int`, *optional*, defaults to `None`):
            Maximum number of tokens, padding included, in one forward and backward pass. A micro-batch contains rows
            of a single agent. A row longer than the limit forms a micro-batch of its own. The limit bounds memory and
            changes results only by rounding. If `None`, it is derived from the memory that is free when training
            begins.
        gradient_checkpointing (`bool`, *optional*, defaults to `None`):
            Whether to use gradient checkpointing, as in `GRPOConfig`. If `None`, it is used only if the longest row
            does not fit into memory without it.
        share_prefixes (`bool`, *optional*, defaults to `True`):
            Whether to compute the common prefix of several rows, such as the prompt of a group, only once. This holds
            for generation, scoring and training. Moreover, only positions whose log-probability is used reach the LM
            head. Log-probabilities and gradients of a row change only by rounding, but random draws differ. If a
            generation batch serves several optimizer steps, the episodes of a group stay in the same step. If
            `False`, the forward passes are those of `GRPOTrainer`, so a single agent reproduces its results bit by
            bit; models with learned position embeddings (GPT-2) are passed explicit positions.
        skip_rows_without_signal (`bool`, *optional*, defaults to `None`):
            Whether rows whose gradient is exactly 0, because their advantage is 0 and nothing else is in the loss, are
            left out of forward and backward passes. Updates are the same up to rounding; entropies and KL are means
            over the other rows, and `frac_rows_without_signal` has the share of these. If `None`, it is the value of
            `share_prefixes`.
        completions_total_limit (`int`, *optional*, defaults to `None`):
            With `log_completions`, the number of logging steps whose transcripts and tables of completions are kept.
            `None` keeps all.
        resume_changes (`dict`, *optional*, defaults to `None`):
            Intended changes of a resumed run, which is refused without them. `{"accept": ["dataset"]}`: parts that
            may differ, among `"dataset"`, `"seed"`, `"workflow"`, `"base"`, `"tokenizer"`, `"batch"` and
            `"processes"`. A changed run samples new episodes first and is not exact. Remove the setting once the run
            has saved a checkpoint. A team with other agents starts a new run with [`load_adapters`].
    """

    _VALID_DICT_FIELDS = [*GRPOConfig._VALID_DICT_FIELDS, "eval_sampling", "resume_changes"]

    learning_rate: float = option(1e-05, AT_LEAST_0)
    loss_type: str | None = option(None, choices=LOSSES)  # type: ignore[assignment]
    preset: str | None = option(None, choices=PRESETS, also=(None,), about="files")
    advantage: str = option("group", choices=BASELINES, also=("gae",))
    returns: str | None = option(None, choices=("team", "agent"), also=(None,))
    rae_decay: float = option(0.95, SHARE, only_if=[_RAE])
    rae_column: str | None = option(None, only_if=[_RAE])
    level: str = option("token", choices=LEVELS)
    action_logprob: str = option("sum", choices=("sum", "token", "word"), only_if=[("level", "action")])
    use_policy_ratio: bool = option(True)
    critic: str | None = option(None, choices=CRITICS, also=(None,))
    critic_sees: str = option("observation", choices=("observation", "history"), only_if=[_GAE])
    normalize_values: bool = option(False, only_if=[_GAE])
    gamma: float = option(1.0, SHARE, only_if=[_REWARDS])
    gae_lambda: float = option(0.95, SHARE, only_if=[_GAE, _REWARDS])
    token_gamma: float = option(1.0, SHARE, only_if=[("level", "token"), _GAE])
    token_gae_lambda: float = option(1.0, SHARE, only_if=[("level", "token"), _GAE])
    normalize_advantages: str = option("batch", choices=("batch", "agent", "none"), only_if=[_GAE])
    critic_learning_rate: float = option(5e-05, AT_LEAST_0, only_if=[_GAE])
    critic_warmup_steps: int = option(0, AT_LEAST_0, integer=True)
    value_clip: float | None = option(0.2, ABOVE_0, none="no clipping", only_if=[_GAE])
    value_loss: str = option("huber", choices=("huber", "squared"), only_if=[_GAE])
    credit: str = option("equal", choices=CREDITS)
    credit_discount: float = option(1.0, SHARE, only_if=[("credit", "step_discount")])
    credit_kind: str | None = option(None, choices=("rewards", "returns"))
    own_reward_weight: float = option(1.0, SHARE, only_if=[("credit", "per_step")])
    counterfactual_samples: int = option(1, ABOVE_0, integer=True, only_if=[("credit", "counterfactual")])
    turn_candidates: int = option(4, ABOVE_0, integer=True, only_if=[_TURN])
    candidate_samples: int = option(1, ABOVE_0, integer=True, only_if=[_TURN])
    continue_from: str | None = option(None, choices=("best", "sampled"), also=(None,), only_if=[_TURN])
    dynamic_sampling: bool = option(False)
    target_kl: float | None = option(None, ABOVE_0, none="no early stop")
    agent_weight: str = option("size", choices=("size", "equal"))
    agent_iteration_interval: int = option(0, AT_LEAST_0, integer=True)
    update_order: str = option("joint", choices=("joint", "sequential", "resampled"))
    sequential_clip: float | None = option(0.5, ABOVE_0, none="no clipping", only_if=[("update_order", "sequential")])
    on_collapse: str = option("warn", choices=("warn", "restore", "ignore"))
    max_tokens_per_micro_batch: int | None = option(None, ABOVE_0, integer=True)
    gradient_checkpointing: bool | None = option(None)  # type: ignore[assignment]
    share_prefixes: bool = option(True)
    skip_rows_without_signal: bool | None = option(None)
    completions_total_limit: int | None = option(None, ABOVE_0, integer=True, none="no limit", about="files")
    resume_changes: dict | str | None = option(None, about="files")

    def __new__(cls, *args, **kwargs):
        # A preset may only set fields that the user did not pass, and the generated `__init__` does not record them.
        config = super().__new__(cls)
        names = [item.name for item in fields(cls) if item.init]
        checks.check_names(kwargs, names)
        config.given = frozenset([*names[: len(args)], *kwargs])
        return config

    def __post_init__(self):
        self._apply_preset()
        if self.deepspeed:
            checks.check_engine(self)  # transformers would import DeepSpeed, which is rarely installed
        checks.set_dependent_defaults(self)
        if self.bf16 is None:
            # GRPOConfig turns bfloat16 on everywhere, and TrainingArguments then refuses to start without a GPU.
            self.bf16 = not self.fp16 and not self.use_cpu and _supports_bf16()
        checks.check_texts(self)
        checks.check_numbers(self)
        if isinstance(self.vllm_server_base_url, str):
            self.vllm_server_base_url = self.vllm_server_base_url.split(",")
        checkpointing = checkpointing_fields(self)
        when_needed = all(getattr(self, name) is None for name in checkpointing)
        with accepting_one_generation(self), timeout_also_on_cpu(self.ddp_timeout):
            super().__post_init__()
        if when_needed:  # TrainingArguments sets `None` to `False`, which looks like the user's choice
            for name in checkpointing:
                setattr(self, name, None)
        self.check()

    def check(self) -> None:
        """
        Check the values of all fields and their combinations.

        Raises:
            ValueError, TypeError: a value is not valid, or two values contradict each other.
        """
        checks.check_values(self)
        checks.check_supported(self)
        checks.check_combinations(self)
        check_vllm(self)
        check_sampling(self.eval_sampling)
        check_k(self.eval_k, self.num_generations_eval or self.num_generations)
        for name, default in (("eval_right_at", 1.0), ("eval_right_by", None)):
            if self.eval_k is None and getattr(self, name) != default:
                raise ValueError(f"`{name}={getattr(self, name)!r}` has no effect with `eval_k=None`. Set `eval_k`.")
        if self.enable_jit_checkpoint:  # type: ignore[has-type]
            say_unused("enable_jit_checkpoint", True)
            self.enable_jit_checkpoint = False  # upstream's way saves within a step

    @classmethod
    def of(cls, args: GRPOConfig) -> MARFTConfig:
        """The arguments with the values of a [`~trl.GRPOConfig`], and the defaults of all other fields."""
        config = object.__new__(cls)
        # `__post_init__` has already run on these values; running it again would change the batch sizes
        config.__dict__.update(args.__dict__)
        config.given, config.preset_settings = frozenset(), {}
        checks.set_dependent_defaults(config)
        checks.check_numbers(config)
        config.check()
        return config

    def _apply_preset(self) -> None:
        self.preset_settings: dict[str, object] = {}
        if self.preset is None:
            return
        check_choice("preset", self.preset, PRESETS)
        # A command-line parser passes every field, so a value counts as given only if it differs from the default.
        by_parser = self.given >= {field.name for field in fields(self) if field.init}
        defaults = {field.name: field.default for field in fields(self)}
        for name, value in PRESETS[self.preset].settings.items():
            if name not in self.given or (by_parser and getattr(self, name) == defaults[name]):
                setattr(self, name, value)
                self.preset_settings[name] = value

    def __str__(self):
        shown = copy.copy(self)
        shown.__dict__.update((name, without_secrets(value)) for name, value in self.__dict__.items())
        text = super(MARFTConfig, shown).__str__()
        if self.preset is None:
            return text
        wanted = PRESETS[self.preset].settings
        own = {name: getattr(self, name) for name in wanted if name not in self.preset_settings}
        lines = [
            f"preset {self.preset!r}: {PRESETS[self.preset].source}",
            "  sets " + ", ".join(f"{name}={value!r}" for name, value in self.preset_settings.items()),
        ]
        if own:
            lines.append("  set explicitly: " + ", ".join(f"{name}={value!r}" for name, value in own.items()))
        return "\n".join([*lines, text])

    __repr__ = __str__
