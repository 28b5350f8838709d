# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Specification of the agents of a team."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from .episodes.tools import tool_name
from .system.hints import brief, checked_names


if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin


# Names of folders, parameters and metrics. PEFT does not check them: "/tmp/x" would write elsewhere, "a/b" would nest
NAME_PATTERN = re.compile(r"[a-z][a-z0-9_-]{0,47}")
# PEFT saves the adapter "default" into the root of a folder, and TRL uses an adapter named "ref" as the reference.
RESERVED_NAMES = frozenset({"default", "ref"})


def check_name(name: object, what: str) -> None:
    """Raise unless `name` is safe as the name of a folder, an adapter and a metric."""
    if not isinstance(name, str):
        raise TypeError(f"The name of {what} must be a string, got {name!r} of type {type(name).__name__}.")
    if not NAME_PATTERN.fullmatch(name):
        raise ValueError(
            f"{name!r} cannot be the name of {what}: it becomes a folder name and a part of parameter names. Use a "
            "lower-case letter followed by at most 47 lower-case letters, digits, '_' or '-', e.g. 'solver_2'."
        )
    if name in RESERVED_NAMES or name.startswith("checkpoint-"):
        reserved = ", ".join(sorted(RESERVED_NAMES))
        raise ValueError(
            f"{name!r} cannot be the name of {what}: {reserved} and names that begin with 'checkpoint-' are reserved "
            "in saved folders. Choose another name."
        )


def _as_functions(value: object, what: str, fix: str = "") -> tuple[Callable, ...]:
    if value is None:
        return ()
    functions = (value,) if callable(value) else value
    if isinstance(functions, str) or not isinstance(functions, Sequence) or not all(map(callable, functions)):
        raise TypeError(f"{what} must be a function or a list of functions, got {value!r}.{fix}")
    return tuple(functions)


def as_reward_funcs(reward_funcs: object, whose: str) -> tuple[Callable, ...]:
    fix = " Wrap a reward model in a function that returns one score per completion."
    return _as_functions(reward_funcs, f"`reward_funcs` of {whose}", fix)


def as_tools(tools: object, whose: str) -> tuple[Callable, ...]:
    """Return functions as a tuple. Raise a `TypeError` for anything else, and a `ValueError` for equal names."""
    functions = _as_functions(tools, f"`tools` of {whose}")
    names = [tool_name(function) for function in functions]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"`tools` of {whose} has several functions named {twice[0]!r}; names must be unique.")
    return functions


