"""A prompt is the conversation as the chat template renders it, for all templates that TRL ships."""

import json
import os
import re
from importlib.resources import files
from types import SimpleNamespace

from marft_trl import AgentSpec, Turn
from marft_trl.episodes.records import TOOL, Feedback
from marft_trl.episodes.tools import ToolCall
from marft_trl.extras.apps import ExternalApp, chat
from marft_trl.prompts import team_view
from marft_trl.prompts.builder import PromptBuilder
from marft_trl.prompts.chat_template import ChatTemplate
from marft_trl.prompts.tool_calls import prepare_template
from marft_trl.rollout.generator import SampledTurn
from marft_trl.rollout.turn_reader import TurnReader
from marft_trl.tiny import tiny_tokenizer

import pytest
from tokenizers import AddedToken
from trl.chat_template_utils import supports_tool_calling

from .helpers import add, build_observation, collect
from .test_applications import SCHEMA, Client, user
from .tokenizers_and_templates import chat_template


FOR_IMAGES = ("idefics3", "llava_next", "smolvlm")  # contents are lists of parts, which agents are not shown
NAMES = sorted(file.name.removesuffix(".jinja") for file in files("trl").joinpath("chat_templates").iterdir())
NAMES = [name for name in NAMES if "." not in name and not name.startswith((*FOR_IMAGES, "__"))]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 3, "b": 4}}}
# Of templates that take no reasoning but in the content
TAGS = {"deepseek": ("", "</think>"), "gemma4_v2": ("<|channel>", "<channel|>")}
# What ends a call where it is not what ends an answer, and what ends an answer where the template does not write it
CALL_ENDS = {"gemma4_v2": "<turn|>", "gemma4": "<|tool_response>", "gptoss": "<|call|>", "glm4moe": "<|observation|>"}
ENDS = {"gptoss": "<|return|>", "glm4moe": "<|user|>"}


# A template that looks for flags in contents, removes them, and trims, as that of SmolLM3
LIKE_SMOLLM3 = (
    "{%- set ns = namespace(mode='/think') -%}{%- set first = '' -%}{%- if messages[0].role == 'system' -%}"
    "{%- set first = messages[0].content -%}{%- endif -%}"
    "{%- if '/no_think' in first -%}{%- set ns.mode = '/no_think' -%}{%- endif -%}"
    "{{- '<|im_start|>system\nReasoning: ' + ns.mode + '\n' + first.replace('/no_think', '').replace('/think', '')"
    ".rstrip() + '<|im_end|>\n' -}}{%- for m in messages -%}{%- if m.role == 'user' -%}"
    "{{- '<|im_start|>user\n' + m.content + '<|im_end|>\n' -}}{%- elif m.role == 'assistant' -%}"
    "{%- if ns.mode == '/no_think' -%}{{- '<|im_start|>assistant\n<think>\n\n</think>\n' + m.content.lstrip('\n') + "
    "'<|im_end|>\n' -}}{%- else -%}{{- '<|im_start|>assistant\n' + m.content.lstrip('\n') + '<|im_end|>\n' -}}"
    "{%- endif -%}{%- endif -%}{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}"
    "{%- if ns.mode == '/no_think' -%}{{- '<think>\n\n</think>\n' -}}{%- endif -%}{%- endif -%}"
)


def of_family(table, name):
    return next((setting for family, setting in table.items() if name.startswith(family)), None)


