"""Records match prompts, joint steps and transcripts in any workflow."""

import functools
import re
from collections import Counter
from dataclasses import replace

from marft_trl import AgentSpec, Turn, Workflow, workflows
from marft_trl.episodes import Feedback
from marft_trl.episodes.tools import ToolCall
from marft_trl.prompts.builder import PromptBuilder
from marft_trl.prompts.chat_template import ChatTemplate
from marft_trl.prompts.tool_calls import prepare_template
from marft_trl.reporting.transcripts import Transcript
from marft_trl.workflows import EnvironmentLoop, rehearse, together

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .helpers import build_observation, collect, team_trainer, varied_reward
from .test_tools import TOKENIZER, add


AGENTS = [AgentSpec("first"), AgentSpec("second", system_prompt="B."), AgentSpec("caller", tools=[add])]
PICKS = st.one_of(st.none(), st.lists(st.integers(0, 9), max_size=4, unique=True))
NAMES = st.sampled_from([agent.name for agent in AGENTS])
TURN = st.tuples(st.just("turn"), NAMES, PICKS)
TOGETHER = st.tuples(st.just("together"), st.lists(st.tuples(NAMES, PICKS), min_size=2, max_size=3))
OBSERVE = st.tuples(st.just("observe"), st.lists(st.integers(0, 9), max_size=2), st.booleans())
PROGRAMS = st.lists(st.one_of(TURN, TURN, TOGETHER, OBSERVE), max_size=7).map(
    lambda ops: [("turn", "first", []), *ops]
)


class Program(Workflow):
    """Run a list of instructions; for each turn, note which items it asked to show and which turns had been fed."""

    earns = True

    def __init__(self, instructions):
        self.instructions = instructions
        self.notes = {}

    async def run(self, episode):
        turns, items, fed = [], [], []
        notes = self.notes[episode.index] = []

        async def turn(name, picks):
            sees = None if picks is None else list(dict.fromkeys(items[pick % len(items)] for pick in picks if items))
            requested, before = list(items) if sees is None else sees, list(fed)
            new_turn = await episode.turn(name, sees=sees)
            notes.append((new_turn, requested, before))
            return new_turn

        for number, (kind, *rest) in enumerate(self.instructions):
            if kind == "observe":
                after = [turns[pick % len(turns)] for pick in rest[0]]
                feedback = episode.observe(f"tag9{number}x" if rest[1] else None, after=after)
                fed += [fed_turn.index for fed_turn in after]
                items += [feedback] if feedback is not None else []
                continue
            new = [await turn(*rest)] if kind == "turn" else await together(turn(*branch) for branch in rest[0])
            turns += new
            items += new


def play(program, rows):
    """Episodes with real prompts; every turn has a unique tag, and the caller calls its tool once per turn."""
    build = builder()

    def answer(requests):
        taken, turns = Counter(), []
        for request, observation in zip(requests, build.build(requests), strict=True):
            number = len(request.episode.turns) + taken[request.episode.index]
            taken[request.episode.index] += 1
            calls = (ToolCall("add", {"a": 70 + number, "b": 0}),) if request.functions and not request.after else ()
            text = f"tag{number}x"
            ids = [*TOKENIZER(text)["input_ids"], 2]
            more = {"observation": observation.content, "prompt_ids": observation.ids, "completion_ids": ids}
            more["without_calls"] = text if calls else None
            turns.append(request.make_turn(text, observation.seen, tool_calls=calls, **more))
        return turns

    tools = {agent.name: agent.functions for agent in AGENTS if agent.functions}
    return collect(
        program,
        [{"prompt": f"q{index}"} for index in range(rows)],
        [agent.name for agent in AGENTS],
        answer,
        None,
        tools,
    )


def tokenize(prompts, functions=()):
    prompts = [prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}] for prompt in prompts]
    options = {"add_generation_prompt": True, "return_dict": True}
    return TOKENIZER.apply_chat_template(prompts, tools=list(functions) or None, **options)["input_ids"]


def check_records(episode, notes):
    """Compare the recorded dependencies with the prompts and with the notes of the program."""
    for turn in episode.turns:
        prompt_text = TOKENIZER.decode(turn.prompt_ids)
        expected = {f"tag{index}x" for index in turn.sees}
        expected |= {episode.feedback[index].text for index in turn.hears if episode.feedback[index].tool is None}
        assert set(re.findall(r"tag\d+x", prompt_text)) == expected, (turn, prompt_text)
        results = sorted(episode.feedback[index].text for index in turn.hears if episode.feedback[index].tool)
        assert sorted(re.findall(r"(?<=<tool_response>\n)\d+", prompt_text)) == results
    for noted_turn, requested, fed in notes:
        first = (
            episode.turns[noted_turn.sees[-1]] if noted_turn.agent == "caller" else noted_turn
        )  # which called a tool before this turn
        wanted = {("turn" if isinstance(item, Turn) else "feedback", item.index) for item in requested}
        recorded = {("turn", index) for index in first.sees} | {("feedback", index) for index in first.hears}
        private = {("turn", turn.index) for turn in episode.turns if turn.audience == noted_turn.agent}
        private |= {("feedback", item.index) for item in episode.feedback if item.audience == noted_turn.agent}
        assert wanted <= recorded <= wanted | private
        assert list(episode.fed[: first.fed]) == fed


def depths(episode):
    """Joint steps by their definition: one more than the deepest turn that a turn depends on."""

    def depth(index):
        turn = episode.turns[index]
        return 1 + max((depth(other) for other in {*turn.sees, *episode.fed[: turn.fed]}), default=-1)

    return [depth(turn.index) for turn in episode.turns]


