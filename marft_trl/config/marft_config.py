# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Training arguments."""

from __future__ import annotations

import copy
from dataclasses import dataclass, fields

from transformers.utils import is_torch_bf16_gpu_available
from trl import GRPOConfig

from ..rules.baselines import BASELINES
from ..rules.credit_rules import CREDITS
from ..rules.critic import CRITICS
from ..rules.levels import LEVELS
from ..seams.losses import LOSSES
from ..seams.runs import timeout_also_on_cpu
from ..seams.trl import accepting_one_generation
from ..seams.versions import checkpointing_fields
from ..system.redaction import without_secrets
from .checks import check_combinations, check_engine, check_names, check_numbers, check_supported, check_values
from .copies import Copies
from .defaults import resolve
from .engine import EngineSettings, check_vllm
from .evaluation import EvaluationSettings, check_evaluation
from .limits import LimitSettings
from .options import ABOVE_0, AT_LEAST_0, SHARE, check_choice, documented, option
from .presets import PRESETS
from .unused import say_unused


# What settings have an effect with
_GAE, _TURN, _RAE = ("advantage", "gae"), ("advantage", "turn"), ("advantage", "rae")
_REWARDS = ("credit_kind", "rewards")


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
            Whether to use bfloat16 mixed precision. If `None`, bfloat16 is used if a GPU supports it and `fp16` is
            off.
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
            turns of each. `agents/<name>/grad_share` is an agent's share of the gradient norm.
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
            What happens if the team has collapsed: the mean reward of the last eight generation batches, or an
            evaluation, is below its best by more than a tenth and by more than five standard errors. `"warn"`: log one
            warning. `"restore"`: adapters that have fallen, which is found by trial, go back to their weights and
            optimizer state at the best mean (in a run with evaluations, at the best `eval_reward`), and the batch is
            sampled anew. `"ignore"`: do nothing.
        max_tokens_per_micro_batch (`int`, *optional*, defaults to `None`):
            Maximum number of tokens, padding included, in one forward and backward pass. A micro-batch contains rows
            of a single agent, at most `per_device_train_batch_size` of them. A row longer than the limit forms a
            micro-batch of its own. The limit bounds memory and changes results only by rounding. If `None`, it is
            derived from the memory that is free when training begins.
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
        mixed_passes (`bool`, *optional*, defaults to `None`):
            Whether rows of several agents, each with the LoRA of its own, go through the model together in training.
            If `None`, micro-batches of at most 512 tokens on average do, in a team with at least four trained
            adapters. Gradients change only by rounding. It does not go with gradient checkpointing.
        skip_rows_without_signal (`bool`, *optional*, defaults to `None`):
            Whether rows whose gradient is exactly 0, because their advantage is 0 and nothing else is in the loss, are
            left out of forward and backward passes. Updates are the same up to rounding; entropies and KL are means
            over the other rows, and `frac_rows_without_signal` has the share of these. If `None`, it is the value of
            `share_prefixes`.
        resume_changes (`dict`, *optional*, defaults to `None`):
            Intended changes of a resumed run, which is refused without them. `{"add": ["verifier"]}`: agents that
            start anew. `{"remove": ["critic"]}`: agents of the checkpoint that are left out. `{"rename": {"solver":
            "coder"}}`: new names. `{"accept": ["dataset"]}`: parts that may differ, among `"dataset"`, `"seed"`,
            `"workflow"`, `"base"`, `"tokenizer"`, `"batch"` and `"processes"`. A changed run samples new episodes
            first and is not exact. Remove the setting once the changed run has saved a checkpoint.
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
    mixed_passes: bool | None = option(None)
    skip_rows_without_signal: bool | None = option(None)
    resume_changes: dict | str | None = option(None, about="files")

    def __new__(cls, *args, **kwargs):
        # A preset may only set fields that the user did not pass, and the generated `__init__` does not record them.
        config = super().__new__(cls)
        names = [item.name for item in fields(cls) if item.init]
        check_names(kwargs, names)
        config.given = frozenset([*names[: len(args)], *kwargs])
        return config

    def __post_init__(self):
        self._apply_preset()
        if self.deepspeed:
            check_engine(self)  # transformers would import DeepSpeed, which is rarely installed
        resolve(self)
        if self.bf16 is None:
            # GRPOConfig turns bfloat16 on everywhere, and TrainingArguments then refuses to start without a GPU.
            self.bf16 = not self.fp16 and not self.use_cpu and is_torch_bf16_gpu_available()
        check_numbers(self)
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
        Check the values of all fields, and what goes with what.

        Raises:
            ValueError, TypeError: a value that cannot be, or two that contradict each other.
        """
        check_values(self)
        check_supported(self)
        check_combinations(self)
        check_vllm(self)
        check_evaluation(self)
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
        resolve(config)
        check_numbers(config)
        config.check()
        return config

    def _apply_preset(self) -> None:
        self.preset_settings: dict[str, object] = {}
        if self.preset is None:
            return
        check_choice("preset", self.preset, PRESETS)
        # A command-line parser passes every field, so a value counts as given only if it differs from the default.
        by_parser = self.given >= {item.name for item in fields(self) if item.init}
        defaults = {item.name: item.default for item in fields(self)}
        for name, value in PRESETS[self.preset].settings.items():
            is_given = name in self.given and not (by_parser and getattr(self, name) == defaults[name])
            if not is_given:
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
            lines.append("  set beside it: " + ", ".join(f"{name}={value!r}" for name, value in own.items()))
        return "\n".join([*lines, text])

    __repr__ = __str__
