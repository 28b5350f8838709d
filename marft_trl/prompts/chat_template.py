# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Text as token ids: chat templates without the contents of messages, reasoning, and text without control tokens."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase
from transformers.utils import get_json_schema

from ..config.dataset_checks import has_other_content
from ..episodes.images import as_parts, has_image, images_of
from ..episodes.records import Function, Messages, PromptError, Seen, Turn
from ..episodes.tools import as_plain, unbound
from ..seams.vision import ImageProcessor


# HTML tags that Gemma has as added tokens
_HTML = re.compile("</?(table|caption|thead|tbody|tfoot|tr|t[hd]|h[1-6]|blockquote|strong|em|b|i|u|s|su[bp]|code)>")
_MOST_PIECES = 10_000  # of templates, whose tokens are kept
_TAG = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")
_REASONS, _ANSWER = "REASONS", "ANSWER"
_USER: dict[str, Any] = {"role": "user", "content": "x"}
_RESULT: dict[str, Any] = {"role": "tool", "name": "x", "content": "x"}
# Fields in which templates take the reasoning of a message
REASONING = ("reasoning_content", "reasoning", "thinking")


class Part(NamedTuple):
    """A text within a rendered conversation: the number of its message, and whether it is the message's reasoning."""

    message: int
    text: str
    is_reasoning: bool = False


# Template text, a part, template text, ...
Pieces = list[Any]


def begins(pieces: Pieces, beginning: Pieces) -> bool:
    count = len(beginning) - 1
    is_same = len(pieces) > count and pieces[:count] == beginning[:count]
    return is_same and pieces[count].startswith(beginning[count])


