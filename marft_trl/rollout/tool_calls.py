# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Tool calls in what a model sampled, and chat templates that know of tools, with TRL's help (checked for 1.16)."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

from transformers.utils import get_json_schema
from trl.chat_template_utils import (
    add_response_schema,
    get_training_chat_template,
    is_chat_template_prefix_preserving,
    parse_response,
    supports_tool_calling,
)

from ..tools import ToolCall, tool_name


# A shorter text may well be no call
_SHORTEST_OPENING = 4


def parse_calls(
    tokenizer, completion_ids: list[int], prompt_ids: list[int], schemas: list[dict[str, Any]]
) -> tuple[ToolCall, ...]:
    """
    The calls in a completion, as TRL reads them; none where it is no well-formed call. Never raises, whatever a model
    sampled.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): prepared by [`prepare_template`].
        completion_ids (`list[int]`): what was sampled.
        prompt_ids (`list[int]`): what came before it.
        schemas (`list[dict]`): JSON schemas of the functions that may be called.
    """
    try:
        parsed = parse_response(tokenizer, completion_ids, prefix=prompt_ids, tools=schemas)
        found = [call.get("function", call) for call in parsed.get("tool_calls") or ()]
        return tuple(ToolCall(call["name"], call["arguments"]) for call in found)
    except Exception:  # odd texts bring parsers to raise odd errors
        return ()


# What a call that cannot be read is named
MALFORMED = ToolCall("unknown", {}, problem="malformed")
_TAG = re.compile(r"<[^<>\s]+>")


def call_opening(tokenizer, chat_template: str | None = None) -> str | None:
    """
    The text that begins a call in the chat template, such as `<tool_call>`: what comes before the function's name.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): prepared by [`prepare_template`].
        chat_template (`str`, *optional*): chat template in place of the tokenizer's own.

    Returns: `None` where the template does not tell.
    """
    name = "marft-some-function"
    asked = [{"role": "user", "content": "x"}]
    call = {"type": "function", "function": {"name": name, "arguments": {}}}
    calling = [*asked, {"role": "assistant", "content": "", "tool_calls": [call]}]
    try:
        options = {"chat_template": chat_template, "tokenize": False}
        before = tokenizer.apply_chat_template(asked, add_generation_prompt=True, **options)
        opening, found, _ = tokenizer.apply_chat_template(calling, **options).partition(name)
    except Exception:  # templates raise what they like
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
    What a call begins with, also one that was cut short: its opening at the beginning of a line, or before something
    that may be a call. A text that mentions a tag begins none. `None` where the template does not tell.
    """
    opening = call_opening(tokenizer, chat_template)
    if opening is None:
        return None
    start = re.escape(opening)
    if _TAG.fullmatch(opening) is None:  # plain text, such as a JSON object that begins the turn
        return re.compile(rf"\A\s*{start}")
    return re.compile(rf"^[ \t]*{start}|{start}(?=\s*(?:[\[{{<]|\Z))", re.MULTILINE)


def check_functions(functions: Sequence[Callable], whose: str) -> None:
    """
    Raise for a function that a model cannot be told of.

    Raises:
        ValueError: names it and what its docstring or its types lack.
    """
    for function in functions:
        try:
            get_json_schema(function)
        except Exception as error:
            raise ValueError(
                f"The tool `{tool_name(function)}` of {whose} cannot be described to a model: {error} Give every "
                "argument a type and a line under `Args:` in a Google-style docstring."
            ) from error


def prepare_template(tokenizer, whose: str) -> str | None:
    """
    Prepare a tokenizer for tools as `GRPOTrainer` does.

    Returns: the chat template to use in place of the tokenizer's own, if it cannot be trained with.

    Raises:
        ValueError: the chat template knows no tools, or no way is known to read its calls.
    """
    if not supports_tool_calling(tokenizer):
        has = "has no chat template" if tokenizer.chat_template is None else "has a chat template without tools"
        raise ValueError(
            f"{whose} has tools, but the tokenizer {has}: it has to render tools, the calls of an assistant and the "
            "messages of the role `tool`. Use a model that was trained for tools, e.g. of the Qwen 2.5 or Qwen 3 "
            "family, or leave the tools out."
        )
    if not any(getattr(tokenizer, name, None) for name in ("response_template", "response_schema")):
        try:
            add_response_schema(tokenizer)
        except ValueError as error:
            raise ValueError(
                f"{whose} has tools, but it is not known how calls look in the chat template of the tokenizer. Set "
                "its `response_template` (see the documentation of transformers on parsing responses), or use a "
                "model of a known family."
            ) from error
    return None if is_chat_template_prefix_preserving(tokenizer) else get_training_chat_template(tokenizer)
