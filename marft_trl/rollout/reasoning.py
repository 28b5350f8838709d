# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Reasoning of earlier turns: what a chat template shows of a turn that others, or later turns, are shown."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..episodes.records import Seen, Turn
from .chat_template import REASONING, ChatTemplate, call_of


_TAG = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")
_REASONS, _ANSWER = "REASONS", "ANSWER"
_USER: dict[str, Any] = {"role": "user", "content": "x"}


class EarlierReasoning:
    """
    Tells the reasoning of a turn from its answer, in the way in which the chat template writes both. The template is
    then given them apart, and shows the reasoning where it does so of any message. Texts do not go through the
    template themselves, so that they cannot become control tokens.

    Args:
        template ([`ChatTemplate`]): is tried on messages with reasoning.
    """

    def __init__(self, template: ChatTemplate):
        self._template = template
        self._opening, self._closing, self._header = self._read_fields()
        self._has_field = bool(self._closing)
        if not self._has_field:
            self._opening, self._closing = self._read_contents()
        content = f"{self._opening}{_REASONS}{self._closing}{_ANSWER}"
        said = {"content": _ANSWER, **dict.fromkeys(REASONING, _REASONS)} if self._has_field else {"content": content}
        earlier = self._render(said, _USER)
        self.is_cut = bool(self._closing) and _ANSWER in earlier and _REASONS not in earlier
        self._is_cut_at_once = not self._has_field and self.is_cut and _REASONS not in self._render(said)
        unclosed = self._render({"content": f"{self._opening}{_REASONS}"}, _USER)
        self._is_cut_unclosed = bool(self._opening) and _REASONS not in unclosed

    def _read_fields(self) -> tuple[str, str, str]:
        """What the template writes before reasoning, after it, and before an answer. Empty if it has no reasoning."""
        for said in ({"content": _ANSWER}, {"content": "", "tool_calls": [call_of("x")]}):
            head, reasons, tail = self._render({**said, **dict.fromkeys(REASONING, _REASONS)}).partition(_REASONS)
            closing = _TAG.search(tail.partition(_ANSWER)[0]) if reasons else None
            if closing is None:
                continue
            plain, answered, _ = self._render(said).partition(_ANSWER)
            shared = re.sub(r"<[^<>]*$", "", os.path.commonprefix([head, plain]))  # noqa: RUF071 (of characters)
            opening, header = head[len(shared) :].strip(), plain[len(shared) :].strip() if answered else ""
            if not opening:  # the template writes the tags of reasoning also where there is none
                opening = next(iter(re.findall(rf"(?:{_TAG.pattern})\s*$", shared)), "").strip()
            return opening, closing[0], "" if closing[0] in header else header
        return "", "", ""

    def _read_contents(self) -> tuple[str, str]:
        """The tags between which the template cuts contents; the first is empty if it cuts all before the other."""
        tags = sorted(set(_TAG.findall(self._template.text)))
        for closing in tags:
            if self._cuts("".join(tag for tag in tags if tag != closing), closing):
                found = (tag for tag in ("", *tags) if self._cuts(tag, closing))
                return next(found, ""), closing
        return "", ""

    def _cuts(self, opening: str, closing: str) -> bool:
        shown = self._render({"content": f"{opening}{_REASONS}{closing}{_ANSWER}"}, _USER)
        return _ANSWER in shown and _REASONS not in shown

    def _render(self, said: dict[str, Any], *later: dict[str, Any]) -> str:
        """A conversation with a turn; empty where the template cannot render it."""
        try:
            return self._template.render([_USER, {"role": "assistant", **said}, *later], add_generation_prompt=False)
        except Exception:  # templates can raise any error
            return ""

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
        """The text of a turn without its reasoning, if the template shows earlier messages without it."""
        return self._parted(text)[1] if self.is_cut else text

    def is_in(self, text: str) -> bool:
        """Whether a text has reasoning, with the tags of the template."""
        return any(tag and tag in text for tag in (self._opening, self._closing, self._header))

    def as_fields(self, message: dict[str, Any], is_earlier: bool) -> dict[str, Any]:
        """
        A message of an assistant with its reasoning as the template takes it: in fields of its own.

        Args:
            message (`dict`): the message.
            is_earlier (`bool`): whether a user's message follows it.
        """
        text = message.get("content") or ""
        if not (self._has_field or self._is_cut_at_once or (is_earlier and self.is_cut)):
            return message
        reasoning, answer = self._parted(text)
        fields = dict.fromkeys(REASONING, reasoning) if self._has_field and reasoning else {}
        return {**message, "content": answer, **fields} if answer != text else message

    def _parted(self, text: str) -> tuple[str, str]:
        """The reasoning and the answer of a text. One that was cut off within reasoning is an answer, with tags."""
        if not self.is_in(text):
            return "", text
        reasoning, found, answer = text.rpartition(self._header or self._closing)
        if self._header:  # GPT-OSS; before a call, the reasoning has an end, but no answer follows
            before, closed, _ = (reasoning if found else text).partition(self._closing)
            reasoning, found, answer = before if closed else "", found or closed, answer if found else ""
        if not found:
            return "", "" if self._header or self._is_cut_unclosed else text
        return reasoning.rpartition(self._opening)[2].strip() if self._opening else reasoning, answer.lstrip("\n")