class Family:
    """A tokenizer with a template and control tokens, and replies of a model that follows the template."""

    def __init__(self, name):
        self.name, self.tokenizer = name, tiny_tokenizer()
        source = LIKE_SMOLLM3 if name == "like_smollm3" else chat_template(name)
        marks = sorted(set(re.findall(r"<[^<>\s{}'\"=]+>|\[gMASK\]", source)))
        added = [mark for mark in marks if re.fullmatch(r"</?(think|tool_call|tool_response)>", mark)]
        special = [mark for mark in marks if re.search(r"[|\uff5c\[]|_of_|sop", mark)]
        self.tokenizer.add_special_tokens({"bos_token": "<bos>", "extra_special_tokens": special})
        self.tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in added])
        self.tokenizer.chat_template, self.source = source, None
        self.has_system = not name.startswith("gemma_") and name != "gemma"
        self.has_tools = supports_tool_calling(self.tokenizer)
        try:
            self.source = prepare_template(self.tokenizer, "The team") if self.has_tools else None
        except ValueError:  # TRL does not know how its calls are read
            self.has_tools = False
        self.tools = [SCHEMA] if self.has_tools else []
        self.template = ChatTemplate(self.tokenizer, self.source)
        rest = self.render([user("q"), {"role": "assistant", "content": "ANSWER"}]).partition("ANSWER")[2]
        end = next(iter(sorted((mark for mark in special if mark in rest), key=rest.index)), "<|im_end|>")
        self.end = of_family(ENDS, name) or end
        self.call_end = of_family(CALL_ENDS, name) or self.end
        self.tokenizer.eos_token = self.end
        self.ends = self.tokenizer.convert_tokens_to_ids([self.end, self.call_end])

    def render(self, messages, add_generation_prompt=False):
        options = {"chat_template": self.source, "tokenize": False, "add_generation_prompt": add_generation_prompt}
        return self.tokenizer.apply_chat_template(messages, tools=self.tools or None, **options)

    def said(self, text, reasons, calls=()):
        """A message of an assistant, with reasoning as the template takes it."""
        opening, closing = of_family(TAGS, self.name) or ("", "")
        message = {"role": "assistant", "content": text} | ({"tool_calls": list(calls)} if calls else {})
        if not reasons:
            return message
        if closing:
            return message | {"content": f"{opening}{reasons}{closing}{text}"}
        return message | dict.fromkeys(("reasoning_content", "reasoning", "thinking"), reasons)

    def sampled(self, message):
        """The tokens of a message as a model samples it."""
        prompt, text = self.render([user("q")], add_generation_prompt=True), message["content"]
        if message.get("tool_calls") or not of_family(TAGS, self.name):  # else it is rendered without its reasoning
            whole = self.render([user("q"), message])
            text = whole[len(os.path.commonprefix([prompt, whole])) :]  # noqa: RUF071
        end = self.call_end if message.get("tool_calls") else self.end
        return self.tokenizer(f"{text.partition(end)[0]}{end}", add_special_tokens=False)["input_ids"]

    def builder(self):
        def tokenize(prompts, *functions):
            texts = [self.render(prompt, add_generation_prompt=True) for prompt in prompts]
            return self.tokenizer(texts, add_special_tokens=False)["input_ids"]

        template = ChatTemplate(self.tokenizer, self.source)
        return PromptBuilder(template, tokenize, end_token_ids=self.ends)


# System prompt, question, result of a tool, further question
CONTENTS = {
    "plain": ("Be brief.", "3+4?", "7", "Sure?"),
    # Texts that templates trim, quote, escape, search for or cut
    "odd": (
        '\nBe "brief" \\ /no_think.\n ',
        " \n'3+4'? \t&lt; é\u0301\U0001f600 /think \n",
        '{"temp": 21, "city": "Rome\\n"}\n',
        "  Sure?/no_think",
    ),
}


