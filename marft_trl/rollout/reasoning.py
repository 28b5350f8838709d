# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Reasoning of earlier turns: what a chat template shows of a turn that others, or later turns, are shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..episodes.records import Seen, Turn
from .chat_template import ChatTemplate


# Tags around reasoning (Qwen3, DeepSeek-R1 and others), and the channel of an answer (GPT-OSS)
_TAGS = (("<think>", "</think>"), ("<thinking>", "</thinking>"), ("<seed:think>", "</seed:think>"))
_CHANNEL, _ANSWER = "<|channel|>", "<|channel|>final<|message|>"


class EarlierReasoning:
    """
    Cuts the reasoning off earlier turns, where the chat template of the model does. Models are trained with templates
    that show answers alone of earlier messages. Contents of messages do not go through the template here, so that a
    text cannot become a control token; what the template would cut is cut before.

    Args:
        template ([`ChatTemplate`]): is tried on messages with reasoning.
    """

    def __init__(self, template: ChatTemplate):
        self._closing = [closing for opening, closing in _TAGS if _cuts_tags(template, opening, closing)]
        self._has_channels = _cuts_channels(template)

    @property
    def is_cut(self) -> bool:
        """Whether the template cuts anything."""
        return bool(self._closing) or self._has_channels

    def shown(self, seen: Sequence[Seen], whole: Turn | None = None) -> list[Seen]:
        """
        Turns and feedback as the template would show them.

        Args:
            seen (`Sequence[Turn | Feedback]`): what is shown.
            whole ([`Turn`], *optional*): a turn that is going on, whose reasoning stays.
        """
        if not self.is_cut:
            return list(seen)
        return [self._answered(one) if isinstance(one, Turn) and one is not whole else one for one in seen]

    def _answered(self, turn: Turn) -> Turn:
        before = turn.without_calls
        return replace(
            turn, raw_text=self.answer(turn.raw_text), without_calls=None if before is None else self.answer(before)
        )

    def answer(self, text: str) -> str:
        """The text of a turn without its reasoning. A turn that was cut off within it stays as it is, with tags."""
        for closing in self._closing:
            if closing in text:
                text = text.rpartition(closing)[2].lstrip("\n")
        if self._has_channels and _CHANNEL in text:
            text = text.rpartition(_ANSWER)[2] if _ANSWER in text else ""
        return text


def _cuts_tags(template: ChatTemplate, opening: str, closing: str) -> bool:
    shown = _rendered(template, {"content": f"{opening}\nREASONS\n{closing}\n\nANSWER"})
    return "ANSWER" in shown and "REASONS" not in shown


def _cuts_channels(template: ChatTemplate) -> bool:
    shown = _rendered(template, {"content": "ANSWER", "thinking": "REASONS"})
    return f"{_ANSWER}ANSWER" in shown and "REASONS" not in shown


def _rendered(template: ChatTemplate, said: dict[str, Any]) -> str:
    """A conversation with an earlier turn; empty where the template cannot render it."""
    first, last = {"role": "user", "content": "x"}, {"role": "user", "content": "y"}
    try:
        return template.render([first, {"role": "assistant", **said}, last])
    except Exception:  # templates can raise any error
        return ""