@dataclass(frozen=True)
class AgentSpec:
    """
    One agent of a team: a named policy with its system prompt, adapter and sampling settings. For parameters that are
    `None`, the trainer's value is used.

    Args:
        name (`str`): unique in the team. A lower-case letter followed by at most 47 of `a-z0-9_-`.
        system_prompt (`str`, *optional*): role prompt, shown as the system message before everything else. If `None`,
            the agent has no role prompt.
        adapter (`str`, *optional*, defaults to the agent's name): name of the LoRA adapter the agent acts with. Agents
            that name the same adapter share it.
        peft_config ([`~peft.PeftConfig`], *optional*): PEFT configuration of the agent's adapter. Overrides the
            trainer's `peft_config`.
        trainable (`bool`, *optional*, defaults to `True`): whether to train the agent's adapter. A frozen agent still
            generates turns, but is not updated.
        learning_rate (`float`, *optional*): peak learning rate of the agent's adapter. Overrides the trainer's
            `learning_rate`. All agents have the same schedule, scaled by their peak: a minimum rate (`min_lr`,
            `lr_end`) refers to the trainer's `learning_rate`, and is scaled like the peak for this agent.
        max_completion_length (`int`, *optional*): maximum number of tokens to generate per turn.
        temperature (`float`, *optional*): sampling temperature. The log-probabilities in the loss use the same
            temperature.
        top_p (`float`, *optional*): probability mass that nucleus sampling keeps, in `(0, 1]`.
        top_k (`int`, *optional*): number of tokens that top-k sampling keeps. `0` disables top-k sampling.
        min_p (`float`, *optional*): minimum probability of a token, relative to the most likely token, in `[0, 1]`.
        stop (`str` or `Sequence[str]`, *optional*): texts that end a turn. They remain part of the turn.
        description (`str`, *optional*): one-line description of the agent's role, used in model cards and in the
            prompts of orchestrators.
        reward_funcs (`Callable` or `Sequence[Callable]`, *optional*): reward functions for the agent's own turns, used
            with `credit="per_step"`. The rewards of several functions are summed. They have TRL's signature, with one
            completion per turn, and these additional arguments: `turn` (the scored [`Turn`]), `turns` (the turns of
            its episode) and `answer_turn` (the turn that is the team's answer; `None` if a candidate is scored).
        view (`Callable`, *optional*): function `view(agent, prompt, seen)` that returns the messages shown to the
            agent. Overrides the trainer's `view`.
        tools (`Callable` or `Sequence[Callable]`, *optional*): functions that the agent may call. As in TRL, each
            function needs type hints and a Google-style docstring with `Args:`. Functions may be `async`. Requires a
            chat template that supports tools. Defaults to the `tools` of the trainer; with `[]`, the agent has no
            tools, also none of an environment.
        model (`str` or [`~transformers.PreTrainedModel`], *optional*): base model of the agent, if it is not the
            trainer's `model`: a Hub id or folder, or a loaded model (a [`~peft.PeftModel`] too), for example in 4 bits
            or on another device. Agents that name the same model share one base. If none of its agents has a
            `peft_config`, and the trainer has none, the base itself is trained.
        model_init_kwargs (`dict`, *optional*): arguments of `from_pretrained` for a `model` that is loaded by name.
            The trainer's `model_init_kwargs` and `quantization_config` apply only to its own `model`.
        processing_class ([`~transformers.PreTrainedTokenizerBase`], *optional*): tokenizer or processor of `model`, if
            it is not the one that is saved with the model.
        sees_images (`bool`, *optional*, defaults to `True`): whether the agent is shown images. Agents whose model is
            not a vision-language model never are.
        reply (`Callable`, *optional*): function `reply(messages)` that writes the agent's turns: a script, an API or a
            person. It gets what the agent is shown, as chat messages, and returns the text of the turn. It may be
            `async`. The agent has no adapter and is never trained.
    """

    name: str
    system_prompt: str | None = None
    adapter: str = None  # type: ignore[assignment]  # set below
    peft_config: PeftConfig | None = None
    trainable: bool = True
    learning_rate: float | None = None
    max_completion_length: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    stop: str | Sequence[str] | None = None
    description: str | None = None
    reward_funcs: Callable | Sequence[Callable] | None = None
    view: Callable | None = None
    tools: Callable | Sequence[Callable] | None = None
    reply: Callable | None = None
    model: str | PreTrainedModel | None = field(default=None, repr=False)  # a loaded one has a long text
    model_init_kwargs: dict[str, Any] | None = None
    processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None
    sees_images: bool = True

    def __post_init__(self):
        check_name(self.name, "an agent")
        self._check_reply()
        self._check_model()
        if self.has_policy:
            object.__setattr__(self, "adapter", self.name if self.adapter is None else self.adapter)
            check_name(self.adapter, f"the adapter of agent {self.name!r}")
        if self.stop is not None:
            object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        object.__setattr__(self, "reward_funcs", as_reward_funcs(self.reward_funcs, f"agent {self.name!r}"))
        if self.tools is not None:
            object.__setattr__(self, "tools", as_tools(self.tools, f"agent {self.name!r}"))
        self._check_types()
        self._check_numbers()
        if self.reply is not None:
            object.__setattr__(self, "trainable", False)

    @property
    def has_policy(self) -> bool:
        """`True` if a model writes the agent's turns."""
        return self.reply is None

    def _check_reply(self) -> None:
        if self.reply is None:
            return
        if not callable(self.reply):
            raise TypeError(self._complaint("reply", "a function `reply(messages)` or None"))
        if self.adapter == self.name:  # of a spec that is changed
            object.__setattr__(self, "adapter", None)
        for name in ("adapter", "peft_config", "learning_rate", "tools", "reward_funcs", "stop", "model"):
            if getattr(self, name) not in (None, ()):
                raise ValueError(
                    f"Agent {self.name!r} takes its turns from `reply`, so `{name}` would have no effect. Remove it."
                )

    def _check_model(self) -> None:
        if isinstance(self.model, os.PathLike):
            object.__setattr__(self, "model", os.fspath(self.model))
        for name in ("model_init_kwargs", "processing_class"):
            if getattr(self, name) is not None and self.model is None:
                raise ValueError(
                    f"Agent {self.name!r} sets `{name}` without `model`, so it would have no effect. Set `model`, or "
                    f"pass `{name}` to the trainer."
                )
        if self.model_init_kwargs is not None and not isinstance(self.model, str):
            raise ValueError(
                f"Agent {self.name!r} sets `model_init_kwargs`, but its `model` is already loaded. Load the model "
                "with them, or set `model` to the name or folder of the model."
            )

    def _check_types(self) -> None:
        for field_name in ("system_prompt", "description"):
            value = getattr(self, field_name)
            if value is not None and not isinstance(value, str):
                raise TypeError(self._complaint(field_name, "a string or None"))
        if self.view is not None and not callable(self.view):
            raise TypeError(self._complaint("view", "a function `view(agent, prompt, seen)` or None"))
        for field_name in ("trainable", "sees_images"):
            if not isinstance(getattr(self, field_name), bool):
                raise TypeError(self._complaint(field_name, "True or False"))
        if self.stop is not None and not all(isinstance(text, str) and text for text in self.stop):
            raise TypeError(self._complaint("stop", "a non-empty string or a list of non-empty strings"))

    def _check_numbers(self) -> None:
        ranges = {
            "learning_rate": (int | float, lambda v: v >= 0, "a number of at least 0"),
            "max_completion_length": (int, lambda v: v >= 1, "an integer of at least 1"),
            "temperature": (int | float, lambda v: v > 0, "a number above 0"),
            "top_p": (int | float, lambda v: 0 < v <= 1, "a number in (0, 1]"),
            "top_k": (int, lambda v: v >= 0, "an integer of at least 0"),
            "min_p": (int | float, lambda v: 0 <= v <= 1, "a number in [0, 1]"),
        }
        for field_name, (kind, holds, needed) in ranges.items():
            value = getattr(self, field_name)
            if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
                raise TypeError(self._complaint(field_name, needed))
            if value is not None and not (abs(value) <= sys.float_info.max and holds(value)):
                raise ValueError(self._complaint(field_name, needed))

    def _complaint(self, field_name: str, needed: str) -> str:
        return f"`{field_name}` of agent {self.name!r} must be {needed}, got {getattr(self, field_name)!r}."

    @property
    def functions(self) -> tuple[Callable, ...]:
        """`tools` with the type of a tuple, which `__post_init__` makes of every accepted form; empty for `None`."""
        return self.tools or ()  # type: ignore[return-value]

    def to_dict(self) -> dict[str, Any]:
        """
        Return the spec as JSON-serializable data. The `peft_config`, which is saved in the adapter's folder, the
        reward functions, the view, the tools, `reply` and the base model are not included.
        """
        plain = {name: getattr(self, name) for name in self.stored_fields()}
        if self.sees_images:  # earlier versions do not know the field
            del plain["sees_images"]
        return {**plain, "stop": list(self.stop) if self.stop is not None else None}

    @classmethod
    def stored_fields(cls) -> list[str]:
        """Names of the fields that [`to_dict`] returns."""
        left_out = {"peft_config", "reward_funcs", "view", "tools", "reply"}
        left_out |= {"model", "model_init_kwargs", "processing_class"}
        return [item.name for item in fields(cls) if item.name not in left_out]


