"""An orchestrator that decides which agent acts next: tags, routing and training."""

import string

from marft_trl import AgentSpec
from marft_trl.episodes.tools import ToolCall
from marft_trl.workflows import Orchestrated, rehearse
from marft_trl.workflows.orchestrated import Route, parse_route

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .helpers import add, collect, grows_linearly, logged_steps, moved_by_training, team_trainer


TEAM = ["boss", "solver", "critic"]


def play(replies, workflow=None):
    remaining_replies = iter(replies)
    return rehearse(workflow or Orchestrated("boss"), TEAM, lambda agent, seen: next(remaining_replies))


@pytest.mark.parametrize(
    ("text", "route"),
    [
        ("Let us see. <call>solver</call> Add them.", Route("solver")),
        ("<call> critic </call>", Route("critic")),
        ("all right <done/>", Route()),
        ("<done />", Route()),
        ("", Route(problem="no_tag")),
        ("call solver", Route(problem="no_tag")),
        ("<call>solver", Route(problem="no_tag")),
        ("<CALL>solver</CALL>", Route(problem="no_tag")),
        ("<call>boss</call>", Route(problem="unknown_agent")),
        ("<call></call>", Route(problem="unknown_agent")),
        ("<call>solver</call><done/>", Route(problem="several_tags")),
        ("<call>solver</call> or <call>solver</call>", Route(problem="several_tags")),
        ("<call>" * 3 + "solver" + "</call>" * 3, Route("solver")),
        (f"<call>{'x' * 65}</call>", Route(problem="no_tag")),
    ],
)
def test_tags(text, route):
    assert parse_route(text, ["solver", "critic"]) == route


PIECES = st.sampled_from(
    ["<call>", "</call>", "<done/>", "<done />", "<", ">", "</", "solver", "boss", "<|im_end|>", "\x00", "\ud800", "é"]
)
TEXTS = st.lists(st.one_of(PIECES, st.text(string.printable, max_size=5), st.characters()), max_size=20).map("".join)


@pytest.mark.parametrize("count", [100, pytest.param(10_000, marks=pytest.mark.slow)])
def test_every_text_is_a_call_an_end_or_a_named_problem(count):
    @settings(max_examples=count)
    @given(TEXTS)
    def check(text):
        route = parse_route(text, ["solver"])
        if route.problem is not None:
            assert route.agent is None and route.problem in ("no_tag", "several_tags", "unknown_agent")
        else:
            assert "<call>" in text if route.agent == "solver" else route.agent is None and "<done" in text

    check()


