# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""
Speaker lines: a line such as `[solver]` begins the text of a speaker. Such lines in the texts themselves are quoted.

Tokenizers read different texts alike: they normalize compatibility characters, remove accents, control characters and
invisible ones, or map words for bytes to the bytes. A line is quoted if any of them could read it as a speaker line.
"""

from __future__ import annotations

import codecs
import functools
import re
import unicodedata

from ..episodes.tools import as_plain


# A name in brackets between line breaks. Characters that only some tokenizers read as line breaks, and that others
# remove, are U+0085 here. No part can match the beginning of the next one, so matching takes linear time.
_NAME = re.compile(r"(?:\A|(?<=[\n\x85]))\[\x85?[A-Za-z](?:\x85?[A-Za-z0-9_-]){0,47}\x85?\](?=[\n\x85]|\Z)")
_SOFT_BREAKS = "\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
# Characters that are read as the first one of a speaker line, or of a word for its bytes.
_OPENING = re.compile("[\\[<\u226e\ufe47\ufe64\uff1c\uff3b]")
# Some tokenizers read these words as bytes.
_BYTE = re.compile("<0x([0-9a-f]{2})>")
# Control characters, invisible and unassigned ones, accents, other marks and spaces
_REMOVED = {"Cc", "Cf", "Cn", "Co", "Mc", "Me", "Mn", "Zs"}


def speaker_line(name: str) -> str:
    """The line before a speaker's text."""
    return f"[{name}]"


@functools.lru_cache(maxsize=1024)  # a turn is shown to many agents
def quoted(text: str) -> str:
    """Return a text with `> ` before each line that a model could read as a speaker line."""
    text = as_plain(text)
    starts = []
    begin = 0
    for line in text.split("\n"):
        starts += [begin + start for start in _names_in(line)]
        begin += len(line) + 1
    return "> ".join(text[begin:end] for begin, end in zip([0, *starts], [*starts, len(text)], strict=True))


def _names_in(line: str) -> list[int]:
    """Positions in a line at which a model could read a speaker line."""
    if _OPENING.search(line) is None:
        return []
    if line.isascii() and line.rstrip("\r").isprintable() and "<0x" not in line.lower():  # most lines
        return [0] if _NAME.fullmatch("".join(line.split())) else []
    read, positions = _with_bytes(*_read(line))
    return [positions[match.start()] for match in _NAME.finditer(read)]


def _read(line: str) -> tuple[str, list[int]]:
    """
    Return what tokenizers can read a line as: without what tells compatibility characters and cases apart, and without
    characters that are removed. Also for each of its characters the position in the line; what is removed before a
    character belongs to it.
    """
    read: list[str] = []
    positions: list[int] = []
    begin = 0
    for position, character in enumerate(line):
        for one in _folded(character):
            if one in _SOFT_BREAKS:
                if read[-1:] != ["\x85"]:
                    read.append("\x85")
                    positions.append(begin)
                begin = position + 1
            else:
                read.append(one)
                positions.append(begin)
                begin = position + 1
    return "".join(read), positions


def _folded(character: str) -> str:
    for change in (str, str.casefold):
        kept = (one for one in unicodedata.normalize("NFKD", change(character)) if not _is_removed(one))
        character = "".join(kept)
    return character


def _is_removed(one: str) -> bool:
    # U+2581 is a space of SentencePiece, and what the last two are depends on the version of Unicode
    return one not in _SOFT_BREAKS and (one in "\u2581\ufffd\u1cf2\u1cf3" or unicodedata.category(one) in _REMOVED)


def _with_bytes(read: str, positions: list[int]) -> tuple[str, list[int]]:
    """Put characters in place of the words for their bytes."""
    texts: list[str] = []
    places: list[int] = []
    last, begin = 0, None
    decoder = codecs.getincrementaldecoder("utf-8")("ignore")
    for match in _BYTE.finditer(read):
        if match.start() != last:
            decoder.reset()
            begin = None
        begin = positions[match.start()] if begin is None else begin
        character = decoder.decode(bytes.fromhex(match[1]))
        folded = character if character == "\n" else _read(character)[0]
        texts += [read[last : match.start()], folded]
        places += [*positions[last : match.start()], *[begin] * len(folded)]
        last, begin = match.end(), None if character else begin
    return "".join([*texts, read[last:]]), [*places, *positions[last:]]
