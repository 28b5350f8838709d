"""Reasoning of earlier turns: agents are shown what the chat template of their model would show."""

from marft_trl import AgentSpec, Team, TeamManifest, Turn
from marft_trl.prompts.builder import PromptBuilder
from marft_trl.prompts.chat_template import ChatTemplate, EarlierReasoning
from marft_trl.tiny import tiny_tokenizer

import pytest

from .helpers import build_observation, team_trainer
from .tokenizers_and_templates import chat_template


QWEN3, R1, GPT_OSS, PLAIN = map(chat_template, ("qwen3", "deepseek_r1_distill", "gptoss", "qwen2_5"))
TAGGED = "<think>\nfirst 3, then 4\n</think>\n\nThe answer is 7."
CHANNELS = "<|channel|>analysis<|message|>first 3, then 4<|end|><|start|>assistant<|channel|>final<|message|>It is 7."


def builder(source, **options):
    tokenizer = tiny_tokenizer()
    return PromptBuilder(ChatTemplate(tokenizer, source), tokenize=lambda *_: pytest.fail("not alike"), **options)


@pytest.mark.parametrize(
    ("source", "text", "answer"),
    [
        (QWEN3, TAGGED, "The answer is 7."), (R1, TAGGED, "The answer is 7."), (GPT_OSS, CHANNELS, "It is 7."),
        (QWEN3, "first 3, then 4\n</think>\n\n7", "7"),  # `<think>` was part of the prompt
        (QWEN3, "<think>\nfirst 3, th", "<think>\nfirst 3, th"),  # cut off: templates leave it as it is
        (GPT_OSS, "<|channel|>analysis<|message|>first 3, th", ""), (QWEN3, "7", "7"), (PLAIN, TAGGED, TAGGED),
        (QWEN3, CHANNELS, CHANNELS), (GPT_OSS, "It is 7.", "It is 7."),
    ],
)  # fmt: skip
def test_reasoning_is_removed_where_the_template_does_so(source, text, answer):
    earlier = EarlierReasoning(ChatTemplate(tiny_tokenizer(), source))
    assert earlier.removes_reasoning == (source != PLAIN) and earlier.answer(text) == answer
    (turn,) = earlier.shown([Turn("planner", text, index=0)])
    assert turn.raw_text == answer and turn.text == text


@pytest.mark.parametrize(("source", "text"), [(QWEN3, TAGGED), (R1, TAGGED), (GPT_OSS, CHANNELS)])
def test_agents_see_answers_without_reasoning(source, text):
    planner, solver = AgentSpec("planner"), AgentSpec("solver")
    turn = Turn("planner", text, index=0)
    for agent in (planner, solver):
        prompt = [{"role": "user", "content": "3+4"}]
        answers_only, with_reasoning = (
            build_observation(builder(source, show_reasoning=on), agent, prompt, (turn,)).content
            for on in (False, True)
        )
        assert "7." in str(answers_only) and "first 3" not in str(answers_only) and "think" not in str(answers_only)
        assert "first 3" in str(with_reasoning)
        assert answers_only[-1]["role"] == ("assistant" if agent is planner else "user")


def test_earlier_turns_match_the_chat_template():
    """A planner's second prompt, token for token as of a conversation that goes through the template."""
    tokenizer, planner = tiny_tokenizer(), AgentSpec("planner")
    turns = [Turn("planner", TAGGED, index=0), Turn("solver", "Are you sure?", index=1)]
    observation = build_observation(builder(QWEN3), planner, [{"role": "user", "content": "3+4"}], turns)
    messages = [{"role": "user", "content": "3+4"}, {"role": "assistant", "content": TAGGED}, observation.content[-1]]
    whole = tokenizer.apply_chat_template(messages, chat_template=QWEN3, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(observation.ids) == tokenizer.decode(
        tokenizer(whole, add_special_tokens=False)["input_ids"]
    )


def test_saved_teams_keep_show_reasoning(model_folder, tmp_path):
    for on in (False, True):
        folder = tmp_path / str(on)
        team_trainer(model_folder, folder, settings={"show_reasoning": on}).save_model()
        assert TeamManifest.load(folder).inference.show_reasoning is on
        prompts = Team.from_pretrained(folder, model=model_folder)._runner.prompts
        assert prompts.show_reasoning is on
    assert type(TeamManifest.load(folder).inference)().show_reasoning  # teams of earlier versions were shown it
