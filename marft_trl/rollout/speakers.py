# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""
Speaker lines: a line such as `[solver]` begins the text of a speaker. Such lines in the texts themselves are quoted.

Tokenizers read different texts alike: they normalize compatibility characters, remove accents, control characters and
invisible ones, or map words for bytes to the bytes. A line is quoted if any of them could read it as a speaker line.
"""

from __future__ import annotations

import itertools
import re
import unicodedata

from ..tools import as_plain


# Allowed names, as of agents and of the sources of feedback.
_LONGEST = 50  # with both brackets
_NAME = re.compile(r"\[[A-Za-z][A-Za-z0-9_-]{0,47}\]")
# Characters, and words for bytes, that some tokenizer reads as the first bracket of a speaker line.
_OPENING = re.compile(r"[\[\uff3b\ufe47]|<0x")
_BYTES = re.compile(r"(?:<0x[0-9A-Fa-f]{2}>)+")
# A model may read all of these as line breaks. Some tokenizers remove those that are not in `_HARD_BREAKS`.
_BREAKS = re.compile("[\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029]|<0x(?:0[A-Da-d]|1[C-Ec-e])>")
_HARD_BREAKS = re.compile("[\n\r]|<0x0[AaDd]>")
_REMOVED = {"Cc", "Cf", "Cn", "Co", "Me", "Mn", "Zl", "Zp", "Zs"}


def speaker_line(name: str) -> str:
    """The line before a speaker's text."""
    return f"[{name}]"


def quoted(text: str) -> str:
    """Return a text with `> ` before each line that a model could read as a speaker line."""
    if _OPENING.search(text) is None:
        return text
    text = as_plain(text)
    starts = {start for breaks in (_BREAKS, _HARD_BREAKS) for start in _lines_with_names(text, breaks)}
    pieces, last = [], 0
    for start in sorted(starts):
        pieces.append(text[last:start])
        last = start
    return "> ".join([*pieces, text[last:]])


def _lines_with_names(text: str, breaks: re.Pattern) -> list[int]:
    """Positions of the lines that consist of a name in brackets."""
    ends = [(match.start(), match.end()) for match in breaks.finditer(text)]
    begins, stops = [0, *(after for _, after in ends)], [*(before for before, _ in ends), len(text)]
    return [begin for begin, stop in zip(begins, stops, strict=True) if _is_name(text[begin:stop])]


def _is_name(line: str) -> bool:
    if _OPENING.search(line) is None:
        return False
    line = _BYTES.sub(lambda match: bytes.fromhex(match[0][3:-1].replace("><0x", "")).decode("utf-8", "ignore"), line)
    line = unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", line).casefold())
    kept = (one for one in line if one not in "\u2581\ufffd" and unicodedata.category(one) not in _REMOVED)
    return _NAME.fullmatch("".join(itertools.islice(kept, _LONGEST + 1))) is not None