class ChatTemplate:
    """A chat template, rendered with marks around contents. With `images`, their places are text of the template."""

    def __init__(
        self,
        tokenizer,
        source: str | None = None,
        options: dict[str, Any] | None = None,
        images: ImageProcessor | None = None,
    ):
        self.tokenizer, self.images = tokenizer, images
        self.source = source  # instead of the tokenizer's own
        self.options = dict(options or {})  # keyword arguments of the template
        self._ids: dict[str, list[int]] = {}
        self._schemas: dict[Callable, dict[str, Any]] = {}
        self._renders_results: dict[int, bool] = {}

    @property
    def text(self) -> str:
        return self.source or str(self.tokenizer.chat_template)

    def encode(self, piece: str, images: Sequence[Any] = ()) -> list[int]:
        """Token ids of template text, with these images in their places."""
        if images and self.images is not None:
            return self.images.encode(piece, images)
        if piece not in self._ids:  # cached, since all observations consist of the same few pieces
            if len(self._ids) >= _MOST_PIECES:  # but for what other programs send
                self._ids.clear()
            self._ids[piece] = self.tokenizer(piece, add_special_tokens=False)["input_ids"] if piece else []
        return self._ids[piece]

    def pieces(
        self, messages: Messages, functions: Sequence[Function] = (), add_generation_prompt: bool = True
    ) -> Pieces:
        """
        Render, and split at contents and reasoning. The joined pieces are what the template makes of the messages: it
        may trim or quote a content, or look for a flag in it.

        Raises:
            ValueError: a content is not rendered exactly once.
        """
        images = images_of(messages) if self.images is not None else ()
        if images:
            messages = list(map(_without_pixels, messages))
        pieces = _find_pieces(messages, lambda shown: self.render(shown, functions, add_generation_prompt))
        if pieces is not None and images:
            self.check_places(pieces, len(images), messages)
        if pieces is None:
            raise ValueError(
                "The chat template of the tokenizer drops or changes messages with the roles "
                f"{[message['role'] for message in messages]}, so agents cannot see the team's messages. Use a "
                "template that renders the content of every message unchanged, or pass `view=` to the trainer to show "
                "other messages."
            )
        return pieces

    def check_places(self, pieces: Pieces, count: int, messages: Messages) -> None:
        places = 0 if self.images is None else sum(map(self.images.count, pieces[::2]))
        if places != count:
            raise PromptError(
                f"The chat template of {self.tokenizer.name_or_path!r} has places for {places} of the {count} images "
                f"in messages with the roles {[message['role'] for message in messages]}. Show images in messages of "
                "users, or set another template."
            )

    def pieces_after(self, messages: Messages, functions: Sequence[Function], ending: str = "") -> Pieces:
        """As `pieces`, for results of tools, from behind the token that `ending` spells at the end of the call."""
        name = messages[0]["name"]
        turn = _calling(name)
        before = self.render(turn, functions, add_generation_prompt=False)
        end = self.tokenizer.eos_token or ""
        if end and end in before[max(before.rfind(name), 0) :]:  # a line break after it was not sampled
            before = before[: before.rindex(end) + len(end)]
        are_kept = True

        def render_results(shown: Messages) -> str:
            nonlocal are_kept
            whole = self.render([*turn, *shown], functions)
            are_kept &= whole.startswith(before)
            # GLM writes the same token at the end of a call and before a result
            return whole[len(before) :].removeprefix(ending)

        images = images_of(messages) if self.images is not None else ()
        if images:
            messages = list(map(_without_pixels, messages))
        pieces = _find_pieces(messages, render_results)
        if pieces is not None and images:
            self.check_places(pieces, len(images), messages)
        if not are_kept or pieces is None:
            raise ValueError(
                "The chat template of the tokenizer changes earlier messages when later messages follow, so an agent "
                f"cannot continue after its call of {name!r}. Use a template that keeps earlier messages unchanged "
                "(see `trl.chat_template_utils.get_training_chat_template`)."
            )
        return pieces

    def render(
        self, messages: Messages, functions: Sequence[Function] = (), add_generation_prompt: bool = True
    ) -> str:
        schemas = self.schemas(functions) or None
        if self.images is not None:  # many templates of vision-language models take nothing but parts
            messages = [_with_parts(message) for message in messages]
        with naming_templates(self.tokenizer, messages):
            return self.tokenizer.apply_chat_template(
                messages,
                tools=schemas,
                chat_template=self.source,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self.options,
            )

    def schemas(self, functions: Sequence[Function]) -> list[dict[str, Any]]:
        return [function if isinstance(function, dict) else self._schema(function) for function in functions]

    def _schema(self, function: Callable) -> dict[str, Any]:
        key = unbound(function)
        if key not in self._schemas:
            self._schemas[key] = get_json_schema(function)
        return self._schemas[key]

    @functools.cached_property
    def renders_results(self) -> bool:
        """`True` if the template renders tool results after a turn whose tool call is only part of its text."""
        return self._render_pieces("user", "assistant", "tool", "assistant", "user") is not None

    def renders_called_results(self, count: int = 1) -> bool:
        """`True` if the template renders the results of tools after a message with `count` calls."""
        if count not in self._renders_results:
            messages = [*_calling(count=count), *[_RESULT] * count, {"role": "assistant", "content": "x"}, _USER]
            self._renders_results[count] = False
            with contextlib.suppress(ValueError):
                self._renders_results[count] = bool(self.pieces(messages))
        return self._renders_results[count]

    @functools.cached_property
    def renders_calls(self) -> bool:
        with contextlib.suppress(ValueError):
            without = self.render([_USER, {"role": "assistant", "content": ""}, _USER])
            return self.render([*_calling(), _USER]) != without
        return False

    @functools.cached_property
    def renders_system(self) -> bool:
        return self._render_pieces("system", "user") is not None

    def plain_marks(self, results: bool = False) -> list[str]:
        """Template texts before messages, and `results`, that are marked by plain text alone, e.g. `"USER: "`."""
        roles = ("user", "assistant", "user")
        shown = next(filter(None, (self._render_pieces(*roles[:count]) for count in (3, 2, 1))), [""])
        openings = shown[::2] if shown[-1] else shown[:-1:2]  # no mark follows the last message in some templates
        if results:
            with contextlib.suppress(Exception):  # templates can raise any error
                openings += self.pieces_after([_RESULT] * 2, [])[:-1:2]
        return [piece for piece in dict.fromkeys(openings) if self._is_plain(piece)]

    def _is_plain(self, piece: str) -> bool:
        tokenizer = self.tokenizer
        common = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
        control, ids = tokenizer.added_tokens_decoder.keys(), self.encode(piece)
        if control.isdisjoint(ids):
            return True
        # Within a piece they do mark a message: `<|im_start|>` begins every text of SmolLM2, and every message
        inner = [place for place, index in enumerate(ids) if index not in common]
        rest = ids[inner[0] : inner[-1] + 1] if inner else []
        return bool(tokenizer.decode(rest).strip()) and control.isdisjoint(rest)

    def _render_pieces(self, *roles: str) -> list[str] | None:
        messages = [{"role": role, "content": "x"} | ({"name": "x"} if role == "tool" else {}) for role in roles]
        try:
            return self.pieces(messages)
        except Exception:  # templates can raise any error
            return None


