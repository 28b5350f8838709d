# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""
Build observations: turns and feedback -> messages -> token ids. Model output cannot form control tokens or turns.

Text of teammates is never tokenized together with the chat template. The template is rendered with placeholders for
the contents. Its pieces are tokenized with control tokens, and the contents without them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from peft import PeftModel
from transformers import PreTrainedModel

from ..agents import AgentSpec
from ..config.team_setup import Sampling
from ..episodes.images import has_image, images_of, is_image, is_parts, text_of
from ..episodes.records import Feedback, Function, Messages, PromptError, Request, Seen, Turn
from ..episodes.tools import tool_name, unbound
from ..seams.libraries import get_logger
from ..workflows import Sequential, Workflow
from ..workflows.base import renamed
from .chat_template import ChatTemplate, EarlierReasoning, Part, Pieces, PlainEncoder, begins, naming_templates
from .views import (
    SEPARATOR,
    View,
    call_view,
    convert_tool_messages,
    fold_system_message,
    make_message_calls,
    merge_consecutive,
    quote_speaker_lines,
    result_message,
    speaker_line,
    team_view,
)


logger = get_logger(__name__)

_CHARACTERS_PER_TOKEN = 16  # of the window; of longer texts, only so many are tokenized at first
_MAX_CACHED_PROMPTS = 100_000  # whose tool schemas are kept


@dataclass(eq=False)
class Observation:
    """What an agent is shown, in tokens, and how a [`Generator`] samples the turn that follows."""

    content: str | Messages
    ids: list[int]
    seen: Sequence[Seen] = ()
    dropped: int = 0  # number of turns and feedback left out to fit the model's window
    problem: str | None = None  # why the observation is not valid, which ends the episode
    is_too_long: bool = False  # for the model's window
    images: Sequence[Any] = ()  # in the order of their places in `ids`
    is_truncated: bool = False  # whether `ids` has only the first tokens, because the observation is far too long
    # Set by the runner
    agent: str = ""
    key: tuple = ()  # place of the turn in the run, for any number of processes; seeds are made from it
    by_reference: bool = False  # sample from the agent's reference
    live: Any = None  # the `LiveTurn` that follows the turn; of the turns of a call, all are followed or none is

    @property
    def size(self) -> str:
        return f"{'more than ' if self.is_truncated else ''}{len(self.ids)} tokens"


@dataclass(frozen=True)
class Window:
    size: int | None = None  # number of tokens that the model can attend to; `None`: no limit
    reserved: Mapping[str, int] = field(default_factory=dict)  # tokens that each agent may generate afterwards
    # "raise", "drop_oldest_turn" (the oldest are left out) or "end_episode" (`problem` of the observation is set)
    overflow: str = "raise"
    without_model: frozenset[str] = frozenset()  # agents whose observations no model reads, which have no limit


def make_window(
    model: PreTrainedModel | PeftModel,
    samplings: Mapping[str, Sampling],
    overflow: str,
    without_model: Collection[str],  # agents whose observations no model reads
    max_model_len: int | None = None,  # of the servers that generate
) -> Window:
    """Make the context window of a model. It has no limit if the config of the model states none."""
    own = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    size = min((limit for limit in (own, max_model_len) if limit is not None), default=None)
    reserved = {name: sampling.max_completion_length for name, sampling in samplings.items()}
    return Window(size, reserved, overflow, frozenset(without_model))


