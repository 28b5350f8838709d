# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""
An observation -> messages -> token ids, such that nothing a model wrote can become a control token or a turn.

Text of teammates never passes through the tokenizer together with the chat template. The template is rendered with
placeholders where the contents go; its pieces are tokenized with control tokens on, the contents with control tokens
off, and the ids are joined.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..agents import AgentSpec
from ..episodes import Messages, Seen, Turn


# `view(agent, prompt, seen)` -> messages. `prompt` is always a list of messages here.
View = Callable[[AgentSpec, Messages, Sequence[Seen]], Messages]

# A line like "[solver]" opens what a teammate says. The same line inside a teammate's text is quoted, so that no agent
# can put words into another's mouth.
_SPEAKER_LINE = re.compile(r"^([^\S\n]*\[[a-z][a-z0-9_-]{0,47}\][^\S\n]*)$", re.MULTILINE)
_SEPARATOR = "\n\n"


def speaker(turn: Seen) -> str:
    """What a teammate is shown of a turn, or anybody of feedback: a line that names the speaker, then its words."""
    return f"[{turn.agent}]\n" + _SPEAKER_LINE.sub(r"> \1", turn.raw_text)


def team_view(agent: AgentSpec, prompt: Messages, seen: Sequence[Seen]) -> Messages:
    """
    The default view of an agent: its system prompt, the prompt of the dataset, then the turns it sees, its own as
    `assistant` and those of others, like feedback, as `user` messages that name the speaker. Neighbours of one role
    are merged, so that templates which demand alternating roles work.

    Args:
        agent ([`AgentSpec`]):
            Who is about to speak.
        prompt (`list[dict]`):
            Messages of the dataset row.
        seen (`Sequence[Turn]`):
            The turns and the feedback it is shown, in order.

    Returns: `list[dict]` with `role` and `content`.
    """
    messages = [dict(message) for message in prompt]
    if agent.system_prompt is not None:
        messages.insert(0, {"role": "system", "content": agent.system_prompt})
    for turn in seen:
        own = isinstance(turn, Turn) and turn.agent == agent.name
        messages.append(
            {"role": "assistant", "content": turn.raw_text} if own else {"role": "user", "content": speaker(turn)}
        )
    return merge_neighbours(messages)


def merge_neighbours(messages: Messages) -> Messages:
    """Join the contents of consecutive messages of one role."""
    merged: Messages = []
    for message in messages:
        if merged and merged[-1]["role"] == message["role"] and _is_plain(merged[-1]) and _is_plain(message):
            merged[-1] = {**merged[-1], "content": merged[-1]["content"] + _SEPARATOR + message["content"]}
        else:
            merged.append(message)
    return merged


def fold_system(messages: Messages) -> Messages:
    """Move the system message into the first user message, for templates that know no system role."""
    if not messages or messages[0]["role"] != "system":
        return messages
    system, rest = messages[0], messages[1:]
    if rest and rest[0]["role"] == "user":
        return [{**rest[0], "content": system["content"] + _SEPARATOR + rest[0]["content"]}, *rest[1:]]
    return [{"role": "user", "content": system["content"]}, *rest]


def _is_plain(message: dict[str, Any]) -> bool:
    return set(message) == {"role", "content"} and isinstance(message["content"], str)


class PlainEncoder:
    """
    Encodes text such that no added or special token of the tokenizer can come out of it.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Tokenizer of the model.
    """

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        self._control = {index: token.content for index, token in added.items() if token.special}
        self._control |= {index: token.content for index, token in added.items() if len(token.content) > 1}
        longest_first = sorted(filter(None, self._control.values()), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def __call__(self, text: str) -> list[int]:
        if not text:
            return []
        ids = self._encode(text)
        if self._is_clean(ids):
            return ids
        # `split_special_tokens` leaves added tokens whole that are not special ("<think>" in Qwen 3): cut each one
        # after its first character, and encode letter by letter what still comes out as a control token.
        pieces = [self._encode(piece) for piece in self._cut(text)]
        clean = [ids if self._is_clean(ids) else self._letters(ids) for ids in pieces]
        return [index for ids in clean for index in ids]

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]

    def _is_clean(self, ids: list[int]) -> bool:
        return self._control.keys().isdisjoint(ids)

    def _cut(self, text: str) -> list[str]:
        if self._pattern is None:
            return [text]
        cuts = [match.start() + 1 for match in _overlapping(self._pattern, text)]
        return [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True) if i < j]

    def _letters(self, ids: list[int]) -> list[int]:
        letters: list[int] = []
        for index in ids:
            if index in self._control:
                spelled = [self._encode(letter) for letter in self._control[index]]
                letters += [i for part in spelled for i in part if i not in self._control]
            else:
                letters.append(index)
        return letters