@contextlib.contextmanager
def naming_templates(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> Iterator[None]:
    """Name the tokenizer and the roles of the messages in errors that a chat template raises within the context."""
    try:
        yield
    except (TimeoutError, MemoryError):  # limits of time, and of the machine
        raise
    except Exception as error:
        roles = [message.get("role") for message in messages]
        raise PromptError(
            f"The chat template of the tokenizer {tokenizer.name_or_path!r} cannot render messages with the roles "
            f"{roles}: {type(error).__name__}: {error}. Set another template (`processing_class.chat_template = ...`)."
        ) from error


def _without_pixels(message: dict[str, Any]) -> dict[str, Any]:
    if not has_image(message.get("content")):
        return message
    return {
        **message,
        "content": [part if part["type"] == "text" else {"type": "image"} for part in message["content"]],
    }


def _with_parts(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "content": as_parts(message["content"])} if isinstance(message.get("content"), str) else message


def _calling(name: str = "x", count: int = 1) -> Messages:
    return [_USER, {"role": "assistant", "content": "", "tool_calls": [make_call(name)] * count}]


def make_call(name: str, arguments: Any = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments or {}}}


def _find_pieces(messages: Messages, render: Callable[[Messages], str]) -> Pieces | None:
    """
    Split the text of messages at their contents and reasoning; `None` unless each content occurs once, and each
    reasoning at most once. Marks around the contents tell where they are, so that no text of a content can pass for
    text of the template. A template that takes a content apart, or refuses it, is rendered with marks alone.
    """
    whole: str | None = None
    as_texts = [
        {**message, "content": str(message["content"])}
        if isinstance(message.get("content"), list) and not has_image(message["content"])
        else message
        for message in messages
    ]
    for shown in [messages] if as_texts == messages else [messages, as_texts]:
        with contextlib.suppress(PromptError):
            pieces = _find_marked(shown, render, fills=True)
            whole = render(shown)
            aligned = None if pieces is None or not _shows_lists(shown, render) else _align(pieces, whole)
            if aligned is not None and not _moves_texts(aligned, shown, render):
                return aligned
    pieces = _find_marked(as_texts, render, fills=False)
    return pieces if pieces is None or whole is None else _align(pieces, whole) or pieces


def _moves_texts(pieces: Pieces, messages: Messages, render: Callable[[Messages], str]) -> bool:
    """Whether a control token of a content is in the text between contents, where a template can move it."""
    texts = json.dumps([message.get("content") for message in messages], ensure_ascii=False)
    tags = set(_TAG.findall(texts))
    if not tags:
        return False
    hollow = _find_marked(messages, render, fills=False)
    between, known = "\n".join(pieces[::2]), "\n".join([] if hollow is None else hollow[::2])
    return any(between.count(tag) > known.count(tag) for tag in tags)


def _shows_lists(messages: Messages, render: Callable[[Messages], str]) -> bool:
    """Whether all numbers of lists, which nothing can mark, are in the text of messages. Some templates drop them."""
    number, count = secrets.randbelow(10**12) + 10**12, 0

    def replace_number(leaf: Any) -> Any:
        nonlocal count
        count += not isinstance(leaf, str)
        return leaf if isinstance(leaf, str) else number

    shown = [
        {**message, "content": map_leaves(replace_number, message["content"])}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]
    return not count or render(shown).count(str(number)) == count


def _find_marked(messages: Messages, render: Callable[[Messages], str], fills: bool) -> Pieces | None:
    """Split the rendered messages at their texts, by two random marks around each of them or instead of them."""
    # From the operating system: no text can guess the mark, and the random states of training do not change.
    mark = f"@@{secrets.token_hex(8)}@@"
    parts: list[Part] = []

    def put(part: Part) -> str:
        parts.append(part)
        shown = part.text if fills and not part.is_reasoning else ""  # templates may drop reasoning
        return f"{mark}{len(parts) - 1}({shown}{mark})"

    def put_string(number: int, leaf: Any) -> Any:
        return put(Part(number, leaf)) if isinstance(leaf, str) else leaf

    marked = []
    for number, message in enumerate(messages):
        fields = {name: message[name] for name in REASONING if isinstance(message.get(name), str) and message[name]}
        if fields:
            reasoning = put(Part(number, next(iter(fields.values())), is_reasoning=True))
            fields = dict.fromkeys(fields, reasoning)
        content = message.get("content")
        if isinstance(content, list) and has_image(content):
            fields["content"] = [
                {**part, "text": put(Part(number, part["text"]))} if part["type"] == "text" else part
                for part in content
            ]
        elif isinstance(content, list):  # the result of a tool
            fields["content"] = map_leaves(functools.partial(put_string, number), content)
        elif content or not has_other_content(message):  # many have a line break before a content
            fields["content"] = put(Part(number, content or ""))
        marked.append({**message, **fields})
    return _split(render(marked), mark, parts)


