# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""
Speaker lines: a line such as `[solver]` begins the text of a speaker. Such lines in the texts themselves are quoted.

Tokenizers read different texts alike: they normalize compatibility characters, remove accents, control characters and
invisible ones, or map words for bytes to the bytes. A line is quoted if any of them could read it as a speaker line.
"""

from __future__ import annotations

import functools
import re
import unicodedata

from ..tools import as_plain


# Characters, and words for bytes, that some tokenizer reads as the first bracket of a speaker line.
_OPENING = re.compile(r"[\[\uff3b\ufe47]|<0x")
_LINE_BREAK = re.compile("\n|<0x0[Aa]>")
# A name in brackets between line breaks. Characters that only some tokenizers read as line breaks, and that others
# remove, are "\n" here. No part can match the beginning of the next one, so matching takes linear time.
_NAME = re.compile(r"(?:\A|(?<=\n))\[\n?[A-Za-z](?:\n?[A-Za-z0-9_-]){0,47}\n?\](?=\n|\Z)")
_SOFT_BREAKS = "\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
# A character, or a word for each of its bytes.
_CHARACTER = re.compile("<0x[C-Fc-f].>(?:<0x[89ABab].>)*|<0x[0-7][0-9A-Fa-f]>|.", re.DOTALL)
# Control characters, invisible ones, unassigned ones, accents and spaces.
_REMOVED = {"Cc", "Cf", "Cn", "Co", "Me", "Mn", "Zs"}


def speaker_line(name: str) -> str:
    """The line before a speaker's text."""
    return f"[{name}]"


@functools.lru_cache(maxsize=1024)  # a turn is shown to many agents
def quoted(text: str) -> str:
    """Return a text with `> ` before each line that a model could read as a speaker line."""
    text = as_plain(text)
    if _OPENING.search(text) is None:
        return text
    lines = _split(text)
    return "".join(_quoted_line(line) if _OPENING.search(line) else line for line in lines)


def _split(text: str) -> list[str]:
    """Split a text after its line breaks."""
    ends = [match.end() for match in _LINE_BREAK.finditer(text)]
    return [text[begin:end] for begin, end in zip([0, *ends], [*ends, len(text)], strict=True)]


def _quoted_line(line: str) -> str:
    if line.isascii() and line.rstrip("\r\n").isprintable() and "<0x" not in line:  # the most, and the fastest
        return f"> {line}" if _NAME.fullmatch("".join(line.split())) else line
    end = _LINE_BREAK.search(line)
    read, positions = _read(line[: end.start()] if end is not None else line)
    starts = [positions[match.start()] for match in _NAME.finditer(read)]
    return "> ".join(line[begin:end] for begin, end in zip([0, *starts], [*starts, len(line)], strict=True))


def _read(line: str) -> tuple[str, list[int]]:
    """
    Return what tokenizers can read a line as, and for each of its characters the position in the line. A character
    that begins a part of the line has the position of this beginning, before the characters that were removed.
    """
    read: list[str] = []
    positions: list[int] = []
    begin = 0
    for match in _CHARACTER.finditer(line):
        for one in _folded(match[0]):
            if one in _SOFT_BREAKS:
                if not read or read[-1] != "\n":
                    read.append("\n")
                    positions.append(match.start())
                begin = match.end()
            elif one not in "\u2581\ufffd" and unicodedata.category(one) not in _REMOVED:
                positions.append(begin if not read or read[-1] == "\n" else match.start())
                read.append(one)
    return "".join(read), positions


def _folded(character: str) -> str:
    """Decode words for bytes, and remove what tells compatibility characters and cases apart."""
    if character.startswith("<0x"):
        character = bytes.fromhex(character[3:-1].replace("><0x", "")).decode("utf-8", "ignore")
    return unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", character).casefold())