_PAST_COPIES = (
    "An opponent with past weights is a frozen agent, `AgentSpec(name, trainable=False)`, whose adapter a callback "
    "changes: see `PastSelves` in examples/self_play.py."
)
_REMOVED = dict.fromkeys(("copy_of", "copy_every", "copies"), _PAST_COPIES)
AgentSpec.__init__ = checked_names("AgentSpec", elsewhere=_REMOVED)(AgentSpec.__init__)  # type: ignore[method-assign]


def check_team(agents: object) -> list[AgentSpec]:
    """Return the agents as a list. Raise a `TypeError` unless they are specs, a `ValueError` if they are no team."""
    if not isinstance(agents, Sequence) or isinstance(agents, str):
        raise TypeError(
            f"`agents` must be a list of `AgentSpec`, got {type(agents).__name__}. Example: "
            "`agents=[AgentSpec('reasoner'), AgentSpec('actor')]`."
        )
    if not agents:
        raise ValueError("`agents` is empty: a team needs at least one agent, e.g. `agents=[AgentSpec('solver')]`.")
    seen: dict[str, AgentSpec] = {}
    for agent in agents:
        if not isinstance(agent, AgentSpec):
            raise TypeError(
                f"`agents` must be a list of `AgentSpec`, got an item of type {type(agent).__name__}. Write "
                + (f"`AgentSpec({agent!r})`." if isinstance(agent, str) else "`AgentSpec(name, ...)`.")
            )
        if agent.name in seen:
            raise ValueError(f"Two agents have the name {agent.name!r}; names must be unique in a team.")
        seen[agent.name] = agent
    owners: dict[str, AgentSpec] = {}
    for agent in (agent for agent in agents if agent.has_policy):
        if agent.adapter in seen and not seen[agent.adapter].has_policy:
            raise ValueError(
                f"Agent {agent.name!r} uses the adapter {agent.adapter!r}, but {agent.adapter!r} is the name of an "
                "agent whose turns a function writes. Choose another name for the adapter."
            )
        owner = owners.setdefault(agent.adapter, agent)
        for field_name in ("trainable", "learning_rate", "peft_config", "model", "model_init_kwargs"):
            value, owner_value = getattr(agent, field_name), getattr(owner, field_name)
            if value != owner_value:
                raise ValueError(
                    f"Agents {owner.name!r} and {agent.name!r} share the adapter {agent.adapter!r} but differ in "
                    f"`{field_name}` ({brief(repr(owner_value), 60)} and {brief(repr(value), 60)}). Set the same "
                    "value on both, or give them different adapters."
                )
    return list(agents)