def map_leaves(change: Callable[[Any], Any], value: Any) -> Any:
    """Change the strings, numbers and empty lists and objects in JSON data, but not its keys."""
    if isinstance(value, list) and value:
        return [map_leaves(change, element) for element in value]
    if isinstance(value, dict) and value:
        return {key: map_leaves(change, element) for key, element in value.items()}
    return change(value)


def _split(text: str, mark: str, parts: Sequence[Part]) -> Pieces | None:
    """A marked text split at the parts; `None` unless each content occurs once, and each reasoning at most once."""
    found: Pieces = re.split(rf"{mark}(\d+)\((.*?){mark}\)", text, flags=re.DOTALL)
    shown = [int(number) for number in found[1::3]]
    missing = [part for number, part in enumerate(parts) if number not in shown and not part.is_reasoning]
    if missing or len(set(shown)) < len(shown) or any(mark in piece for piece in (*found[::3], *found[2::3])):
        return None
    pieces = found[:1]
    for number, content, following in zip(shown, found[2::3], found[3::3], strict=True):
        part = parts[number]
        pieces += [part._replace(text=content) if content else part, following]
    return pieces


def _align(pieces: Pieces, text: str) -> Pieces | None:
    """The pieces as they are in the text of the messages without marks, whose contents may be trimmed."""
    if not text.startswith(pieces[0]):
        return None
    place, aligned = len(pieces[0]), pieces[:1]
    for part, following in zip(pieces[1::2], pieces[2::2], strict=True):
        for content in (part.text, part.text.rstrip(), part.text.lstrip(), part.text.strip()):
            if text.startswith(content + following, place):
                break
        else:
            return None
        place += len(content) + len(following)
        aligned += [part._replace(text=content), following]
    return aligned if place == len(text) else None


class EarlierReasoning:
    """
    Tells the reasoning of a turn from its answer, as the chat template writes both, which it is tried on. The template
    then gets them apart, and never the texts themselves, so that they cannot become control tokens.
    """

    def __init__(self, template: ChatTemplate):
        self._template = template
        self._opening, self._closing, self._header = self._read_fields()
        self._has_field = bool(self._closing)
        if not self._has_field:
            self._opening, self._closing = self._read_contents()
        content = f"{self._opening}{_REASONS}{self._closing}{_ANSWER}"
        turn = {"content": _ANSWER, **dict.fromkeys(REASONING, _REASONS)} if self._has_field else {"content": content}
        earlier = self._render(turn, _USER)
        self.removes_reasoning = bool(self._closing) and _ANSWER in earlier and _REASONS not in earlier
        self._removes_at_once = not self._has_field and self.removes_reasoning and _REASONS not in self._render(turn)
        unclosed = self._render({"content": f"{self._opening}{_REASONS}"}, _USER)
        self._removes_unclosed = bool(self._opening) and _REASONS not in unclosed

    def _read_fields(self) -> tuple[str, str, str]:
        """The template's texts before reasoning, after it, and before an answer; empty if it has no reasoning."""
        for turn in ({"content": _ANSWER}, {"content": "", "tool_calls": [make_call("x")]}):
            head, reasons, tail = self._render({**turn, **dict.fromkeys(REASONING, _REASONS)}).partition(_REASONS)
            closing = _TAG.search(tail.partition(_ANSWER)[0]) if reasons else None
            if closing is None:
                continue
            plain, answered, _ = self._render(turn).partition(_ANSWER)
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
                return next((tag for tag in ("", *tags) if self._cuts(tag, closing)), ""), closing
        return "", ""

    def _cuts(self, opening: str, closing: str) -> bool:
        shown = self._render({"content": f"{opening}{_REASONS}{closing}{_ANSWER}"}, _USER)
        return _ANSWER in shown and _REASONS not in shown

    def _render(self, turn: dict[str, Any], *later: dict[str, Any]) -> str:
        """A conversation with a turn; empty where the template cannot render it."""
        try:
            return self._template.render([_USER, {"role": "assistant", **turn}, *later], add_generation_prompt=False)
        except Exception:  # templates can raise any error
            return ""

    def shown(self, seen: Sequence[Seen], whole: Turn | None = None) -> list[Seen]:
        """Turns and feedback as the template would show them. The turn `whole` is going on, so its reasoning stays."""
        if not self.removes_reasoning:
            return list(seen)
        return [self._answered(item) if isinstance(item, Turn) and item is not whole else item for item in seen]

    def _answered(self, turn: Turn) -> Turn:
        before = turn.without_calls
        return replace(
            turn, raw_text=self.answer(turn.raw_text), without_calls=None if before is None else self.answer(before)
        )

    def answer(self, text: str) -> str:
        return self._parted(text)[1] if self.removes_reasoning else text

    def is_in(self, text: str) -> bool:
        return any(tag and tag in text for tag in (self._opening, self._closing, self._header))

    def as_fields(self, message: dict[str, Any], is_earlier: bool) -> dict[str, Any]:
        """A message with its reasoning in fields of its own. `is_earlier` means that a user's message follows it."""
        text = message.get("content") or ""
        if not (self._has_field or self._removes_at_once or (is_earlier and self.removes_reasoning)):
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
            return "", "" if self._header or self._removes_unclosed else text
        return reasoning.rpartition(self._opening)[2].strip() if self._opening else reasoning, answer.lstrip("\n")


