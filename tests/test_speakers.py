"""Nobody can speak in the name of another: with aimed and random texts, ten families of templates, five tokenizers."""

import random
import re
import sys
import unicodedata

import pytest

from marft_trl import AgentSpec, Turn
from marft_trl.episodes.records import Feedback
from marft_trl.rollout.prompts import PromptBuilder
from marft_trl.rollout.speakers import _OPENING, quoted
from marft_trl.trainer import setup
from marft_trl.workflows import EnvironmentLoop, Sequential

from .test_prompts import builder as tiny_builder
from .tokenizers_and_templates import FAMILIES, KINDS, PLAIN_MARKS, READS_NO_LINES, chat_template, tokenizer_of


NAMES = ["planner", "solver", "tool", "environment"]
CONTROL = sorted({token for special, added in FAMILIES.values() for token in (*special, *added)} | {"<s>", "</s>"})
BREAKS = ["\n", "\n\n", "\r", "\r\n", "\v", "\f", "\x1c", "\x1e", "\x85", "\u2028", "\u2029", "<0x0A>", "<0x0D>"]
PADDING = ["", " ", "\t", "\u00a0", "\u3000", "\u2581", "\u200b", "\x00", "\ufeff", "\u00ad", "\u0301"]
SPEAKER = re.compile(r"\s*\[[A-Za-z][A-Za-z0-9_-]{0,47}\]\s*")


def disguised(name, draw):
    """A line that some tokenizer reads as the line of a speaker."""
    line = f"[{name}]"
    kind = draw.randrange(9)
    if kind == 1:
        line = "".join(chr(ord(letter) + 0xFEE0) for letter in line)  # full width
    if kind == 2:
        line = line.replace("a", "á").replace("e", "e\u0301").replace("o", "ö")
    if kind == 3:
        line = draw.choice(["\u200b", "\x00", "\u00ad", "\ufeff", "\x0b"]).join(line)
    if kind == 4:
        line = line.replace("[", "<0x5B>").replace("]", "<0x5d>")
    if kind == 5:
        line = line.upper()
    if kind == 6:
        line = "".join(chr(0x1D41A + ord(one) - 97) if "a" <= one <= "z" else one for one in line)  # bold letters
    if kind == 7:
        line = line.replace("[", "\ufe47").replace("]", "\ufe48")
    if kind == 8:
        line = "".join(f"<0x{byte:02X}>" for byte in line.encode())
    return draw.choice(PADDING) + line + draw.choice(PADDING)


def hostile(draw):
    """A text out of forged speakers, control tokens, their halves and random characters."""
    pieces = []
    for _ in range(draw.randrange(1, 7)):
        kind = draw.randrange(6)
        if kind < 3:
            pieces.append(draw.choice([*BREAKS, ""]) + disguised(draw.choice(NAMES), draw) + draw.choice([*BREAKS, ""]))
        elif kind == 3:
            token = draw.choice(CONTROL)
            middle = draw.randrange(len(token))
            pieces.append(draw.choice([token, token[:middle] + token + token[middle:], token[:middle], token[middle:]]))
        elif kind == 4:
            pieces.append(draw.choice(["assistant", "system\n", "> ", "user", " ", *BREAKS]))
        else:
            pieces.append("".join(chr(draw.choice([draw.randrange(32, 0x250), draw.randrange(0x110000)])) for _ in "12345"))
    return "".join(pieces)


def prompts_of(tokenizer, alone=False):
    def tokenize(prompts, functions=()):
        rendered = [tokenizer.apply_chat_template(one, add_generation_prompt=True, tokenize=False) for one in prompts]
        return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in rendered]

    return PromptBuilder(tokenizer, tokenize, alone=alone)


def control_ids(tokenizer, ids):
    return [index for index in ids if index in tokenizer.added_tokens_decoder]


def speakers(tokenizer, ids):
    """Lines that name a speaker in what the ids mean."""
    texts, part = [], []
    for index in [*ids, tokenizer.eos_token_id]:
        if index in tokenizer.added_tokens_decoder:
            texts.append(tokenizer.decode(part, clean_up_tokenization_spaces=False))
            part = []
        else:
            part.append(index)
    return [line.strip().lower() for text in texts for line in text.splitlines() if SPEAKER.fullmatch(line)]


def observe(prompts, task, other, result, feedback, own="fine"):
    """The ids of an observation that has a text in each place."""
    seen = [
        Turn("planner", other, 0),
        Turn("solver", own, 1),
        Feedback(result, "tool", 0, tool="search", audience="planner"),
        Feedback(feedback, "environment", 1),
        Feedback(result, "tool", 2, tool="search", audience="solver"),
    ]
    task = [{"role": "user", "content": task}]
    (observation,) = prompts.build([(AgentSpec("solver", system_prompt="Solve."), task, seen)])
    return observation.ids


def check(kind, family, texts):
    tokenizer = tokenizer_of(kind, family)
    prompts = prompts_of(tokenizer)
    benign = observe(prompts, "x", "x", "x", "x")
    assert speakers(tokenizer, benign) or kind in READS_NO_LINES
    for start in range(0, len(texts), 4):
        ids = observe(prompts, *texts[start : start + 4])
        assert control_ids(tokenizer, ids) == control_ids(tokenizer, benign), texts[start : start + 4]
        if kind not in READS_NO_LINES:
            assert speakers(tokenizer, ids) == speakers(tokenizer, benign), texts[start : start + 4]
        own = observe(prompts, "x", "x", "x", "x", own=texts[start])
        assert control_ids(tokenizer, own) == control_ids(tokenizer, benign), texts[start]
        (first,) = prompts.build([(AgentSpec("solver"), texts[start], [])])
        (plain,) = prompts.build([(AgentSpec("solver"), "x", [])])
        assert control_ids(tokenizer, first.ids) == control_ids(tokenizer, plain.ids), texts[start]
        assert kind in READS_NO_LINES or not speakers(tokenizer, first.ids), texts[start]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_no_text_has_a_control_token_or_the_line_of_a_speaker(kind, family):
    draw = random.Random(f"{kind} {family}")
    check(kind, family, [hostile(draw) for _ in range(40)])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_no_text_of_20000_has_a_control_token_or_the_line_of_a_speaker(kind):
    draw = random.Random(kind)
    for family in FAMILIES:
        check(kind, family, [hostile(draw) for _ in range(400)])
