# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Training arguments."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, fields
from typing import Any

from transformers.utils import is_torch_bf16_gpu_available
from trl import GRPOConfig

from .advantages.baselines import BASELINES
from .config_checks import (
    ACTION_LOGPROBS,
    CANDIDATE_REWARDS,
    CONTEXT_OVERFLOWS,
    CONTINUATIONS,
    CREDIT_KINDS,
    CREDITS,
    NORMALIZATIONS,
    UPDATE_ORDERS,
    VALUE_LOSSES,
    check_choice,
    check_choices,
    check_combinations,
    check_numbers,
    check_supported,
)
from .learning.critic import CRITICS
from .learning.levels import LEVELS
from .presets import PRESETS
from .trainer.trl_seams import accepting_one_generation


@dataclass
class MARFTConfig(GRPOConfig):
    r"""
    Configuration class for the [`MARFTTrainer`].

    Everything of [`~trl.GRPOConfig`] is here, with its meaning counted in episodes; only what differs or is new is
    listed. Agents are not training arguments: see [`AgentSpec`].

    Args:
        learning_rate (`float`, *optional*, defaults to `5e-6`):
            Peak learning rate of every adapter whose agent names none. The default is that of MARFT's published LoRA
            runs.
        bf16 (`bool`, *optional*):
            Whether to use bfloat16 mixed precision. Unless set: on where a GPU supports it and `fp16` is off.
        loss_type (`str`, *optional*, defaults to `None`):
            As in `GRPOConfig`. Unless set: `"dapo"` at token level, `"grpo"` at action level, where every turn counts
            once.
        preset (`str`, *optional*, defaults to `None`):
            Settings of a publication: `"marft-a"`, `"marft-t"`, `"grpo"`, `"magrpo"`, `"dr-mas"`, `"at-grpo"`,
            `"reinforce++"`, `"rloo"` or `"mappo"`. Whatever is set beside it wins; `print(config)` tells them apart.
            On a command line, a value that equals the default does not count as set.
        advantage (`str`, *optional*, defaults to `"group"`):
            What the return of a turn is compared with. `"group"`: the episodes of the same prompt; `"agent"`: the
            turns of the same agent in these episodes; `"turn"`: other candidates for the same turn;
            `"leave_one_out"`: the other episodes of the prompt; `"batch"`: all episodes of the generation batch;
            `"none"`: nothing; `"gae"`: the values of a critic.
        level (`str`, *optional*, defaults to `"token"`):
            What has a probability ratio, and with `advantage="gae"` an advantage: a `"token"` (MARFT-T) or a whole
            turn, an `"action"` (MARFT-A).
        action_logprob (`str`, *optional*, defaults to `"sum"`):
            Log-probability of a turn at action level: the `"sum"` over its tokens, that over its number of tokens
            (`"token"`) or that over its number of words (`"word"`).
        use_policy_ratio (`bool`, *optional*, defaults to `True`):
            Whether the loss has the clipped ratio of the policy to the one that sampled. `False`: the plain policy
            gradient, log-probability times advantage, in every update (REINFORCE).
        critic (`str`, *optional*, defaults to `None`):
            What predicts values, with `advantage="gae"`. `"shared"`: one value head on one LoRA of its own;
            `"per_agent"`: a head and a LoRA for each agent; `"multi_head"`: one LoRA, a head for each agent;
            `"frozen"`: an MLP on the last hidden state of the base.
        gamma (`float`, *optional*, defaults to `1.0`):
            Discount from a joint step to the next, in `[0, 1]`.
        gae_lambda (`float`, *optional*, defaults to `0.95`):
            GAE decay from a joint step to the next, in `[0, 1]`.
        token_gamma (`float`, *optional*, defaults to `1.0`):
            Discount from a token to the next inside a turn, in `[0, 1]`. 1 is the paper's.
        token_gae_lambda (`float`, *optional*, defaults to `1.0`):
            GAE decay from a token to the next inside a turn, in `[0, 1]`.
        normalize_advantages (`str`, *optional*, defaults to `"batch"`):
            GAE advantages are standardized over all scored positions of the generation batch (`"batch"`), over those
            of each agent (`"agent"`), or left as they are (`"none"`).
        critic_learning_rate (`float`, *optional*, defaults to `5e-5`):
            Peak learning rate of the critic.
        critic_max_grad_norm (`float`, *optional*, defaults to `None`):
            Largest gradient norm of the critic. `max_grad_norm` unless set.
        critic_warmup_steps (`int`, *optional*, defaults to `0`):
            Optimizer steps at the start in which only the critic learns.
        value_clip (`float`, *optional*, defaults to `0.2`):
            Largest change of a value that lowers its loss, from one rollout to the next. `None` for no clipping.
        value_loss (`str`, *optional*, defaults to `"huber"`):
            `"huber"`, with an error of 10 as the limit, or `"squared"`.
        credit (`str`, *optional*, defaults to `"equal"`):
            How the team's reward becomes rewards of turns. `"equal"`: the reward of the episode; `"step_discount"`:
            less for earlier turns; `"per_step"`: each turn has a reward of its own, from `AgentSpec.reward_funcs` or
            `Workflow.reward_funcs`; `"counterfactual"`: what is lost when the agent's reference speaks instead.
        credit_discount (`float`, *optional*, defaults to `1.0`):
            Factor per turn before the last of `credit="step_discount"`, in `[0, 1]`.
        credit_kind (`str`, *optional*, defaults to `None`):
            Whether what `credit` gives to turns is a stream of `"rewards"`, which GAE (or, without a critic, the
            discounted sum from the turn on) adds up, or the `"returns"` themselves. Unless set: rewards with a critic
            (returns with counterfactual credit), returns without.
        own_reward_weight (`float`, *optional*, defaults to `1.0`):
            Weight of a turn's own reward under `credit="per_step"`, in `[0, 1]`; the rest is the weight of the team's.
        counterfactual_samples (`int`, *optional*, defaults to `1`):
            How many times each turn is sampled anew under `credit="counterfactual"`.
        turn_candidates (`int`, *optional*, defaults to `4`):
            Candidates for each turn with `advantage="turn"`.
        candidate_reward (`str`, *optional*, defaults to `"episode"`):
            What a candidate is worth with `advantage="turn"`: the reward of the `"episode"` completed from it, or of
            the `"turn"` as if it were the answer, as in AT-GRPO's code, which costs no further generation.
        continue_from (`str`, *optional*, defaults to `"best"`):
            Candidate that an episode goes on from with `advantage="turn"`: the `"best"`, which biases the observations
            that follow, or a `"sampled"` one.
        target_kl (`float`, *optional*, defaults to `None`):
            Divergence from the sampling policy above which an agent's update is skipped. `None` for no limit.
        agent_iteration_interval (`int`, *optional*, defaults to `0`):
            Optimizer steps for which one agent learns while the others are frozen, in turn. 0: all learn.
        update_order (`str`, *optional*, defaults to `"joint"`):
            `"joint"`: all agents learn in every step. `"sequential"`: one after the other on the same episodes, whose
            advantages are multiplied by the ratios of the agents before, in the same joint action (HAPPO).
            `"resampled"`: one after the other, each on new episodes.
        sequential_clip (`float`, *optional*, defaults to `0.5`):
            Clip range of the factors of `update_order="sequential"`, which stay in `[1 - sequential_clip, 1 +
            sequential_clip]`. `None` for no clipping.
        max_tokens_per_micro_batch (`int`, *optional*, defaults to `None`):
            Largest number of tokens that one forward and backward pass computes, padding included. A micro-batch holds
            rows of one agent, at most `per_device_train_batch_size` of them; a single longer row still forms one. It
            bounds memory and changes no result beyond rounding. Unless set: what fits into the memory that is free
            when training begins.
        gradient_checkpointing (`bool`, *optional*, defaults to `None`):
            As in `GRPOConfig`. Unless set: only where not even the longest row fits into the memory without it.
        share_prefixes (`bool`, *optional*, defaults to `True`):
            Compute what rows have in common at their beginning, such as the prompt of a group, once: in generation, in
            scoring and in training, and score no position that is not read. It changes no log-probability and no
            gradient of a row beyond rounding. Draws differ, and where a generation batch serves several optimizer
            steps, the episodes of a group stay in one of them. `False`: the passes of `GRPOTrainer`, whose results a
            single agent then reproduces to the last bit; models that have learned positions (GPT-2) are given them.
        context_overflow (`str`, *optional*, defaults to `"raise"`):
            What happens when what an agent sees, plus its `max_completion_length`, is longer than the model's window:
            `"raise"` an error, or `"drop_oldest_turn"`, leaving out whole turns from the oldest on (counted in
            `context/dropped_turns`) and raising only where the prompt alone does not fit, or `"end_episode"`, which
            ends the episode with the turns it has (counted in `context/ended_episodes`).
        max_tool_calls (`int`, *optional*, defaults to `16`):
            Calls of tools that an agent may make before it says its word; further ones get an error message, once.
            `max_tool_calling_iterations`, where it is set, bounds besides how often it goes on after results.
        max_tool_output_length (`int`, *optional*, defaults to `4096`):
            Characters of a tool's result that the agent is shown.
        tool_timeout (`float`, *optional*, defaults to `30.0`):
            Seconds after which a call of a tool is given up with an error message.
        workflow_timeout (`float`, *optional*, defaults to `600.0`):
            Seconds after which training stops with an error if a workflow waits for something that is neither a turn
            nor a tool, such as an environment, and nothing comes. While functions that other episodes call come back,
            it may wait for its turn to call one: so many times as long as there are episodes. `None` for no limit. In
            several processes it should be below `ddp_timeout`, after which the others give up.
        max_unscored_batches (`int`, *optional*, defaults to `None`):
            Number of generation batches in a row after which training stops with an error if every reward function
            returned `None` for all of their episodes. `None`: training goes on, with TRL's warning.
        eval_reference_column (`str`, *optional*, defaults to `"solution"`):
            Dataset column that metrics of the `evaluate` package get as `references`.
    """

    learning_rate: float = field(
        default=5e-6,
        metadata={"help": "Peak learning rate of every adapter whose agent names none."},
    )
    loss_type: str | None = field(  # type: ignore[assignment]
        default=None,
        metadata={"help": "As in GRPOConfig. Unless set: 'dapo' at token level, 'grpo' at action level."},
    )
    preset: str | None = field(
        default=None,
        metadata={
            "help": "Settings of a publication; whatever is set beside it wins.",
            "choices": list(PRESETS),
        },
    )
    advantage: str = field(
        default="group",
        metadata={
            "help": "What the return of a turn is compared with; 'gae' for the values of a critic.",
            "choices": [*BASELINES, "gae"],
        },
    )
    level: str = field(
        default="token",
        metadata={
            "help": "What has a probability ratio: a 'token' or a whole turn, an 'action'.",
            "choices": list(LEVELS),
        },
    )
    action_logprob: str = field(
        default="sum",
        metadata={
            "help": "Log-probability of a turn: sum over its tokens, per 'token' or per 'word'.",
            "choices": list(ACTION_LOGPROBS),
        },
    )
    use_policy_ratio: bool = field(
        default=True,
        metadata={"help": "Whether the loss has the clipped policy ratio; False: log-probability times advantage."},
    )
    critic: str | None = field(
        default=None,
        metadata={
            "help": "What predicts values, with advantage='gae'.",
            "choices": list(CRITICS),
        },
    )
    gamma: float = field(
        default=1.0,
        metadata={"help": "Discount from a joint step to the next."},
    )
    gae_lambda: float = field(
        default=0.95,
        metadata={"help": "GAE decay from a joint step to the next."},
    )
    token_gamma: float = field(
        default=1.0,
        metadata={"help": "Discount from a token to the next inside a turn."},
    )
    token_gae_lambda: float = field(
        default=1.0,
        metadata={"help": "GAE decay from a token to the next inside a turn."},
    )
    normalize_advantages: str = field(
        default="batch",
        metadata={
            "help": "Over what GAE advantages are standardized.",
            "choices": list(NORMALIZATIONS),
        },
    )
    critic_learning_rate: float = field(
        default=5e-5,
        metadata={"help": "Peak learning rate of the critic."},
    )
    critic_max_grad_norm: float | None = field(
        default=None,
        metadata={"help": "Largest gradient norm of the critic; max_grad_norm unless set."},
    )
    critic_warmup_steps: int = field(
        default=0,
        metadata={"help": "Optimizer steps at the start in which only the critic learns."},
    )
    value_clip: float | None = field(
        default=0.2,
        metadata={"help": "Largest change of a value that lowers its loss; None for no clipping."},
    )
    value_loss: str = field(
        default="huber",
        metadata={
            "help": "Loss of the critic.",
            "choices": list(VALUE_LOSSES),
        },
    )
    credit: str = field(
        default="equal",
        metadata={
            "help": "How the reward of the team becomes rewards of turns.",
            "choices": list(CREDITS),
        },
    )
    credit_discount: float = field(
        default=1.0,
        metadata={"help": "Factor per turn before the last of credit='step_discount'."},
    )
    credit_kind: str | None = field(
        default=None,
        metadata={
            "help": "Whether credit gives 'rewards', which are added up, or 'returns'.",
            "choices": list(CREDIT_KINDS),
        },
    )
    own_reward_weight: float = field(
        default=1.0,
        metadata={"help": "Weight of a turn's own reward under credit='per_step'."},
    )
    counterfactual_samples: int = field(
        default=1,
        metadata={"help": "How many times each turn is sampled anew under credit='counterfactual'."},
    )
    turn_candidates: int = field(
        default=4,
        metadata={"help": "Candidates for each turn with advantage='turn'."},
    )
    candidate_reward: str = field(
        default="episode",
        metadata={
            "help": "What a candidate is worth: the reward of the episode completed from it, or its own as an answer.",
            "choices": list(CANDIDATE_REWARDS),
        },
    )
    continue_from: str = field(
        default="best",
        metadata={
            "help": "Candidate that an episode goes on from with advantage='turn'.",
            "choices": list(CONTINUATIONS),
        },
    )
    target_kl: float | None = field(
        default=None,
        metadata={"help": "Divergence above which an agent's update is skipped; None for no limit."},
    )
    agent_iteration_interval: int = field(
        default=0,
        metadata={"help": "Optimizer steps for which one agent learns alone, in turn; 0: all learn."},
    )
    update_order: str = field(
        default="joint",
        metadata={
            "help": "Whether agents learn together, one after the other, or each on new episodes.",
            "choices": list(UPDATE_ORDERS),
        },
    )
    sequential_clip: float | None = field(
        default=0.5,
        metadata={"help": "Clip range of the factors of update_order='sequential'; None for no clipping."},
    )
    max_tokens_per_micro_batch: int | None = field(
        default=None,
        metadata={
            "help": "Largest number of tokens, padding included, in one forward and backward pass. Bounds memory and "
            "changes no result beyond rounding. Unless set: what fits into the free memory."
        },
    )
    gradient_checkpointing: bool | None = field(  # type: ignore[assignment]
        default=None,
        metadata={"help": "As in GRPOConfig. Unless set: only where the longest row does not fit without it."},
    )
    share_prefixes: bool = field(
        default=True,
        metadata={"help": "Compute what rows have in common at their beginning once. False: GRPOTrainer's passes."},
    )
    context_overflow: str = field(
        default="raise",
        metadata={
            "help": "What happens when what an agent sees does not fit the model's window: 'raise', "
            "'drop_oldest_turn' or 'end_episode'.",
            "choices": list(CONTEXT_OVERFLOWS),
        },
    )
    max_tool_calls: int = field(
        default=16,
        metadata={"help": "Calls of tools that an agent may make before it says its word."},
    )
    max_tool_output_length: int = field(
        default=4096,
        metadata={"help": "Characters of a tool's result that the agent is shown."},
    )
    tool_timeout: float = field(
        default=30.0,
        metadata={"help": "Seconds after which a call of a tool is given up with an error message."},
    )
    workflow_timeout: float | None = field(
        default=600.0,
        metadata={"help": "Seconds after which a workflow that waits for an environment in vain is given up."},
    )
    max_unscored_batches: int | None = field(
        default=None,
        metadata={"help": "Generation batches in a row without a single reward after which training stops."},
    )
    eval_reference_column: str = field(
        default="solution",
        metadata={"help": "Dataset column that metrics of the `evaluate` package get as `references`."},
    )

    def __new__(cls, *args, **kwargs):
        # Which fields were given decides what a preset may set; the generated `__init__` does not tell.
        config = super().__new__(cls)
        names = [item.name for item in fields(cls) if item.init]
        config.given = frozenset([*names[: len(args)], *kwargs])
        return config

    def __post_init__(self):
        self._apply_preset()
        if self.loss_type is None:
            self.loss_type = LEVELS[self.level].loss_type if self.level in LEVELS else "dapo"
        if self.level == "action" and "use_bias_correction_kl" not in self.given:
            self.use_bias_correction_kl = False  # it would weigh every token's KL by the ratio of the whole turn
        if self.credit_kind is None:
            is_stream = self.advantage == "gae" and self.credit != "counterfactual"
            self.credit_kind = "rewards" if is_stream else "returns"
        if self.bf16 is None:
            # GRPOConfig turns bfloat16 on everywhere, and TrainingArguments then refuses to start without a GPU.
            self.bf16 = not self.fp16 and not self.use_cpu and is_torch_bf16_gpu_available()
        check_numbers(self)
        when_needed = self.gradient_checkpointing is None and self.activation_checkpointing is None
        with accepting_one_generation(self):
            super().__post_init__()
        if when_needed:  # TrainingArguments makes it `False`, which is what an own choice looks like
            self.gradient_checkpointing = self.activation_checkpointing = None
        check_choices(self)
        check_supported(self)
        check_combinations(self)

    def _apply_preset(self) -> None:
        self.preset_settings: dict[str, object] = {}
        if self.preset is None:
            return
        check_choice("preset", self.preset, PRESETS)
        # A parser of command lines passes every field: then a value counts as given if it is not the default.
        by_parser = self.given >= {item.name for item in fields(self) if item.init}
        defaults = {item.name: item.default for item in fields(self)}
        for name, value in PRESETS[self.preset].settings.items():
            is_given = name in self.given and not (by_parser and getattr(self, name) == defaults[name])
            if not is_given:
                setattr(self, name, value)
                self.preset_settings[name] = value

    def __str__(self):
        if self.preset is None:
            return super().__str__()
        wanted = PRESETS[self.preset].settings
        own = {name: getattr(self, name) for name in wanted if name not in self.preset_settings}
        lines = [
            f"preset {self.preset!r}: {PRESETS[self.preset].source}",
            "  sets " + ", ".join(f"{name}={value!r}" for name, value in self.preset_settings.items()),
        ]
        if own:
            lines.append("  set beside it: " + ", ".join(f"{name}={value!r}" for name, value in own.items()))
        return "\n".join([*lines, super().__str__()])

    __repr__ = __str__

    def __getstate__(self):
        # The Trainer pickles its arguments into `training_args.bin`, which is saved and uploaded: no secrets in it.
        return {**_without_secrets(self.__dict__), "hub_token": None}

    def to_dict(self):
        # Trackers are given this
        return _without_secrets(super().to_dict())

    def __deepcopy__(self, memo):
        # A copy goes through `__getstate__` unless told otherwise, and has to keep the token.
        clone = object.__new__(type(self))
        memo[id(self)] = clone
        clone.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return clone

    def __copy__(self):
        clone = object.__new__(type(self))
        clone.__dict__.update(self.__dict__)
        return clone


