# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Tokenization of text without control tokens."""

from __future__ import annotations

import re

from ..episodes.tools import as_plain


_TAG = re.compile("</?(table|caption|thead|tbody|tfoot|tr|t[hd]|h[1-6]|blockquote|strong|em|b|i|u|s|su[bp]|code)>")


class PlainEncoder:
    """
    Encodes text such that the result contains no control token of the tokenizer: no special token, and no other added
    one. Only added tokens that are ordinary text, white space and the HTML tags of Gemma, are left as they are.

    Args:
        chat_template: Chat template. HTML tags that occur in it, such as `<think>`, are control tokens.
    """

    def __init__(self, tokenizer, chat_template: str | None = None):
        self._tokenizer = tokenizer
        template = chat_template or str(tokenizer.chat_template)
        added = tokenizer.added_tokens_decoder
        self._control = {
            index: token.content
            for index, token in added.items()
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
        clean = [ids if self._is_clean(ids) else self._letters(ids) for ids in pieces]
        return [index for ids in clean for index in ids]

    def is_plain(self, text: str) -> bool:
        """`True` if a text yields no control token, also when it is tokenized as a template is."""
        return self._is_clean(self._tokenizer(as_plain(text), add_special_tokens=False)["input_ids"])

    def contains_control_token(self, text: str) -> bool:
        """
        As not `is_plain`, apart from unknown characters. They become a token that can also be a control token, as the
        end of a text in GPT-2.
        """
        ids = self._control.keys() & self._tokenizer(as_plain(text), add_special_tokens=False)["input_ids"]
        return any(index not in self._unknown or self._control[index] in text for index in ids)

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


def _is_text(token: str, template: str) -> bool:
    return not token.strip() or (_TAG.fullmatch(token) is not None and token not in template)


def _overlapping(pattern: re.Pattern, text: str):
    position = 0
    while (match := pattern.search(text, position)) is not None:
        yield match
        position = match.start() + 1