def transcript_matches_record(episode):
    """Whether the transcript and the record agree on what each turn sees."""
    entries = [entry for entry in Transcript.of(episode).entries if not entry.is_feedback]
    described = [({*re.findall(r"#(\d+)", entry.notes[0])}, "feedback" in entry.notes[0]) for entry in entries]
    return described == [({str(index + 1) for index in turn.sees}, bool(turn.hears)) for turn in episode.turns]


def check(episode, notes):
    check_records(episode, notes)
    assert episode.joint_steps() == depths(episode) and transcript_matches_record(episode)


@settings(max_examples=60)
@given(PROGRAMS)
def test_records_match_prompts_in_any_program(instructions):
    program = Program(instructions)
    for episode in play(program, 2):
        check(episode, program.notes[episode.index])


@settings(max_examples=25)
@given(PROGRAMS)
def test_batched_and_one_by_one_are_the_same_episodes(instructions):
    together_ = play(Program(instructions), 3)
    (alone,) = play(Program(instructions), 1)
    assert [record(episode) for episode in together_] == [record(alone)] * 3


def record(episode):
    turns = [(turn.agent, turn.text, turn.sees, turn.hears, turn.fed, turn.audience) for turn in episode.turns]
    return turns, [(feedback.text, feedback.tool, feedback.audience) for feedback in episode.feedback], episode.fed


class Echoes:
    def reset(self, **row):
        self.rounds = 0
        return "tag90x"

    def step(self, turns):
        self.rounds += 1
        return f"tag9{self.rounds}x", 0.0, False


SHIPPED = {
    "sequential": workflows.Sequential(rounds=2),
    "graph": workflows.Graph(
        {"first": [], "caller": ["first"], "second": ["first"], "end": ["caller", "second"]}, {"end": "first"}
    ),
    "debate": workflows.Debate(["first", "caller"], rounds=3, judge="second"),
    "mixture": workflows.MixtureOfAgents([["first", "caller"], ["caller", "second"]], "first"),
    "approved": workflows.UntilApproved("caller", "second", rounds=3),
    "orchestrated": workflows.Orchestrated("first", fallback="caller", max_turns=9),
    "environment": EnvironmentLoop(Echoes, horizon=3),
    "side by side": EnvironmentLoop(Echoes, ["first", "second"], horizon=3, side_by_side=True),
}


@pytest.mark.parametrize("name", SHIPPED)
def test_records_match_prompts_in_every_shipped_workflow(name):
    for episode in play(SHIPPED[name], 2):
        assert len(episode.turns) > 3
        check(episode, [])


TAGS = ["<call>second</call>", "<call>", "<done/>", "APPROVED", "<|im_end|>", "<tool_call>", "[first]"]
PIECES = [*TAGS, "\ud800", "\r", "\x00", "²"]
ODD = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=4), st.characters()), max_size=8).map("".join)


def survives(text):
    """Whether every shipped workflow ends within its limits if all agents reply with this text."""
    names = [agent.name for agent in AGENTS]
    episodes = [rehearse(workflow, names, lambda *_: text, "q") for workflow in SHIPPED.values()]
    return all(1 <= len(episode.turns) <= 12 and episode.answer is not None for episode in episodes)


def can_be_shown(text):
    """Whether prompts with the text as a turn, feedback and a tool result have no additional control tokens."""
    counts = []
    for words in (text, "a"):
        observations = [build_observation(builder(), agent, "q", turns_and_feedback(words)) for agent in AGENTS[:2]]
        counts.append(
            [sum(index in TOKENIZER.added_tokens_decoder for index in observation.ids) for observation in observations]
        )
    return counts[0] == counts[1]


@functools.cache
def builder():
    return PromptBuilder(
        ChatTemplate(TOKENIZER, prepare_template(TOKENIZER, "x")), tokenize, AGENTS, end_token_ids=[2]
    )


def turns_and_feedback(text):
    result = Feedback(text, tool="add", audience="first")
    return [Turn("first", text, 0), Turn("second", text, 1), Feedback(text), result]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", [20, pytest.param(10_000, marks=pytest.mark.exhaustive)])
def test_no_text_makes_a_workflow_or_a_prompt_raise(count):
    @settings(max_examples=count)
    @given(ODD)
    def check(text):
        assert survives(text) and can_be_shown(text)

    check()


@pytest.mark.parametrize("name", ["debate", "orchestrated"])
def test_greedy_decoding_gives_the_same_episodes_batched_and_one_by_one(model_folder, tmp_path, name):
    agents = [AgentSpec(agent.name, system_prompt="Say it.", top_k=1, max_completion_length=12) for agent in AGENTS]
    trainer = team_trainer(model_folder, tmp_path, agents=agents, workflow=SHIPPED[name], reward_funcs=varied_reward)
    rows = [{"prompt": text} for text in ("Ann has 7 apples.", "7", "How many books are left? " * 3)]
    batched = trainer.parts.runner.run(rows, trainer.parts.runner.answer)
    for row, episode in zip(rows, batched, strict=True):
        (alone,) = trainer.parts.runner.run([row], trainer.parts.runner.answer)
        assert [turn.completion_ids for turn in alone.turns] == [turn.completion_ids for turn in episode.turns]
        assert record(alone) == record(episode) and len(alone.turns) > 2


def test_the_check_itself_catches_a_wrong_record():
    program = Program([("turn", "first", []), ("turn", "second", [0])])
    (episode,) = play(program, 1)
    episode = replace(episode, turns=(episode.turns[0], replace(episode.turns[1], sees=())))
    with pytest.raises(AssertionError):
        check_records(episode, program.notes[0])
    assert episode.joint_steps() == [0, 0]