class PromptBuilder:
    def __init__(
        self,
        template: ChatTemplate,
        # TRL's tokenization, `tokenize(prompts)` or `tokenize(prompts, functions)`, for observations of the default
        # view without turns or feedback, so that the prompts of a single agent equal those of `GRPOTrainer`
        tokenize: Callable[..., list[list[int]]],
        agents: Sequence[AgentSpec] = (),
        view: View = team_view,  # the contents of its messages are encoded without control tokens
        # Whether text prompts are not made a user message: for a single agent without a system prompt, as in
        # `GRPOTrainer`, and always for tokenizers without a chat template
        keeps_text_prompts: bool = False,
        window: Window | None = None,
        end_token_ids: Collection[int] = (),
        aliases: Mapping[str, str] | None = None,  # names under which agents see each other, by agent name
        # Whether an agent sees only the prompt, its own turns and the results of its calls, as in `GRPOTrainer`, with
        # nothing quoted. Otherwise no prompt has control tokens, and no prompt or result the line of a speaker
        is_single_agent: bool = False,
        show_reasoning: bool = False,  # whether earlier turns keep reasoning that the chat template removes
    ):
        tokenizer = template.tokenizer
        self.template, self.tokenizer, self._tokenize, self.view = template, tokenizer, tokenize, view
        self.agents = {agent.name: agent for agent in agents}
        self._keeps_text_prompts = keeps_text_prompts or tokenizer.chat_template is None
        self._encode = PlainEncoder(tokenizer, self.template.source)
        window = window or Window()
        self.window_size, self._reserved, self._overflow = window.size, window.reserved, window.overflow
        self._without_model, self._end_token_ids = window.without_model, frozenset(end_token_ids)
        self.aliases, self._is_single_agent, self.show_reasoning = aliases or {}, is_single_agent, show_reasoning
        self._folds_system = not self._keeps_text_prompts and not self.template.renders_system
        self._reasoning = None if self._keeps_text_prompts else EarlierReasoning(self.template)
        self._schemas: dict[int, str] = {}  # tool schemas of prompts, by the hash of the token ids

    def for_agent(self, agent: str) -> PromptBuilder:
        return self

    def _view(self, request: Request) -> View:
        return self.agents[request.agent].view or self.view

    def sees_images(self, agent: str) -> bool:
        return self.template.images is not None and self.agents[agent].sees_images

    def _with_seen_parts(self, message: dict[str, Any], agent: str) -> dict[str, Any]:
        """A message of the prompt, with a text as content unless it has images that the agent sees."""
        content = message.get("content")
        is_text = is_parts(content) and not (has_image(content) and self.sees_images(agent))
        return {**message, "content": text_of(content)} if is_text else message

    def _without_unseen_images(self, request: Request) -> Request:
        if not any(isinstance(item, Feedback) and item.images for item in request.seen):
            return request
        if self.sees_images(request.agent):
            return request
        seen = (
            replace(item, images=(), text=item.text or "(an image)")
            if isinstance(item, Feedback) and item.images
            else item
            for item in request.seen
        )
        return replace(request, seen=tuple(seen))

    def build(self, requests: Iterable[Request]) -> list[Observation]:
        """Build observations in order. Raise a `ValueError` if one cannot be rendered, or does not fit the window."""
        restricted = [self._without_unseen_images(_as_shown(request)) for request in requests]
        built: dict[int, Observation] = {}
        for index, request in enumerate(restricted):
            if request.requested_turn is not None:
                built[index] = self._build_from_messages(request)
            elif (self._view(request)) is team_view:  # it shows the whole prompt
                cut = self._first_tokens(request.agent, request.episode.prompt)
                if cut is not None:
                    built[index] = self._fit(replace(request, seen=()), cut)
        contents = {index: self._observe(request) for index, request in enumerate(restricted) if index not in built}
        ids: dict[int, list[int]] = {}
        alike: dict[tuple, list[int]] = {}
        for index in contents:
            request = restricted[index]
            view = self._view(request)
            if not request.seen and view is team_view and self._is_safe(contents[index]):
                kind = isinstance(contents[index], list), tuple(map(unbound, request.functions))  # type: ignore[arg-type]
                alike.setdefault(kind, []).append(index)
        for indices in alike.values():
            functions = restricted[indices[0]].functions
            batch = [contents[index] for index in indices]
            first = batch[0]
            with contextlib.nullcontext() if isinstance(first, str) else naming_templates(self.tokenizer, first):
                tokenized = self._tokenize(batch, *([functions] if functions else []))
            ids |= {index: list(token_ids) for index, token_ids in zip(indices, tokenized, strict=True)}
        for index, content in contents.items():
            request = restricted[index]
            if request.after is not None:
                own = self._continue_turn(request, request.after)
            else:
                own = ids[index] if index in ids else self._join(content, request.functions)
            images = self._images_of(content)
            built[index] = self._fit(request, Observation(content, own, list(request.seen), images=images))
        return [built[index] for index in range(len(restricted))]

    def _build_from_messages(self, request: Request) -> Observation:
        """Build the observation of messages from another program. If they are not valid, set its `problem`."""
        agent, messages = self.agents[request.agent], list(map(dict, request.requested_turn.messages))  # type: ignore[union-attr]
        if agent.system_prompt is not None and all(message["role"] != "system" for message in messages):
            messages.insert(0, {"role": "system", "content": agent.system_prompt})
        turns = [message["content"] if isinstance(message["content"], Turn) else None for message in messages]
        pairs = zip(messages, turns, strict=True)
        shown = [item if turn is None else self._as_turn(item, turn) for item, turn in pairs]
        observation = Observation(shown, [], list(request.seen))
        try:
            if (first := self._first_tokens(agent.name, shown)) is not None:
                return self._mark_too_long(agent.name, first)
            self._check(shown, agent.name)
            for schema in request.functions:
                if self._encode.contains_control_token(_strings(schema)):
                    raise PromptError(f"The schema of the tool {tool_name(schema)!r} contains a control token.")
            if not self.template.renders_results:
                shown = convert_tool_messages(shown, self.template.renders_called_results())
            if self._folds_system:
                folded = fold_system_message(shown)
                shown, turns = folded, turns[len(shown) - len(folded) :]
            observation.content, observation.images = shown, self._images_of(shown)
            observation.ids = self._encode_messages(shown, turns, request.functions)
            self._schemas = {} if len(self._schemas) >= _MAX_CACHED_PROMPTS else self._schemas
            self._schemas[hash(tuple(observation.ids))] = repr(list(request.functions))
        except (MemoryError, TimeoutError):
            raise
        except Exception as error:  # any error concerns only this request
            observation.problem = str(error) or type(error).__name__
            return observation
        return observation if self._fits(agent.name, observation.ids) else self._mark_too_long(agent.name, observation)

    def _mark_too_long(self, agent: str, observation: Observation) -> Observation:
        observation.is_too_long = True
        observation.problem = (
            f"The messages have {observation.size} and {agent!r} may generate "
            f"{self._reserved.get(agent, 0)} more, but the model's window is {self.window_size} tokens."
        )
        return observation

    def _first_tokens(self, agent: str, prompt: str | Messages) -> Observation | None:
        """Return the first tokens of a prompt that is longer than twice the window, otherwise `None`."""
        if self.window_size is None or agent in self._without_model:
            return None
        contents = [prompt] if isinstance(prompt, str) else [message.get("content") for message in prompt]
        text = "\n".join(content for content in contents if isinstance(content, str))
        most = _CHARACTERS_PER_TOKEN * self.window_size
        ids = self._encode(text[:most]) if len(text) > most else []
        return Observation(prompt, ids, [], is_truncated=True) if len(ids) > 2 * self.window_size else None

    def _encode_messages(
        self, messages: Messages, turns: Sequence[Turn | None], functions: Sequence[Function]
    ) -> list[int]:
        """
        Token ids of messages. Turns keep their sampled tokens, unless the template changes them. Up to the last turn,
        they are its prompt, if the same messages and tools were shown for it.
        """
        pieces, images = self._pieces(messages, functions), self._images_of(messages)
        found = {index: turn for index, turn in enumerate(turns) if turn is not None}
        after: list[list[int]] = []  # from the last turn back to the first: its tokens, and what follows it
        while True:
            last = max((index for index in found if index < len(messages)), default=0)
            if not 0 < last < len(messages) - (not after):
                break
            before = self._pieces(messages[:last], functions)
            turn = found[last]  # the conversation continues from it
            ids = self._with_end_token(turn) if messages[last].get("tool_calls") else turn.completion_ids
            tail = self._tail(ids, before, pieces, messages[: last + 1], functions)
            if not tail:
                break
            after.append([*ids, *self._encode_pieces(tail, found, images)])
            schemas = self._schemas.get(hash(tuple(turn.prompt_ids)))  # those of the latest turns are known
            if messages[:last] == turn.observation and schemas == repr(list(functions)):
                return [*turn.prompt_ids, *(token for ids in reversed(after) for token in ids)]
            messages, pieces = messages[:last], before
            found = {index: turn for index, turn in found.items() if index < last}
        first = self._opening(pieces) + self._encode_pieces(pieces, found, images)
        return [*first, *(token for ids in reversed(after) for token in ids)]

    def _tail(
        self, ids: Sequence[int], before: Pieces, pieces: Pieces, until: Messages, functions: Sequence[Function]
    ) -> Pieces | None:
        """
        The pieces after a turn: `ids` are its tokens, `until` ends with its message, `before` has what precedes it.
        `None` if the template shows only part of the turn, or other text before or after it.
        """
        text, ending = until[-1]["content"], self._ending(ids)
        own = [i for i, piece in enumerate(pieces) if isinstance(piece, Part) and piece.message == len(until) - 1]
        is_whole = not text or any(pieces[i].is_reasoning or pieces[i].text == text for i in own)
        if not is_whole or not begins(pieces, before):
            return None
        if not until[-1].get("tool_calls"):
            start, rest = own[-1] + 1, pieces[own[-1] + 1]
        else:
            opening = self._pieces(until, functions, add_generation_prompt=False)
            begin = len(before[-1]) if len(opening) == len(before) else 0
            place = opening[-1].rfind(ending, begin) if ending else -1
            if place >= 0:  # templates add a line break after the end token, which was not sampled
                opening[-1] = opening[-1][:place]
            if not begins(pieces, opening):
                return None
            start, rest = len(opening) - 1, pieces[len(opening) - 1].removeprefix(opening[-1])
        return [rest.removeprefix(ending), *pieces[start + 1 :]] if rest.startswith(ending) else None

    def _pieces(self, messages: Messages, functions: Sequence[Function], add_generation_prompt: bool = True) -> Pieces:
        last = max((index for index, message in enumerate(messages) if message["role"] == "user"), default=0)
        split = messages
        if self._reasoning is not None:
            split = [
                self._reasoning.as_fields(message, index < last) if message["role"] == "assistant" else message
                for index, message in enumerate(messages)
            ]
        pieces = self.template.pieces(split, functions, add_generation_prompt)
        if not self.show_reasoning:
            return pieces
        shown = {piece.message for piece in pieces[1::2] if piece.is_reasoning}  # other reasoning stays in the content
        split = [new if index in shown else old for index, (new, old) in enumerate(zip(split, messages, strict=True))]
        return self.template.pieces(split, functions, add_generation_prompt)

    def _as_turn(self, message: dict[str, Any], turn: Turn) -> dict[str, Any]:
        calls = message.get("tool_calls") or make_message_calls(turn)
        rest = {name: value for name, value in message.items() if name != "tool_calls"}
        if not self._shows(calls):
            return rest | {"content": turn.raw_text}
        return rest | {"content": turn.without_calls or "", "tool_calls": calls}

    def _shows(self, calls: Sequence[dict[str, Any]]) -> bool:
        """Return `True` if the template can render tool calls, and these contain no control tokens."""
        return (
            bool(calls)
            and self.template.renders_called_results(len(calls))
            and not self._encode.contains_control_token(_strings(calls))
        )

    def _ending(self, ids: Sequence[int]) -> str:
        """Return the text of the token that ended a turn, or an empty string."""
        return self.tokenizer.decode(ids[-1:]) if ids and ids[-1] in self._end_token_ids else ""

    def _with_end_token(self, turn: Turn) -> list[int]:
        """Return the tokens of a turn, with an EOS token added if the turn has no end token (after a stop string)."""
        closed = bool(turn.completion_ids) and turn.completion_ids[-1] in self._end_token_ids
        ending = self.tokenizer.eos_token_id
        return [*turn.completion_ids, *([] if closed or ending is None else [ending])]

    def _fits(self, agent: str, ids: Sequence[int]) -> bool:
        if self.window_size is None or agent in self._without_model:
            return True
        return len(ids) + self._reserved.get(agent, 0) <= self.window_size

    def tokenize_reply(self, agent: str, text: str) -> tuple[list[int], bool]:
        """Tokenize a turn that a function wrote, without control tokens. Also return whether it was truncated."""
        ids, most = self._encode(text), self._reserved.get(agent)
        return ids[:most], most is not None and len(ids) > most

    def find_protection_gap(self, uses_tools: bool) -> str | None:
        """Return why text can look like other messages to the model although lines are quoted, or `None`."""
        if self._is_single_agent:
            return None
        if "\n" not in self.tokenizer.decode(self._encode("x\nx")):
            return "the tokenizer reads line breaks as spaces, so the names of speakers are not on separate lines"
        if self.tokenizer.chat_template is None:
            return "the tokenizer has no chat template, so only lines with speaker names separate messages"
        if self._keeps_text_prompts:
            return "text prompts are shown without the chat template, unlike prompts of messages"
        if marks := ", ".join(map(repr, self.template.plain_marks(uses_tools))):
            return f"the chat template marks messages with plain text ({marks}), not with control tokens"
        return None

    def _fit(self, request: Request, observation: Observation) -> Observation:
        agent, prompt = request.agent, request.episode.prompt
        if not observation.ids:
            raise ValueError(
                f"The observation of agent {agent!r} has no tokens: the chat template of the tokenizer "
                f"{self.tokenizer.name_or_path!r} renders nothing. Set another `tokenizer.chat_template`."
            )
        reserved = self._reserved.get(agent, 0)
        if self._fits(agent, observation.ids):
            return observation
        if self._overflow != "drop_oldest_turn" or not observation.seen:
            modes = ["drop_oldest_turn", "end_episode"] if observation.seen else ["end_episode"]
            modes = [mode for mode in modes if mode != self._overflow]
            problem = (
                f"The observation of agent {agent!r} has {observation.size} and its turn up to {reserved}, "
                f"but the model's window is {self.window_size} tokens ({len(observation.seen)} turns shown). Lower "
                "`max_completion_length`, "
                + ("show fewer turns (`sees=`), " if observation.seen else "")
                + "".join(f"set `context_overflow={mode!r}`, " for mode in modes)
                + f"or shorten the prompt {str(prompt)[:80]!r}."
            )
            if self._overflow != "end_episode":
                raise PromptError(problem, is_too_long=True)
            observation.problem, observation.is_too_long = problem, True
            return observation
        return self._shorter(request, observation)

    def _shorter(self, request: Request, observation: Observation) -> Observation:
        """Drop as few of the oldest turns as necessary. A binary search finds the number."""

        def without(count: int) -> Observation:
            seen = list(observation.seen[count:])
            while seen and isinstance(seen[0], Feedback) and seen[0].tool is not None:  # its call was dropped
                seen.pop(0)
            rest = replace(request, seen=tuple(seen), after=None)
            content = self._observe(rest)
            ids, images = self._join(content, request.functions), self._images_of(content)
            shown = Observation(content, ids, list(rest.seen), images=images)
            shown.dropped = observation.dropped + len(observation.seen) - len(rest.seen)
            return shown

        too_few, enough = 0, len(observation.seen)
        while enough - too_few > 1:
            middle = (too_few + enough) // 2
            fits = self._fits(request.agent, without(middle).ids)
            too_few, enough = (too_few, middle) if fits else (middle, enough)
        shortest = without(enough)
        return self._fit(replace(request, seen=tuple(shortest.seen), after=None), shortest)

    def _observe(self, request: Request) -> str | Messages:
        prompt = request.episode.prompt
        if request.after is not None and not isinstance(request.after.observation, str):
            return [*request.after.observation, *self._own_messages(request, request.after)]
        prompt_messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if any(isinstance(message.get("content"), list) for message in prompt_messages):
            prompt_messages = [self._with_seen_parts(message, request.agent) for message in prompt_messages]
        if not self._is_single_agent:  # otherwise, messages stay as in `GRPOTrainer`
            prompt_messages = [  # without the empty fields that `datasets` adds
                {name: value for name, value in message.items() if value is not None or name in ("role", "content")}
                for message in prompt_messages
            ]
        if not self._is_single_agent or request.seen:
            self._check(prompt_messages, request.agent)
        shown: Sequence[Seen] = request.seen
        if self._reasoning is not None and not self.show_reasoning:
            shown = self._reasoning.shown(request.seen, request.after)
        if (view := self._view(request)) is team_view:
            shown = [
                replace(item, tool_calls=())
                if isinstance(item, Turn) and item.tool_calls and not self._shows(make_message_calls(item))
                else self._with_plain_keys(item)
                for item in shown
            ]
        else:  # other views read texts
            shown = list(map(_without_elements, shown))
        agent, seen = self.agents[request.agent], shown
        if self.aliases:
            agent, seen = renamed(agent, seen, self.aliases)
        messages = call_view(view, agent, self._quoted(prompt_messages), seen)
        for number, message in enumerate(messages if view is not team_view else ()):
            if isinstance(message.get("content"), list):
                self._check_parts(number, message["content"], request.agent, "the view's messages")
        if not self.template.renders_results:
            messages = merge_consecutive(convert_tool_messages(messages, self.template.renders_called_results()))
        has_images = any(isinstance(message.get("content"), list) for message in messages)
        if self._keeps_text_prompts and isinstance(prompt, str) and not request.functions and not has_images:
            return SEPARATOR.join(_as_text(message, agent.name) for message in messages)
        return fold_system_message(messages) if self._folds_system else messages

    def _quoted(self, messages: Messages) -> Messages:
        if self._is_single_agent:
            return messages
        return [message | {"content": _quote_content(message.get("content") or "")} for message in messages]

    def _check_parts(self, number: int, content: Any, agent: str, where: str = "a prompt") -> None:
        """Raise a `PromptError` unless a content has images and texts, and the agent sees images."""
        if not has_image(content):
            raise PromptError(
                f"Message {number} of {where} has the content {str(content)[:80]!r}, which is not a string. Join the "
                "parts of the content into a single string."
            )
        if not self.sees_images(agent):
            why = "`sees_images=False`" if self.template.images is not None else "a model that takes text alone"
            raise PromptError(f"Message {number} of {where} has an image, but agent {agent!r} has {why}.")
        if any(part["type"] == "image" and not is_image(part.get("image")) for part in content):
            raise PromptError(f"Message {number} of {where} has the place of an image without a `PIL.Image.Image`.")

    def _check(self, prompt: Messages, agent: str) -> None:
        for number, message in enumerate(prompt):
            if not message.get("content") and message.get("tool_calls") and not self.template.renders_calls:
                raise PromptError(
                    f"Message {number} of a prompt contains only tool calls, which the chat template of the tokenizer "
                    f"{self.tokenizer.name_or_path!r} does not render. Remove it, or move the calls to `content`."
                )
            if not isinstance(message.get("content"), str | None):
                self._check_parts(number, message["content"], agent)
            fields = {} if self._is_single_agent else {name: message[name] for name in message if name != "content"}
            name = next((name for name in fields if self._encode.contains_control_token(_strings(fields[name]))), None)
            if name is not None:
                raise PromptError(
                    f"Message {number} of a prompt has the field {name!r} with {str(message[name])[:80]!r}, which "
                    "contains a control token of the tokenizer. Only `content` may contain it: change the field."
                )

    def _is_safe(self, content: str | Messages) -> bool:
        if self._is_single_agent:
            return True
        texts = [content] if isinstance(content, str) else [message.get("content") or "" for message in content]
        texts = [text_of(text) if isinstance(text, list) else text for text in texts]
        return all(map(self._encode.is_plain, texts))

    def _own_messages(self, request: Request, turn: Turn) -> Messages:
        results = [item for item in request.seen[request.seen.index(turn) + 1 :] if isinstance(item, Feedback)]
        quote = str if self._is_single_agent else quote_speaker_lines
        messages = [result_message(result, quote) for result in map(self._with_plain_keys, results)]
        return [{"role": "assistant", "content": turn.raw_text}, *messages]

    def _with_plain_keys(self, item: Seen) -> Any:
        """A result without its list if a key in it spells a control token: keys are text of the template."""
        if not isinstance(item, Feedback) or item.elements is None:
            return item
        is_plain = not self._encode.contains_control_token(" ".join(_keys(item.elements)))
        return item if is_plain else _without_elements(item)

    def _join(self, observation: str | Messages, functions: Sequence[Function] = ()) -> list[int]:
        if isinstance(observation, str):
            head = self.tokenizer("")["input_ids"]  # the BOS token, if the tokenizer adds it
            return list(head) + self._encode(observation)
        pieces = self._pieces(observation, functions)
        return self._opening(pieces) + self._encode_pieces(pieces, images=self._images_of(observation))

    def _opening(self, pieces: Pieces) -> list[int]:
        """Tokens before the first piece: processors, unlike tokenizers, add a BOS that the template does not write."""
        bos = self.tokenizer.bos_token
        adds = self.template.images is not None and not (bos and pieces[0].startswith(bos))
        return list(self.tokenizer("")["input_ids"]) if adds else []

    def _images_of(self, messages: str | Messages) -> list[Any]:
        return list(images_of(messages)) if self.template.images is not None else []

    def _encode_pieces(
        self, pieces: Pieces, turns: Mapping[int, Turn] | None = None, images: list[Any] | None = None
    ) -> list[int]:
        """
        Return the token ids of `pieces`. Texts of `turns`, by message index, keep the sampled tokens. The last of the
        `images` are in the pieces, and are removed from the list.
        """
        ids: list[int] = []
        counts: dict[int, int] = {}
        if images and self.template.images is not None:
            counts = {place: self.template.images.count(piece) for place, piece in enumerate(pieces[::2])}
        own = images[len(images) - sum(counts.values()) :] if images else []
        if images:
            del images[len(images) - len(own) :]
        for place, piece in enumerate(pieces):
            turn = (turns or {}).get(piece.message) if isinstance(piece, Part) else None
            if isinstance(piece, str):
                count = counts.get(place // 2, 0)
                ids += self.template.encode(piece, own[:count]) if count else self.template.encode(piece)
                own = own[count:]
            elif turn is not None and piece.text == turn.raw_text:
                ids += turn.completion_ids[:-1] if self._ending(turn.completion_ids) else turn.completion_ids
            else:
                ids += self._encode(piece.text)
        return ids

    def _continue_turn(self, request: Request, turn: Turn) -> list[int]:
        """Return the unchanged tokens of a turn and its prompt, followed by the results of its calls, as TRL does."""
        _, *results = self._own_messages(request, turn)
        ids = self._with_end_token(turn)
        following = self.template.pieces_after(results, request.functions, self._ending(ids))
        return [*turn.prompt_ids, *ids, *self._encode_pieces(following, images=self._images_of(results))]


def is_plain(agents: Sequence[AgentSpec], uses_tools: bool) -> bool:
    """Return `True` if text prompts stay text, as in `GRPOTrainer`: one agent without system prompt and tools."""
    return len(agents) == 1 and agents[0].system_prompt is None and not uses_tools


def is_single_agent(agents: Sequence[AgentSpec], workflow: Workflow) -> bool:
    """`True` for a single agent that is shown the prompt, its own turns and the results of its calls, as in TRL."""
    return len(agents) == 1 and type(workflow) is Sequential


def warn_of_unprotected(prompts: PromptBuilder, uses_tools: bool) -> None:
    reason = prompts.find_protection_gap(uses_tools)
    if reason is None:
        return
    if prompts.tokenizer.chat_template is None:
        logger.warning(
            "The tokenizer has no chat template, so the model is probably a base model, which has not learned to "
            "follow system prompts or to end its turns. Use the instruction-tuned model of the family (`-Instruct`, "
            "`-it`, `-Chat`), or set `processing_class.chat_template` to the template that the model was tuned with."
        )
    logger.warning(
        f"An agent can write text that its teammates may mistake for a message from another speaker, because "
        f"{reason}. The text still contains no control tokens."
    )


def _as_shown(request: Request) -> Request:
    """Restrict a request after tool calls to the items that the calling turn saw, so that its prompt is unchanged."""
    after = request.after
    if after is None:
        return request
    start = request.seen.index(after)
    before, rest = request.seen[:start], request.seen[start:]
    kept = [item for item in before if item.index in (after.sees if isinstance(item, Turn) else after.hears)]
    return replace(request, seen=(*kept, *rest))


def _quote_content(content: Any) -> Any:
    if isinstance(content, str):
        return quote_speaker_lines(content)
    return [
        {**part, "text": quote_speaker_lines(part["text"])} if part["type"] == "text" else part for part in content
    ]


def _strings(value: Any) -> str:
    """Return all strings within a field of a message, joined. Other values are skipped."""
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    return value if isinstance(value, str) else " ".join(map(_strings, value)) if isinstance(value, Sequence) else ""


def _without_elements(item: Seen) -> Any:
    return replace(item, elements=None) if isinstance(item, Feedback) and item.elements is not None else item


def _keys(value: Any) -> list[str]:
    """All keys within JSON data."""
    if isinstance(value, Mapping):
        return [*map(str, value), *(key for entry in value.values() for key in _keys(entry))]
    return [key for entry in value for key in _keys(entry)] if isinstance(value, list) else []


def _as_text(message: dict[str, Any], name: str) -> str:
    """Format a message without a chat template. A speaker line marks the agent's own turns."""
    content = message["content"]
    return f"{speaker_line(name)}\n{quote_speaker_lines(content)}" if message["role"] == "assistant" else content