def _overlapping(pattern: re.Pattern, text: str):
    position = 0
    while (match := pattern.search(text, position)) is not None:
        yield match
        position = match.start() + 1


@dataclass(eq=False)
class Observation:
    """
    What an agent is shown before a turn.

    Args:
        content (`str` or `list[dict]`): as text or messages.
        ids (`list[int]`): in tokens.
        seen (`list[Turn]`): the turns and the feedback that are shown.
        dropped (`int`): how many of them were left out to fit the model's window.
        problem (`str`, *optional*): why it does not fit, where its episode is to end for that.
    """

    content: str | Messages
    ids: list[int]
    seen: list[Seen]
    dropped: int = 0
    problem: str | None = None


class PromptBuilder:
    """
    Turns what an agent is shown into token ids.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Tokenizer of the model.
        tokenize (`Callable`):
            TRL's own tokenization of prompts: `tokenize(prompts) -> list of ids`. Used where the default view shows
            no text of a model, so that a lone agent's prompts are `GRPOTrainer`'s.
        view (`Callable`, *optional*, defaults to [`team_view`]):
            `view(agent, prompt, seen)` returns the messages that the agent is shown. Whatever it returns is encoded
            without control tokens.
        chat_template_kwargs (`dict`, *optional*):
            Passed on to the chat template.
        plain (`bool`, *optional*, defaults to `False`):
            Whether text prompts stay text instead of becoming a user message: for a lone agent without a system
            prompt, as in `GRPOTrainer`, and for tokenizers without a chat template.
        window (`int`, *optional*):
            Tokens that the model can attend to; no limit unless given.
        reserved (`dict[str, int]`, *optional*):
            Tokens that each agent may still generate.
        overflow (`str`, *optional*, defaults to `"raise"`):
            What happens where an observation does not fit the window: `"raise"`, `"drop_oldest_turn"` (whole turns are
            left out, from the oldest on) or `"end_episode"` (the observation says so in `problem`).
    """

    def __init__(
        self,
        tokenizer,
        tokenize: Callable[[list], list[list[int]]],
        view: View = team_view,
        chat_template_kwargs: dict[str, Any] | None = None,
        plain: bool = False,
        window: int | None = None,
        reserved: dict[str, int] | None = None,
        overflow: str = "raise",
    ):
        self._tokenizer = tokenizer
        self._tokenize = tokenize
        self.view = view
        self._chat_template_kwargs = chat_template_kwargs or {}
        self._plain = plain or tokenizer.chat_template is None
        self._encode = PlainEncoder(tokenizer)
        self._template_ids: dict[str, list[int]] = {}
        self._window = window
        self._reserved = reserved or {}
        self._overflow = overflow
        self._folds_system = not self._plain and not self._renders_system()

    def build(self, requests: Sequence[tuple[AgentSpec, str | Messages, Sequence[Seen]]]) -> list[Observation]:
        """
        Args:
            requests (`Sequence`):
                `(agent, prompt, seen)` for each observation.

        Returns: the observations, in order.

        Raises:
            ValueError: the chat template cannot render the messages, or they do not fit the model's window.
        """
        contents = [self._observe(*request) for request in requests]
        ids: dict[int, list[int]] = {}
        for conversational in (True, False):
            fresh = [
                index
                for index, (agent, _, seen) in enumerate(requests)
                if not seen
                and self._view_of(agent) is team_view
                and isinstance(contents[index], list) == conversational
            ]
            if fresh:
                tokenized = self._tokenize([contents[index] for index in fresh])
                ids |= {index: list(one) for index, one in zip(fresh, tokenized, strict=True)}
        built = []
        for index, (agent, prompt, seen) in enumerate(requests):
            own = ids[index] if index in ids else self._join(contents[index])
            built.append(self._fit(agent, prompt, Observation(contents[index], own, list(seen))))
        return built

    def _fit(self, agent: AgentSpec, prompt: str | Messages, observation: Observation) -> Observation:
        reserved = self._reserved.get(agent.name, 0)
        if self._window is None or len(observation.ids) + reserved <= self._window:
            return observation
        if self._overflow != "drop_oldest_turn" or not observation.seen:
            problem = (
                f"What agent {agent.name!r} is shown has {len(observation.ids)} tokens and it may generate {reserved} "
                f"more, but the model's window is {self._window} tokens ({len(observation.seen)} turns shown). Lower "
                "`max_completion_length`, show fewer turns (`sees=`), set `context_overflow='drop_oldest_turn'` or "
                f"'end_episode', or shorten the prompt {str(prompt)[:80]!r}."
            )
            if self._overflow != "end_episode":
                raise ValueError(problem)
            observation.problem = problem
            return observation
        (shorter,) = self.build([(agent, prompt, observation.seen[1:])])
        shorter.dropped += 1
        return shorter

    def _view_of(self, agent: AgentSpec) -> View:
        return agent.view or self.view

    def _observe(self, agent: AgentSpec, prompt: str | Messages, seen: Sequence[Seen]) -> str | Messages:
        asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        messages = self._view_of(agent)(agent, asked, seen)
        if self._plain and isinstance(prompt, str):
            return _SEPARATOR.join(message["content"] for message in messages)
        return fold_system(messages) if self._folds_system else messages

    def _join(self, observation: str | Messages) -> list[int]:
        if isinstance(observation, str):
            head = self._tokenizer("")["input_ids"]  # the tokenizer's own opening token, if it has one
            return list(head) + self._encode(observation)
        ids: list[int] = []
        for position, piece in enumerate(self._render(observation)):
            if position % 2:
                ids += self._encode(observation[int(piece)]["content"])
            else:
                ids += self._encode_template(piece)
        return ids

    def _encode_template(self, piece: str) -> list[int]:
        if piece not in self._template_ids:  # a handful of pieces, in every observation
            ids = self._tokenizer(piece, add_special_tokens=False)["input_ids"] if piece else []
            self._template_ids[piece] = ids
        return self._template_ids[piece]

    def _render(self, messages: Messages) -> list[str]:
        """The rendered template cut at its contents: template text, message number, template text, ..."""
        # Drawn from the operating system, so that no text can guess it and the random states of training stay put.
        mark = f"@@{secrets.token_hex(8)}@@"
        hollow = [{**message, "content": f"{mark}{i}{mark}"} for i, message in enumerate(messages)]
        text = self._template(hollow)
        pieces = re.split(f"{mark}(\\d+){mark}", text)
        if sorted(pieces[1::2], key=int) != [str(i) for i in range(len(messages))] or any(
            mark in piece for piece in pieces[::2]
        ):
            raise ValueError(
                "The chat template of the tokenizer drops or rewrites messages, so the team's messages cannot be "
                f"shown to its agents. Roles shown: {[message['role'] for message in messages]}. Use a template that "
                "renders every message's content as it is, or pass `view=` to the trainer to show other messages."
            )
        return pieces

    def _template(self, messages: Messages) -> str:
        return self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **self._chat_template_kwargs
        )

    def _renders_system(self) -> bool:
        probe = secrets.token_hex(8)
        messages = [{"role": "system", "content": probe}, {"role": "user", "content": "x"}]
        try:
            return probe in self._template(messages)
        except Exception:
            return False
