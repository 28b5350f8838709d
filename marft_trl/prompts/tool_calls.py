# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Parsing of tool calls, and preparation of chat templates for tools. Uses TRL's functions (checked for 1.16)."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils import get_json_schema
from trl.chat_template_utils import (
    add_response_schema,
    get_training_chat_template,
    is_chat_template_prefix_preserving,
    parse_response,
    supports_tool_calling,
)

from ..agents import AgentSpec
from ..episodes.records import TOOL
from ..episodes.tools import MALFORMED, ToolCall, tool_name
from ..workflows import Workflow
from .chat_template import make_call


_SHORTEST_OPENING = 4  # of a call; shorter texts may also occur in turns without calls
_TAG = re.compile(r"<[^<>\s]+>")


def parse_calls(
    tokenizer, completion_ids: list[int], prompt_ids: list[int], schemas: list[dict[str, Any]]
) -> tuple[ToolCall, ...]:
    """Parse calls with TRL's parser. Return none if a call is malformed, and raise no error for any completion."""
    try:
        parsed = parse_response(tokenizer, completion_ids, prefix=prompt_ids, tools=schemas)
        calls = [call.get("function", call) for call in parsed.get("tool_calls") or ()]
        # A model can write any JSON instead of the name
        return tuple(
            ToolCall(call["name"], call["arguments"]) if isinstance(call["name"], str) else MALFORMED for call in calls
        )
    except Exception:  # parsers can raise any error on unexpected texts
        return ()


def call_opening(tokenizer, chat_template: str | None = None) -> str | None:
    """The text before the name with which a template begins a call, such as `<tool_call>`; `None` if unknown."""
    name = "marft-some-function"
    prompt = [{"role": "user", "content": "x"}]
    calling = [*prompt, {"role": "assistant", "content": "", "tool_calls": [make_call(name)]}]
    try:
        options = {"chat_template": chat_template, "tokenize": False}
        before = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, **options)
        opening, found, _ = tokenizer.apply_chat_template(calling, **options).partition(name)
    except Exception:  # templates can raise any error
        return None
    if not found:
        return None
    shared = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(before, opening, strict=False))
    opening = opening[len(list(shared)) :]
    tags = [tag for tag in _TAG.findall(opening) if tag not in before]
    text = tags[-1] if tags else opening.strip()
    return text if len(text) >= _SHORTEST_OPENING else None


def call_pattern(tokenizer, chat_template: str | None = None) -> re.Pattern | None:
    """
    A pattern of the beginning of a call, including an incomplete one: at the beginning of a line, behind a control
    token or reasoning, or before the content of a call, so that a mere mention does not match. `None` if unknown.
    """
    opening = call_opening(tokenizer, chat_template)
    if opening is None:
        return None
    start = re.escape(opening)
    if _TAG.fullmatch(opening) is None:  # plain text, such as a JSON object that begins the turn
        return re.compile(rf"(?:\A|(?<=\|>)\w*)\s*{start}")
    return re.compile(
        rf"^[ \t]*{start}|(?<=\|>){start}|(?<=</think>){start}|{start}(?=\s*(?:[\[{{<]|\Z))", re.MULTILINE
    )


def check_functions(functions: Sequence[Callable], whose: str) -> None:
    for function in functions:
        try:
            get_json_schema(function)
        except Exception as error:
            raise ValueError(
                f"The tool `{tool_name(function)}` of {whose} cannot be described to a model: "
                f"{str(error).rstrip('.')}. Give every argument a type hint and a line under `Args:` of the docstring."
            ) from error


def prepare_tools(tokenizer: PreTrainedTokenizerBase, agents: Sequence[AgentSpec], workflow: Workflow) -> str | None:
    """
    Prepare the tokenizer for the tools of the team. Return the chat template to use instead of the tokenizer's, or
    `None` if it can be trained with. Raise a `ValueError` if a tool has no schema or a name that is in use, an agent
    has the name that tool results are shown under, or the chat template does not support tools.
    """
    check_functions(workflow.functions, f"the workflow `{type(workflow).__name__}`")
    workflow_names = {tool_name(function) for function in workflow.functions}
    for agent in agents:
        check_functions(agent.functions, f"agent {agent.name!r}")
        if twice := sorted(workflow_names & {tool_name(function) for function in agent.functions}):
            raise ValueError(
                f"Agent {agent.name!r} and the workflow `{type(workflow).__name__}` both have a tool named "
                f"{twice[0]!r}, so only one of the two could be called. Rename one of them."
            )
        if agent.name == TOOL:
            raise ValueError(f"An agent cannot be named {TOOL!r}, since tool results are shown under this name.")
    owner = next((f"Agent {agent.name!r}" for agent in agents if agent.tools), "The workflow")
    return prepare_template(tokenizer, owner)


def prepare_template(tokenizer, whose: str) -> str | None:
    """
    Prepare a tokenizer for tools as `GRPOTrainer` does. Return the chat template to use instead of the tokenizer's
    own, or `None` if its own is suitable for training. Raise a `ValueError` if its calls cannot be rendered or parsed.
    """
    if not supports_tool_calling(tokenizer):
        lacks = "has no chat template" if tokenizer.chat_template is None else "has a chat template without tools"
        if isinstance(tokenizer.chat_template, dict):
            lacks = f"has several chat templates ({', '.join(map(repr, tokenizer.chat_template))})"
            if "tool_use" in tokenizer.chat_template:
                lacks += "; set `tokenizer.chat_template = tokenizer.chat_template['tool_use']`"
        raise ValueError(
            f"{whose} has tools, but the tokenizer {lacks}. The template must render tools, the assistant's calls and "
            "messages with the role `tool`. Use a model that was trained for tools, e.g. from the Qwen 2.5 or Qwen 3 "
            "family, or remove the tools."
        )
    if not any(getattr(tokenizer, name, None) for name in ("response_template", "response_schema")):
        try:
            add_response_schema(tokenizer)
        except ValueError as error:
            raise ValueError(
                f"{whose} has tools, but the format of calls in the chat template of the tokenizer is unknown. Set "
                "`response_template` of the tokenizer (see the documentation of transformers on parsing responses), "
                "or use a model from a known family."
            ) from error
    return None if is_chat_template_prefix_preserving(tokenizer) else get_training_chat_template(tokenizer)