class PlainEncoder:
    """
    Encodes text such that the result contains no control token of the tokenizer: no special token, and no other added
    one, such as `<think>` in a chat template. White space and the HTML tags of Gemma, which are ordinary text, stay.
    """

    def __init__(self, tokenizer, chat_template: str | None = None):
        self.tokenizer = tokenizer
        template = chat_template or str(tokenizer.chat_template)
        self._control = {
            index: token.content
            for index, token in tokenizer.added_tokens_decoder.items()
            if token.special or (len(token.content) > 1 and not _is_text(token.content, template))
        }
        unknown = getattr(getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None), "unk_token", None)
        self._unknown = {tokenizer.unk_token_id, tokenizer.convert_tokens_to_ids(unknown) if unknown else None}
        longest_first = sorted(filter(None, self._control.values()), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def __call__(self, text: str) -> list[int]:
        if not text:
            return []
        text = as_plain(text)
        ids = self._encode(text)
        if self._is_clean(ids):
            return ids
        # `split_special_tokens` does not split added tokens that are not special, e.g. "<think>" in Qwen 3. Therefore,
        # split each of them after its first character. Pieces that still yield a control token are spelled by letter.
        pieces = [self._encode(piece) for piece in self._cut(text)]
        return [letter for ids in pieces for index in ids for letter in self._letters(index)]

    def is_plain(self, text: str) -> bool:
        """`True` if a text yields no control token, also when it is tokenized as a template is."""
        return self._is_clean(self.tokenizer(as_plain(text), add_special_tokens=False)["input_ids"])

    def contains_control_token(self, text: str) -> bool:
        """As not `is_plain`, but an unknown character may become a token that is also a control token, as in GPT-2."""
        ids = self._control.keys() & self.tokenizer(as_plain(text), add_special_tokens=False)["input_ids"]
        return any(index not in self._unknown or self._control[index] in text for index in ids)

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]

    def _is_clean(self, ids: list[int]) -> bool:
        return self._control.keys().isdisjoint(ids)

    def _cut(self, text: str) -> list[str]:
        if self._pattern is None:
            return [text]
        cuts = [0]
        while (match := self._pattern.search(text, cuts[-1])) is not None:  # matches may overlap
            cuts.append(match.start() + 1)
        return [text[i:j] for i, j in itertools.pairwise([*cuts, len(text)]) if i < j]

    def _letters(self, index: int) -> list[int]:
        if index not in self._control:
            return [index]
        spelled = [self._encode(letter) for letter in self._control[index]]
        return [i for ids in spelled for i in ids if i not in self._control]


def _is_text(token: str, template: str) -> bool:
    return not token.strip() or (_HTML.fullmatch(token) is not None and token not in template)
