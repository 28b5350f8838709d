# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""
An observation -> messages -> token ids, such that nothing a model wrote can become a control token or a turn.

Text of teammates never passes through the tokenizer together with the chat template. The template is rendered with
placeholders where the contents go; its pieces are tokenized with control tokens on, the contents with control tokens
off, and the ids are joined.
"""

from __future__ import annotations

import functools
import re
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from transformers.utils import get_json_schema

from ..agents import AgentSpec
from ..anonymity import renamed
from ..episodes.records import TOOL, Feedback, Messages, Seen, Turn
from .encoding import PlainEncoder
from .views import SEPARATOR, View, fold_system, merge_neighbours, team_view


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


class Query(NamedTuple):
    """
    What an observation is made from.

    Args:
        agent ([`AgentSpec`]): who is about to speak.
        prompt (`str` or `list[dict]`): the prompt of the dataset row.
        seen (`Sequence[Turn]`): turns and feedback it is to see.
        functions (`tuple[Callable, ...]`): that it may call.
        after ([`Turn`], *optional*): its own turn that called functions; the results are the end of `seen`.
    """

    agent: AgentSpec
    prompt: str | Messages
    seen: Sequence[Seen] = ()
    functions: tuple[Callable, ...] = ()
    after: Turn | None = None


class PromptBuilder:
    """
    Turns what an agent is shown into token ids.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Tokenizer of the model.
        tokenize (`Callable`):
            TRL's own tokenization of prompts: `tokenize(prompts) -> list of ids`, or `tokenize(prompts, functions)`
            where an agent may call functions. Used where the default
            view shows no text of a model, so that a lone agent's prompts are `GRPOTrainer`'s.
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
        chat_template (`str`, *optional*):
            Chat template in place of the tokenizer's own.
        ends (`Collection[int]`, *optional*):
            Tokens that end a turn.
        aliases (`Mapping[str, str]`, *optional*):
            The names under which agents are shown to one another, where they are not their own.
    """

    def __init__(
        self,
        tokenizer,
        tokenize: Callable[..., list[list[int]]],
        view: View = team_view,
        chat_template_kwargs: dict[str, Any] | None = None,
        plain: bool = False,
        window: int | None = None,
        reserved: dict[str, int] | None = None,
        overflow: str = "raise",
        chat_template: str | None = None,
        ends: Collection[int] = (),
        aliases: Mapping[str, str] | None = None,
    ):
        self._tokenizer = tokenizer
        self._tokenize = tokenize
        self.view = view
        self._chat_template_kwargs = chat_template_kwargs or {}
        self._plain = plain or tokenizer.chat_template is None
        self._encode = PlainEncoder(tokenizer)
        self._template_ids: dict[str, list[int]] = {}
        self.window = window
        self._reserved = reserved or {}
        self._overflow = overflow
        self.chat_template = chat_template
        self._ends = frozenset(ends)
        self._aliases = aliases or {}
        self._schemas: dict[Callable, dict[str, Any]] = {}
        self._folds_system = not self._plain and not self._renders_system()

    def build(self, queries: Iterable[Query | tuple]) -> list[Observation]:
        """
        Args:
            queries (`Iterable[Query]`):
                What each observation is made from; a tuple `(agent, prompt, seen)` will do.

        Returns: the observations, in order.

        Raises:
            ValueError: the chat template cannot render the messages, or they do not fit the model's window.
        """
        asked: list[Query] = [_as_shown(Query(*query)) for query in queries]
        contents = [self._observe(query) for query in asked]
        ids: dict[int, list[int]] = {}
        alike: dict[tuple, list[int]] = {}
        for index, query in enumerate(asked):
            if not query.seen and self._view_of(query.agent) is team_view:
                kind = isinstance(contents[index], list), tuple(map(_unbound, query.functions))
                alike.setdefault(kind, []).append(index)
        for indices in alike.values():
            functions = asked[indices[0]].functions
            tokenized = self._tokenize([contents[index] for index in indices], *([functions] if functions else []))
            ids |= {index: list(one) for index, one in zip(indices, tokenized, strict=True)}
        built = []
        for index, query in enumerate(asked):
            if query.after is not None:
                own = self._go_on(query, query.after)
            else:
                own = ids[index] if index in ids else self._join(contents[index], query.functions)
            built.append(self._fit(query, Observation(contents[index], own, list(query.seen))))
        return built

    def _fit(self, query: Query, observation: Observation) -> Observation:
        agent, prompt = query.agent, query.prompt
        reserved = self._reserved.get(agent.name, 0)
        if self.window is None or len(observation.ids) + reserved <= self.window:
            return observation
        if self._overflow != "drop_oldest_turn" or not observation.seen:
            problem = (
                f"What agent {agent.name!r} is shown has {len(observation.ids)} tokens and it may generate {reserved} "
                f"more, but the model's window is {self.window} tokens ({len(observation.seen)} turns shown). Lower "
                "`max_completion_length`, show fewer turns (`sees=`), set "
                + ("" if self._overflow == "drop_oldest_turn" else "`context_overflow='drop_oldest_turn'` or ")
                + f"`context_overflow='end_episode'`, or shorten the prompt {str(prompt)[:80]!r}."
            )
            if self._overflow != "end_episode":
                raise ValueError(problem)
            observation.problem = problem
            return observation
        return self._shorter(query, observation, reserved)

    def _shorter(self, query: Query, observation: Observation, reserved: int) -> Observation:
        """What still fits, without the oldest turns: as few of them as have to go, found by halving."""

        def without(count: int) -> Observation:
            rest = query._replace(seen=_from(observation.seen, count), after=None)
            content = self._observe(rest)
            shown = Observation(content, self._join(content, query.functions), list(rest.seen))
            shown.dropped = observation.dropped + len(observation.seen) - len(rest.seen)
            return shown

        too_few, enough = 0, len(observation.seen)
        while enough - too_few > 1:
            middle = (too_few + enough) // 2
            fits = len(without(middle).ids) + reserved <= (self.window or 0)
            too_few, enough = (too_few, middle) if fits else (middle, enough)
        shortest = without(enough)
        return self._fit(query._replace(seen=shortest.seen, after=None), shortest)

    def _view_of(self, agent: AgentSpec) -> View:
        return agent.view or self.view

    def _observe(self, query: Query) -> str | Messages:
        prompt = query.prompt
        if query.after is not None and not isinstance(query.after.observation, str):
            return [*query.after.observation, *self._own_messages(query, query.after)]
        asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        agent, seen = renamed(query.agent, query.seen, self._aliases)
        messages = self._view_of(query.agent)(agent, asked, seen)
        if not self._renders_results:
            messages = merge_neighbours([_without_role(message) for message in messages])
        if self._plain and isinstance(prompt, str) and not query.functions:
            return SEPARATOR.join(message["content"] for message in messages)
        return fold_system(messages) if self._folds_system else messages

    @staticmethod
    def _own_messages(query: Query, turn: Turn) -> Messages:
        """A turn that called functions, and the results, as messages."""
        results = [item for item in query.seen[query.seen.index(turn) + 1 :] if isinstance(item, Feedback)]
        said = [{"role": "tool", "name": one.tool, "content": one.text} for one in results]
        return [{"role": "assistant", "content": turn.raw_text}, *said]

    def _join(self, observation: str | Messages, functions: Sequence[Callable] = ()) -> list[int]:
        if isinstance(observation, str):
            head = self._tokenizer("")["input_ids"]  # the tokenizer's own opening token, if it has one
            return list(head) + self._encode(observation)
        return self._spell(self._render(observation, functions), observation)

    def _spell(self, pieces: Sequence[str], messages: Messages) -> list[int]:
        """Tokens of template text and, in every second place, of the message with that number."""
        ids: list[int] = []
        for position, piece in enumerate(pieces):
            ids += self._encode(messages[int(piece)]["content"]) if position % 2 else self._encode_template(piece)
        return ids

    def _go_on(self, query: Query, turn: Turn) -> list[int]:
        """The turn's own prompt and tokens as they were, then the results of its calls, as TRL puts them together."""
        _, *said = self._own_messages(query, turn)
        call = {"type": "function", "function": {"name": said[0]["name"], "arguments": {}}}
        calling: Messages = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        mark, hollow = _hollow(said)
        before = self._template(calling, query.functions, add_generation_prompt=False)
        whole = self._template([*calling, *hollow], query.functions)
        end = self._tokenizer.eos_token or ""
        if end and end in before:  # templates go on with a line break behind it, which was not sampled
            before = before[: before.rindex(end) + len(end)]
        pieces = re.split(f"{mark}(\\d+){mark}", whole[len(before) :])
        if not whole.startswith(before) or not _are_whole(pieces, len(said), mark):
            raise ValueError(
                "The chat template of the tokenizer rewrites what stands before the results of tools, so an agent "
                f"cannot go on from its call of {said[0]['name']!r}. Use a template that keeps earlier messages as "
                "they are (see `trl.chat_template_utils.get_training_chat_template`)."
            )
        # A turn that ended at a stop text has no end-of-turn token
        closed = bool(turn.completion_ids) and turn.completion_ids[-1] in self._ends
        ending = self._tokenizer.eos_token_id
        closing = [] if closed or ending is None else [ending]
        return [*turn.prompt_ids, *turn.completion_ids, *closing, *self._spell(pieces, said)]

    def _encode_template(self, piece: str) -> list[int]:
        if piece not in self._template_ids:  # a handful of pieces, in every observation
            ids = self._tokenizer(piece, add_special_tokens=False)["input_ids"] if piece else []
            self._template_ids[piece] = ids
        return self._template_ids[piece]

    def _render(self, messages: Messages, functions: Sequence[Callable] = ()) -> list[str]:
        """The rendered template cut at its contents: template text, message number, template text, ..."""
        mark, hollow = _hollow(messages)
        pieces = re.split(f"{mark}(\\d+){mark}", self._template(hollow, functions))
        if not _are_whole(pieces, len(messages), mark):
            raise ValueError(
                "The chat template of the tokenizer drops or rewrites messages, so the team's messages cannot be "
                f"shown to its agents. Roles shown: {[message['role'] for message in messages]}. Use a template that "
                "renders every message's content as it is, or pass `view=` to the trainer to show other messages."
            )
        return pieces

    def _template(
        self, messages: Messages, functions: Sequence[Callable] = (), add_generation_prompt: bool = True
    ) -> str:
        return self._tokenizer.apply_chat_template(
            messages,
            tools=self.schemas(functions) or None,
            chat_template=self.chat_template,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **self._chat_template_kwargs,
        )

    def schemas(self, functions: Sequence[Callable]) -> list[dict[str, Any]]:
        """What the model is told of functions."""
        return [self._schema(function) for function in functions]

    def _schema(self, function: Callable) -> dict[str, Any]:
        key = _unbound(function)
        if key not in self._schemas:
            self._schemas[key] = get_json_schema(function)
        return self._schemas[key]

    @functools.cached_property
    def _renders_results(self) -> bool:
        """Whether the template shows results of an earlier turn, whose call it knows as text alone."""
        earlier = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "x"},
            {"role": "tool", "name": "x", "content": "x"},
            {"role": "assistant", "content": "x"},
            {"role": "user", "content": "x"},
        ]
        try:
            return bool(self._render(earlier))
        except Exception:
            return False

    def _renders_system(self) -> bool:
        probe = secrets.token_hex(8)
        messages = [{"role": "system", "content": probe}, {"role": "user", "content": "x"}]
        try:
            return probe in self._template(messages)
        except Exception:
            return False