@pytest.mark.parametrize("piece", ["<call>", "<call>" + "a" * 64, "<done", "</call>", "<", "<call>a", "\n"])
def test_long_texts_are_read_in_linear_time(piece):
    assert grows_linearly(lambda size: parse_route(piece * (size // len(piece)), ["solver"]), 400_000)


def test_an_orchestrated_episode():
    episode = play(["<call>solver</call>", "7", "<call>critic</call>", "fine", "<done/>"])
    assert [turn.agent for turn in episode.turns] == ["boss", "solver", "boss", "critic", "boss"]
    assert episode.answer.text == "fine" and not episode.counts
    assert episode.joint_steps() == [0, 1, 2, 3, 4]
    assert play(["It is 7. <done/>"]).answer.agent == "boss"  # an orchestrator that calls nobody gives the answer


@pytest.mark.parametrize(
    ("text", "problem"),
    [("hm", "no_tag"), ("<call>nobody</call>", "unknown_agent"), ("<done/><done/>", "several_tags")],
)
def test_fallbacks_are_counted(text, problem):
    episode = play([text])
    assert len(episode.turns) == 1 and episode.counts == {f"routing/{problem}": 1} and not any(episode.earned)
    episode = play([text, "7", "<done/>"], Orchestrated("boss", fallback="solver", penalty=-0.5))
    assert [turn.agent for turn in episode.turns] == ["boss", "solver", "boss"]
    assert episode.earned == (-0.5, 0.0, 0.0) and episode.counts == {f"routing/{problem}": 1}


def test_budgets_end_an_episode_that_never_ends():
    for max_turns in (1, 2, 5):
        episode = play(["<call>solver</call>"] * 5, Orchestrated("boss", max_turns=max_turns))
        assert len(episode.turns) == max_turns and episode.counts == {"routing/out_of_turns": 1}


def test_the_default_prompt_lists_the_team():
    others = [AgentSpec("solver", description="solves {hard} sums"), AgentSpec("critic", system_prompt="x")]
    (prompt,) = Orchestrated("boss").system_prompts([AgentSpec("boss"), *others]).values()
    assert "- solver: solves {hard} sums\n- critic\n" in prompt and "- boss" not in prompt
    assert "<call>name</call>" in prompt and "<done/>" in prompt
    (prompt,) = Orchestrated("boss", ["critic"]).system_prompts([AgentSpec(name) for name in TEAM]).values()
    assert "- critic\n" in prompt and "- solver" not in prompt and "- boss" not in prompt  # agents that it can call


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Orchestrated("boss", max_turns=0), "`max_turns` of `Orchestrated` must be an integer of at least 1"),
        (lambda: Orchestrated("boss", penalty=1.0), "`penalty` of `Orchestrated` .* a finite number of at most 0"),
        (lambda: Orchestrated("boss", penalty=float("nan")), "`penalty` of `Orchestrated` must be a finite number"),
        (lambda: Orchestrated("boss", ["boss"]), "cannot let 'boss' call itself"),
        (lambda: Orchestrated("boss").check(["boss"]), "needs an agent that 'boss' can call"),
        (lambda: Orchestrated("bos").check(TEAM), "names the agent 'bos', .* Did you mean 'boss'"),
        (lambda: Orchestrated("boss", fallback="solvr").check(TEAM), "must be 'finish' or an agent .* got 'solvr'"),
    ],
)
def test_nonsense_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_an_orchestrated_team_trains(model_folder, tmp_path):
    agents = [AgentSpec(name, description=f"the {name}", max_completion_length=6) for name in ("boss", "solver")]
    workflow = Orchestrated("boss", max_turns=3, fallback="solver", penalty=-0.5)
    trainer = team_trainer(model_folder, tmp_path, agents=agents, workflow=workflow)
    assert "- solver: the solver" in trainer.agents[0].system_prompt
    changed = moved_by_training(trainer)
    assert any(".boss." in name for name in changed) and any(".solver." in name for name in changed)
    log = logged_steps(trainer)[0]
    assert log["workflow/routing/no_tag"] == pytest.approx(2.0, abs=1.0)  # the tiny model knows no tags
    assert log["rewards/environment_reward/mean"] == pytest.approx(-0.5 * log["workflow/routing/no_tag"])


def test_rounds_of_tool_calls_stay_within_the_turns_of_an_episode():
    def reply(agent, seen):
        return "<call>solver</call>" if agent == "boss" else ToolCall("add", {"a": 1, "b": 2})

    for max_turns in (2, 3, 4):
        workflow = Orchestrated("boss", max_turns=max_turns)
        episode = rehearse(workflow, TEAM, reply, tools={"solver": [add]})
        assert [turn.agent for turn in episode.turns] == ["boss"] + ["solver"] * (max_turns - 1)


def test_no_turn_begins_after_the_last_token_of_the_budget():
    def answer(requests):  # three tokens each
        texts = ["<call>solver</call>" if request.agent == "boss" else "7" for request in requests]
        return [
            request.make_turn(text, completion_ids=(1, 2, 3)) for request, text in zip(requests, texts, strict=True)
        ]

    for max_tokens, turns in ((3, 1), (5, 2), (6, 2), (7, 3)):
        (episode,) = collect(Orchestrated("boss", max_tokens=max_tokens), [{"prompt": "q"}], TEAM, answer)
        assert len(episode.turns) == turns and episode.counts == {"routing/out_of_tokens": 1}