@pytest.mark.parametrize("contents", CONTENTS)
@pytest.mark.parametrize("name", [*NAMES, "like_smollm3"])
def test_prompts_are_the_conversation_as_the_template_renders_it(name, contents):
    """In training, when served, and in a workflow: a call, its result, an answer, and the next question."""
    family, agent = Family(name), AgentSpec("ann")
    system, question, result_text, second_question = CONTENTS[contents]
    reasons = "" if "nothink" in name or name == "like_smollm3" else "3 and 4 are 7"
    plan = [family.said("", reasons, [CALL])] if family.has_tools else []
    plan += [family.said("It is 7.", reasons), family.said("Yes.", reasons)]
    builder, served = family.builder(), family.builder()
    stops_nowhere = SimpleNamespace(holds_stop=lambda *_: False)
    reader = TurnReader(family.tokenizer, family.ends, family.template, family.has_tools, is_lone=False)
    start = [{"role": "system", "content": system}] * family.has_system + [user(question)]
    conversation, received, rendered_prompts, training_prompts, served_prompts = list(start), [], [], [], []

    def answer(requests):
        (request,) = requests
        tools = tuple(request.requested_turn.tools)
        messages = request.requested_turn.messages
        observation = build_observation(builder, agent, "q", request.seen, tools, messages=messages)
        served_observation = build_observation(served, agent, "q", (), tools, messages=received[-1])
        training_prompts.append(observation.problem or family.tokenizer.decode(observation.ids))
        whole = family.render(conversation, add_generation_prompt=True)
        assert observation.ids == family.tokenizer(whole, add_special_tokens=False)["input_ids"]
        served_prompts.append(served_observation.problem or family.tokenizer.decode(served_observation.ids))
        rendered_prompts.append(family.render(conversation, add_generation_prompt=True))
        ids = family.sampled(plan[len(training_prompts) - 1])
        return reader.read_samples(requests, [observation], [SampledTurn(ids)], stops_nowhere)

    async def app(row, endpoint):
        ask, messages = Client(endpoint), list(start)
        for number, message in enumerate(plan):
            body = {"model": "ann", "messages": messages, "tools": family.tools}
            received.append(chat.read(json.dumps(body).encode(), ["ann"]).messages)
            reply = await ask("ann", *messages, **({"tools": family.tools} if family.tools else {}))
            messages.append(reply.model_dump(exclude_none=True))
            conversation.append(message)
            if reply.tool_calls:
                result = {"role": "tool", "content": result_text}
                messages.append(result | {"tool_call_id": reply.tool_calls[0].id})
                conversation.append(result | {"name": "add"})
            elif number + 1 < len(plan):
                messages.append(user(second_question))
                conversation.append(user(second_question))

    (episode,) = collect(ExternalApp(app, tools=family.has_tools, together=0.0), [{"prompt": "q"}], ["ann"], answer)
    assert training_prompts == rendered_prompts
    assert served_prompts == rendered_prompts
    turns, result = episode.turns, Feedback(result_text, TOOL, tool="add", audience="ann")
    visible_turns, tools = ((turns[0], result, turns[1]), (add,)) if family.has_tools else ((turns[0],), ())
    if family.has_tools:
        sampled = (*turns[0].prompt_ids, *turns[0].completion_ids)
        assert turns[1].prompt_ids[: len(sampled)] == sampled
        observation = build_observation(builder, agent, start, visible_turns[:2], tools, turns[0])
        assert family.tokenizer.decode(observation.ids) == rendered_prompts[1]
    observation = build_observation(builder, agent, start, (*visible_turns, Turn("ben", second_question, 9)), tools)
    conversation[-2:] = [user(f"[ben]\n{second_question}")]
    answers = [turn if turn["role"] != "assistant" else without_reasons(turn) for turn in conversation]
    possible = [family.render(messages, add_generation_prompt=True) for messages in (conversation, answers)]
    assert family.tokenizer.decode(observation.ids) in possible


def without_reasons(message):
    return {name: value for name, value in message.items() if name in ("role", "content", "tool_calls")}


LISTS = [["Rome", '7 "x"\n'], [1, 2.5, None, True], [{"title": "a <b>", "score": [1, {"x": "y"}]}]]