def is_plain(agents: Sequence[AgentSpec], uses_tools: bool) -> bool:
    """Whether text prompts stay text instead of becoming a user message, as in `GRPOTrainer`: for a lone agent."""
    return len(agents) == 1 and agents[0].system_prompt is None and not uses_tools


def _as_shown(query: Query) -> Query:
    """A query that goes on after calls, with what the calling turn was shown: its prompt stays as it was."""
    after = query.after
    if after is None:
        return query
    start = query.seen.index(after)
    before = [
        item
        for item in query.seen[:start]
        if (item.index in after.sees if isinstance(item, Turn) else item.index in after.hears)
    ]
    return query._replace(seen=[*before, *query.seen[start:]])


def _from(seen: Sequence[Seen], count: int) -> list[Seen]:
    """Without the oldest; results of a call that goes do not stay behind."""
    rest = list(seen[count:])
    while rest and isinstance(rest[0], Feedback) and rest[0].tool is not None:
        rest.pop(0)
    return rest


def _without_role(message: dict[str, Any]) -> dict[str, Any]:
    """The result of a tool as a user's message, for templates that know it next to its call alone."""
    if message["role"] != "tool":
        return message
    return {"role": "user", "content": f"[{TOOL}]\n{message['content']}"}


def _unbound(function: Callable) -> Callable:
    """A method without its object: each episode has an environment of its own, all of them the same tools."""
    return getattr(function, "__func__", function)


def _hollow(messages: Messages) -> tuple[str, Messages]:
    """A mark, and the messages with their numbers between such marks in the place of their contents."""
    # Drawn from the operating system, so that no text can guess it and the random states of training stay put.
    mark = f"@@{secrets.token_hex(8)}@@"
    return mark, [{**message, "content": f"{mark}{i}{mark}"} for i, message in enumerate(messages)]


def _are_whole(pieces: Sequence[str], count: int, mark: str) -> bool:
    """Whether each message occurs once and no mark was cut."""
    return sorted(pieces[1::2], key=int) == [str(i) for i in range(count)] and not any(mark in p for p in pieces[::2])