# Keys of `model_init_kwargs` and its like under which `from_pretrained` takes a token of the Hub.
_SECRET_KEYS = frozenset({"token", "use_auth_token"})


def _without_secrets(values: dict[str, Any]) -> dict[str, Any]:
    """Settings without the tokens that stand inside of settings that are dictionaries."""
    return {
        name: {key: its for key, its in value.items() if key not in _SECRET_KEYS} if type(value) is dict else value
        for name, value in values.items()
    }


def as_marft_config(args: GRPOConfig) -> MARFTConfig:
    """
    The arguments as a [`MARFTConfig`]. A [`~trl.GRPOConfig`] keeps all its values and gets the defaults of the rest.

    Raises:
        TypeError: `args` is neither.
    """
    if isinstance(args, MARFTConfig):
        return args
    if not isinstance(args, GRPOConfig):
        raise TypeError(f"`args` must be a `MARFTConfig` (or a `GRPOConfig`), got {type(args).__name__}.")
    config = object.__new__(MARFTConfig)
    # Already set up: running `__post_init__` again would change the batch sizes
    config.__dict__.update(args.__dict__)
    config.given, config.preset_settings = frozenset(), {}
    config.credit_kind = "returns"
    check_numbers(config)
    check_choices(config)
    check_supported(config)
    check_combinations(config)
    return config