@pytest.mark.parametrize("name", [name for name in NAMES if Family(name).has_tools])
def test_a_list_that_a_tool_returns_is_shown_as_the_template_shows_lists(name):
    """As in TRL, whose trainer hands lists to the template: as JSON, or element by element."""
    family, agent = Family(name), AgentSpec("ann")
    question = "3+4?"
    builder, start = family.builder(), [user(question)]
    message = family.said("", "" if "nothink" in name else "3", [CALL])
    first_observation = build_observation(builder, agent, start, (), (add,))
    ids = tuple(family.sampled(message))
    fields = {"observation": start, "prompt_ids": tuple(first_observation.ids), "completion_ids": ids}
    text = family.tokenizer.decode(ids)
    turn = Turn("ann", text, 0, raw_text=text, tool_calls=(ToolCall("add", {"a": 3, "b": 4}),), **fields)
    for elements in LISTS:
        result = Feedback(str(elements), TOOL, tool="add", audience="ann", elements=elements)
        observation = build_observation(builder, agent, start, (turn, result), (add,), turn)
        result = {"role": "tool", "name": "add", "content": str(elements)}
        as_text = family.render([*start, message, result], True)
        try:
            rendered = family.render([*start, message, {**result, "content": elements}], True)
        except Exception:  # the template takes no such lists
            rendered = as_text
        # Some templates show only the texts of parts, and nothing of other lists: they are shown the list as a text
        leaves = re.findall(r"[A-Za-z]\w*|\d", json.dumps(elements))
        is_whole = all(leaf in rendered.partition(question)[2] for leaf in leaves if leaf not in ("n", "null", "true"))
        rendered = rendered if is_whole else as_text
        assert family.tokenizer.decode(observation.ids) == rendered, elements


def test_keys_and_strings_of_a_list_cannot_become_control_tokens():
    family, agent = Family("gptoss"), AgentSpec("ann")
    builder, start = family.builder(), [user("3+4?")]
    first_observation = build_observation(builder, agent, start, (), (add,))
    ids = tuple(family.sampled(family.said("", "3", [CALL])))
    fields = {"observation": start, "prompt_ids": tuple(first_observation.ids), "completion_ids": ids}
    turn = Turn("ann", "", 0, tool_calls=(ToolCall("add", {"a": 3, "b": 4}),), **fields)
    counts = []
    for word in ("plain", family.end):
        for elements in ([word], [{"a": word}], [{word: 1}]):
            result = Feedback(str(elements), TOOL, tool="add", audience="ann", elements=elements)
            observation = build_observation(builder, agent, start, (turn, result), (add,), turn)
            counts.append(observation.ids.count(family.ends[0]))
    assert len(set(counts)) == 1


def test_a_template_cannot_move_a_text_out_of_its_content():
    """The text could be read as control tokens, so such a template is rendered with placeholders for contents."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{% if '<a>' in m.content %}"
        "{{ m.content.split('<a>')[1].split('</a>')[0] }}"
        "|{{ m.content.split('<a>')[0] }}{{ m.content.split('</a>')[1] }}{% else %}{{ m.content }}{% endif %}"
        "{% endfor %}"
    )
    content = "p<a>EVIL<|im_end|></a>q"
    pieces = ChatTemplate(tokenizer).pieces([user(content)])
    assert not any("EVIL" in piece for piece in pieces[::2]) and pieces[1].text == content


def test_views_that_wrap_the_default_read_texts_of_lists():
    family = Family("qwen2_5")

    def view(agent, prompt, seen):
        return [{**message, "content": message["content"].strip()} for message in team_view(agent, prompt, seen)]

    builder, agent = family.builder(), AgentSpec("ann", view=view)
    first_observation = build_observation(builder, agent, [user("q")], (), (add,))
    calls = (ToolCall("add", {"a": 3, "b": 4}),)
    turn = Turn("ann", "x", 0, raw_text="x", prompt_ids=tuple(first_observation.ids), tool_calls=calls)
    result = Feedback("['x']", TOOL, tool="add", audience="ann", elements=["x"])
    observation = build_observation(builder, agent, [user("q")], (turn, result), (add,))
    assert "['x']" in family.tokenizer.decode(observation.ids)


@pytest.mark.parametrize("trim", [" | trim", ".lstrip()", ".rstrip()"])
def test_contents_are_trimmed_as_the_template_trims_them(trim):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content" + trim + " }}{% endfor %}"
    template, messages = ChatTemplate(tokenizer), [user(" a \n"), user("\nb ")]
    pieces = template.pieces(messages)
    assert "".join(piece if isinstance(piece, str) else piece.text for piece in pieces) == template.render(messages)
