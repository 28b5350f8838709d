# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Which agent answers a request of an application."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import itertools
import re
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...system.hints import brief
from ...system.json_fields import check_fields
from .requests import ChatRequest, RequestError


class AppRequest(NamedTuple):
    """
    A request, as a rule that chooses its agent sees it.

    Args:
        model (`str`): name of the model that the application asks for.
        system (`str`): text of the first system messages.
        tools (`frozenset[str]`): names of the tools of the request.
        headers (`Mapping[str, str]`): HTTP headers without credentials, under names in any case.
    """

    model: str
    system: str
    tools: frozenset[str]
    headers: Mapping[str, str]


# Chooses the name of the agent that answers. Functions run in threads, so that a slow one holds up no other request
AgentRule = Callable[[AppRequest], str | Awaitable[str]]
# Parts of the names of headers with credentials
_SECRET_HEADERS = re.compile("authorization|cookie|key|token|secret|password|credential", re.IGNORECASE)


@dataclass(frozen=True)
class BySystemPrompt:
    """
    Choose the agent by the beginning of the system prompt, for harnesses whose sub-agents use one model name.

    ```python
    ExternalApp("my-harness", agent_of=BySystemPrompt({"You are a search agent": "searcher"}, default="coder"))
    ```

    Args:
        agents (`Mapping[str, str]`):
            Names of agents by beginnings of system prompts, or of a paragraph if none begins the prompt. The longest
            one that matches counts.
        default (`str`, *optional*):
            Agent of other requests, unless they name one of these agents as their model. If omitted, they are refused.
    """

    agents: Mapping[str, str]
    default: str | None = None

    def __call__(self, request: AppRequest) -> str:
        system = request.system.lstrip()
        matching = [beginning for beginning in self.agents if system.startswith(beginning)]
        # Clients may put another block before the prompt
        matching = matching or [beginning for beginning in self.agents if f"\n\n{beginning}" in system]
        if matching:
            return self.agents[max(matching, key=len)]
        return _without_match(self, request, f"the system prompt {system[:80]!r}")


@dataclass(frozen=True)
class ByTools:
    """
    Choose the agent by the tools of the request, for harnesses that give each sub-agent its own tools.

    ```python
    ExternalApp("my-harness", tools=True, agent_of=ByTools({"edit_file": "coder", "grep": "searcher"}))
    ```

    Args:
        agents (`Mapping[str, str]`):
            Names of agents by names of tools. The first tool that the request has counts.
        default (`str`, *optional*):
            Agent of other requests, unless they name one of these agents as their model. If omitted, they are refused.
    """

    agents: Mapping[str, str]
    default: str | None = None

    def __call__(self, request: AppRequest) -> str:
        agent = next((agent for tool, agent in self.agents.items() if tool in request.tools), None)
        return agent if agent is not None else _without_match(self, request, f"the tools {sorted(request.tools)}")


_RULES = {rule.__name__: rule for rule in (BySystemPrompt, ByTools)}


def named_agents(rule: AgentRule | None) -> list[str]:
    if not isinstance(rule, (BySystemPrompt, ByTools)):
        return []
    return [*dict.fromkeys(rule.agents.values()), *([rule.default] if rule.default is not None else [])]


def describe_rule(rule: AgentRule | None) -> dict[str, Any] | None:
    """A ready-made rule as JSON data; `None` for functions, which are not stored."""
    if not isinstance(rule, (BySystemPrompt, ByTools)):
        return None
    return {"rule": type(rule).__name__, "agents": dict(rule.agents), "default": rule.default}


def rebuild_rule(description: Mapping[str, Any]) -> AgentRule:
    """Create a ready-made rule from its description. Raises `ValueError` for anything that is not a description."""
    kinds = {"rule": str, "agents": dict[str, str], "default": str | None}
    fields = check_fields(description, kinds, "`agent_of` of the workflow of the team")
    rule = _RULES.get(fields.get("rule", ""))
    if rule is None or "agents" not in fields:
        raise ValueError(
            f"`agent_of` of the workflow of the team needs a 'rule' ({' or '.join(_RULES)}) and its 'agents', got "
            f"{brief(repr(fields), 200)}."
        )
    return rule(fields["agents"], fields.get("default"))


async def choose_agent(
    rule: AgentRule, chat_request: ChatRequest, headers: MutableMapping[str, str], agents: Sequence[str]
) -> ChatRequest:
    """Return the request for the agent that a rule chooses. Secrets are removed from `headers`, the caller's copy."""
    leading = itertools.takewhile(lambda message: message["role"] == "system", chat_request.messages)
    system = [message["content"] for message in leading]
    tools = frozenset(tool["function"]["name"] for tool in chat_request.tools)
    for name in {name for name in headers if _SECRET_HEADERS.search(name)}:
        del headers[name]
    request = AppRequest(chat_request.model, "\n\n".join(system), tools, headers)
    chosen = rule(request) if isinstance(rule, (BySystemPrompt, ByTools)) else await asyncio.to_thread(rule, request)
    agent = await chosen if inspect.isawaitable(chosen) else chosen
    if agent not in agents:
        known = ", ".join(map(repr, agents))
        raise RequestError(f"`agent_of` chose {agent!r} for a request. The agents are {known}.", 404, "model")
    return dataclasses.replace(chat_request, model=agent)


def _without_match(rule: BySystemPrompt | ByTools, request: AppRequest, searched: str) -> str:
    if request.model in named_agents(rule):
        return request.model
    if rule.default is None:
        raise RequestError(f"No entry of `agent_of` matches {searched}. Add one, or set `default`.", 404, "model")
    return rule.default
