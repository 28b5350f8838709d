# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Adapters of a team as models of their own, and changes of which adapters the base has."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, cast

import torch
from peft import PeftConfig, PeftModel
from transformers import PreTrainedModel

from ..agents import AgentSpec
from ..seams.bitsandbytes import without_bitsandbytes
from .adapter_files import adapter_folder, add_from
from .adapters import adapter_parameters, check_adapter_config


def alone(model: PeftModel, adapter: str) -> PeftModel:
    """
    A model that has one of the adapters. It has layers of its own and the same weights of the base, which take no
    further memory.

    Args:
        model ([`~peft.PeftModel`]): the base with the adapters of the team.
        adapter (`str`): the adapter that stays. Its weights are copied.
    """
    own = {id(one) for name in model.peft_config for one in adapter_parameters(model, name).values()}
    shared = [*model.named_parameters(), *model.named_buffers()]
    found = _only(copy.deepcopy(model, {id(one): one for _, one in shared if id(one) not in own}), adapter)

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(
            "This model has the weights of the base in common with its team, so they must not be changed. "
            "`team.merge(agent)` returns a merged copy."
        )

    for name in ("merge_adapter", "merge_and_unload"):
        setattr(found.base_model, name, refuse)
    return found


def merged(model: PeftModel, adapter: str) -> PreTrainedModel:
    """A copy of the base with an adapter added to its weights."""
    return _only(copy.deepcopy(model), adapter).merge_and_unload()


def _only(model: PeftModel, adapter: str) -> PeftModel:
    model.set_adapter(adapter)
    for name in [name for name in model.peft_config if name != adapter]:
        model.delete_adapter(name)
    return model


def add_adapter(
    model: PeftModel, agent: AgentSpec, weights: str | os.PathLike | None, peft_config: PeftConfig | None
) -> None:
    """
    Give the base the adapter of a new agent.

    Args:
        model ([`~peft.PeftModel`]): the base with adapters.
        agent ([`AgentSpec`]): the agent.
        weights (`str` or `os.PathLike`, *optional*): folder or Hub id of an adapter.
        peft_config ([`~peft.PeftConfig`], *optional*): config of a fresh adapter.

    Raises:
        ValueError: the adapter does not fit, or it is not clear which one is meant.
    """
    config = agent.peft_config or peft_config
    if agent.adapter in model.peft_config:
        if weights is None and config is None and agent.adapter != agent.name:
            return
        raise ValueError(
            f"There is an adapter {agent.adapter!r} already. Give the agent another name, or "
            f"`AgentSpec({agent.name!r}, adapter={agent.adapter!r})` under another name to share it."
        )
    if (weights is None) == (config is None):
        raise ValueError(
            f"Where the weights of agent {agent.name!r} come from is not clear: pass `weights=` (folder or Hub id of "
            "a PEFT adapter), or `peft_config=` for fresh ones, or an `AgentSpec` with `adapter=` that names one of "
            f"{', '.join(map(repr, model.peft_config))}."
        )
    if weights is not None:
        add_from(model, agent, adapter_folder(weights))
    else:
        check_adapter_config(agent, config, cast(PreTrainedModel, model.get_base_model()))
        with without_bitsandbytes(model):
            model.add_adapter(agent.adapter, copy.deepcopy(config))
    for parameter in adapter_parameters(model, agent.adapter).values():
        parameter.requires_grad_(False)


@torch.no_grad()
def rename_adapter(model: PeftModel, old: str, new: str) -> None:
    """Let an adapter have another name, with the same weights."""
    with without_bitsandbytes(model):
        model.add_adapter(new, copy.deepcopy(model.peft_config[old]))
    pairs = zip(adapter_parameters(model, old).values(), adapter_parameters(model, new).values(), strict=True)
    for theirs, mine in pairs:
        mine.data = theirs.data
        mine.requires_grad_(False)
    model.delete_adapter(old)


@contextlib.contextmanager
def renaming(model: PeftModel, old: str, new: str) -> Iterator[None]:
    """Context manager: an adapter has another name from now on, unless what is done within fails."""
    if old != new:
        rename_adapter(model, old, new)
    try:
        yield
    except BaseException:
        if old != new:
            rename_adapter(model, new, old)
        raise


def drop_adapters(model: PeftModel, agents: Sequence[AgentSpec]) -> None:
    """Delete the adapters that none of these agents acts with."""
    used = {agent.adapter for agent in agents if agent.has_policy}
    model.set_adapter(next(name for name in model.peft_config if name in used))
    for name in [name for name in model.peft_config if name not in used]:
        model.delete_adapter(name)


def has_own_adapter(agent: AgentSpec, agents: Sequence[AgentSpec]) -> bool:
    """`True` if no other agent acts with the adapter of an agent."""
    return agent.has_policy and not any(one.adapter == agent.adapter for one in agents if one is not agent)


def replaced(agents: Sequence[AgentSpec], old: AgentSpec, new: AgentSpec) -> list[AgentSpec]:
    """A team in which an agent has another name. Those who act with its past copies know it by the new one."""
    known = [
        dataclasses.replace(one, copy_of=new.name) if one.copy_of is not None and one.copy_of == old.name else one
        for one in agents
    ]
    return [new if its is old else one for its, one in zip(agents, known, strict=True)]
