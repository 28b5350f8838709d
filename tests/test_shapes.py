"""Ready-made workflows: the order of turns, what each agent sees, and refused arguments."""

import graphlib
import re
import time
from pathlib import Path

from marft_trl import Turn, Workflow
from marft_trl.episodes import EndOfEpisode, joint_actions
from marft_trl.episodes.rerun import Rerun
from marft_trl.episodes.tools import ToolCall
from marft_trl.rewards import math_answer
from marft_trl.workflows import (
    Debate,
    EnvironmentLoop,
    Graph,
    MixtureOfAgents,
    Orchestrated,
    Sequential,
    UntilApproved,
    rehearse,
    together,
)

import pytest
from hypothesis import given
from hypothesis import strategies as st

from .helpers import collect, echo


class Steps:
    def reset(self, **row): ...

    def step(self, turns): ...


DIAMOND = {"planner": [], "solver_a": ["planner"], "solver_b": ["planner"], "judge": ["solver_a", "solver_b"]}
NAMES = list("abcdefg")


def run(workflow, agents, rows=1, waves=None):
    return collect(workflow, [{"prompt": f"q{i}"} for i in range(rows)], agents, echo(waves))


def test_an_agent_may_speak_at_several_nodes():
    graph = Graph(
        {"draft": [], "review": ["draft"], "final": ["draft", "review"]}, {"draft": "writer", "final": "writer"}
    )
    graph.check(["writer", "review"])
    (episode,) = run(graph, ["writer", "review"])
    assert [turn.agent for turn in episode.turns] == ["writer", "review", "writer"]
    assert graph.named_agents() == ["writer", "review"]
    assert graph.describe()["agents"] == {"draft": "writer", "final": "writer"}


@st.composite
def dags(draw):
    """Random graphs whose last node sees every node that no other node sees."""
    count = draw(st.integers(1, 6))
    sees = {NAMES[i]: draw(st.lists(st.sampled_from(NAMES[:i]), unique=True)) if i else [] for i in range(count)}
    seen = {other for others in sees.values() for other in others}
    sees["g"] = [node for node in sees if node not in seen]
    order = draw(st.permutations(list(sees)))
    return {node: sees[node] for node in order}


@given(dags(), st.integers(1, 3))
def test_random_graphs_record_the_shown_turns(sees, rows):
    graph = Graph(sees)
    episodes = run(graph, NAMES, rows)
    for episode in episodes:
        at = {turn.agent: turn.index for turn in episode.turns}
        assert sorted(at) == sorted(sees) and episode.answer.agent == "g"
        depth = {}
        for node in graphlib.TopologicalSorter(sees).static_order():
            turn = episode.turns[at[node]]
            assert turn.sees == tuple(at[other] for other in sees[node])
            assert turn.text == f"{node}({','.join(episode.turns[at[other]].text for other in sees[node])})"
            depth[node] = 1 + max((depth[other] for other in sees[node]), default=-1)
        assert episode.joint_steps() == [depth[turn.agent] for turn in episode.turns]
    (alone,) = run(graph, NAMES, 1)  # batched or not: the same episode
    assert [(t.agent, t.text, t.sees) for t in alone.turns] == [(t.agent, t.text, t.sees) for t in episodes[-1].turns]


@given(dags())
def test_every_wave_of_a_graph_is_as_wide_as_it_can_be(sees):
    waves = []
    (episode,) = run(Graph(sees), NAMES, 1, waves)
    steps = episode.joint_steps()
    assert [len(wave) for wave in waves] == [steps.count(step) for step in range(max(steps) + 1)]


@given(st.dictionaries(st.sampled_from(NAMES), st.lists(st.sampled_from(NAMES), max_size=3), min_size=1))
def test_graphs_that_cannot_run_are_refused_and_no_others(sees):
    def is_fine():
        if any(other not in sees or others.count(other) > 1 for others in sees.values() for other in others):
            return False
        try:
            order = list(graphlib.TopologicalSorter(sees).static_order())
        except graphlib.CycleError:
            return False
        return len([node for node in order if not any(node in others for others in sees.values())]) == 1

    if is_fine():
        Graph(sees)
    else:
        with pytest.raises(ValueError, match="`Graph` cannot run"):
            Graph(sees)


def test_every_cycle_and_every_unknown_agent_is_named():
    with pytest.raises(ValueError, match=r"(?s)'a' -> 'b' -> 'a'.*'c' -> 'd' -> 'c'|'c' -> 'd' -> 'c'.*'a' -> 'b'"):
        Graph({"a": ["b"], "b": ["a"], "c": ["d"], "d": ["c"], "end": ["a", "c"]})
    with pytest.raises(ValueError, match=r"'po'.* Did you mean 'pro'\?.*'juge'.* Did you mean 'judge'\?"):
        Debate(["po", "con"], judge="juge").check(["pro", "con", "judge"])
    with pytest.raises(TypeError, match="`approves` of `UntilApproved` must be a string or a function"):
        UntilApproved("a", "b", approves=3)


def test_all_problems_of_a_graph_are_named_at_once():
    with pytest.raises(ValueError) as error:
        Graph({"planner": ["judge"], "solver": ["planer"], "judge": ["planner", "planner"], "idle": []}, answer="juge")
    text = str(error.value)
    assert "the node 'solver' sees 'planer', which is not a node. Did you mean 'planner'?" in text
    assert "it has the cycle" in text and "'judge' -> 'planner'" in text
    assert "the node 'judge' lists 'planner' 2 times" in text
    assert "`answer` names 'juge', which is not a node. Did you mean 'judge'?" in text
    with pytest.raises(ValueError, match="the answer does not depend on 'b'"):
        Graph({"a": [], "b": []}, answer="a")
    message = r"node 'solver_b' of `Graph` names the agent 'solver_b'.* Did you mean 'solver_a'"
    with pytest.raises(ValueError, match=message):
        Graph(DIAMOND).check(["planner", "solver_a", "judge"])
    with pytest.raises(TypeError, match="needs a list of node names for 'b', got 'a'"):
        Graph({"a": [], "b": "a"})
    with pytest.raises(TypeError, match="`sees` of `Graph` must be a mapping"):
        Graph(["a"])
    with pytest.raises(ValueError, match="`agents` names 'x', which is not a node"):
        Graph({"a": []}, {"x": "a"})
    with pytest.raises(ValueError, match="it has no nodes"):
        Graph({})


def test_an_agent_that_fails_in_a_branch_ends_the_graph():
    class Broken(Graph):
        async def _speak(self, episode, node, tasks):
            if node == "solver_a":
                raise RuntimeError("no")
            return await super()._speak(episode, node, tasks)

    with pytest.raises(RuntimeError, match="`Broken` failed in episode 0 .* RuntimeError: no"):
        run(Broken(DIAMOND), list(DIAMOND))


@pytest.mark.parametrize(
    ("workflow", "waves", "sees"),
    [
        (
            Debate(["a", "b"], rounds=2, judge="d"),
            [["a", "b"], ["a", "b"], ["d"]],
            [(), (), (0, 1), (0, 1), (0, 1, 2, 3)],
        ),
        (
            MixtureOfAgents([["a", "b"], ["b", "c"]], "d"),
            [["a", "b"], ["b", "c"], ["d"]],
            [(), (), (0, 1), (0, 1), (2, 3)],
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_rounds_of_agents_that_answer_at_once(workflow, waves, sees):
    requested_waves = []
    (episode,) = run(workflow, list("abcd"), waves=requested_waves)
    assert requested_waves == waves and [turn.sees for turn in episode.turns] == sees
    assert episode.answer.agent == "d" and episode.joint_steps() == [0, 0, 1, 1, 2]


def test_a_debate_without_a_judge_answers_with_the_majority():
    replies = {"a": "4", "b": "5 ", "c": "5"}
    episode = rehearse(Debate(["a", "b", "c"], rounds=1), ["a", "b", "c"], lambda agent, seen: replies[agent])
    assert episode.answer.agent == "b"


def test_vote_functions_extract_the_votes():
    replies = {"a": "A plan.", "e": "No number.", "b": "\\boxed{4}", "c": "3 + 1 makes \\boxed{4}", "d": "\\boxed{5}"}

    def answer(*names):
        workflow = Debate(names, rounds=1, vote=math_answer)
        return rehearse(workflow, list(names), lambda agent, seen: replies[agent]).answer.agent

    assert answer("a", "d", "b", "c") == "b"  # replies without a vote do not win
    assert answer("a", "e", "d") == "d"  # however many replies have no vote
    assert answer("d", "b") == "d" and answer("a") == "a"


@pytest.mark.parametrize("approves", ["FINE", lambda review: review.text.endswith("FINE")])
def test_until_approved(approves):
    replies = iter(["one", "no", "two", "it is FINE", "three"])
    workflow = UntilApproved("writer", "critic", rounds=3, approves=approves)
    episode = rehearse(workflow, ["writer", "critic"], lambda agent, seen: next(replies))
    assert [turn.text for turn in episode.turns] == ["one", "no", "two", "it is FINE"]
    assert episode.answer.text == "two"
    assert [turn.sees for turn in episode.turns] == [(), (0,), (0, 1), (2,)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Debate("pro"), "`agents` of `Debate` must be a list of agent names, got 'pro'"),
        (lambda: Debate([]), "`agents` of `Debate` is empty"),
        (lambda: Debate(["a"], vote="box"), "`vote` of `Debate` must be a function `vote\\(text\\)`"),
        (lambda: Debate(["a"], judge="a", vote=math_answer), "cannot be combined with `judge`"),
        (lambda: Debate(["a"], rounds=0), "`rounds` of `Debate` must be an integer of at least 1, got 0"),
        (lambda: MixtureOfAgents([], "a"), "`layers` of `MixtureOfAgents` must be a list of lists"),
        (lambda: MixtureOfAgents(["ab"], "a"), "`layers` of `MixtureOfAgents` must be a list of agent names"),
        (lambda: UntilApproved("a", "b", rounds=True), "`rounds` of `UntilApproved` must be an integer"),
        (lambda: UntilApproved("a", 1), "of `UntilApproved` must be a list of agent names"),
    ],
)
def test_nonsense_is_refused(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()


@pytest.mark.parametrize(
    "workflow",
    [Debate(["a", "x"]), MixtureOfAgents([["a"]], "x"), UntilApproved("a", "x"), Graph({"a": [], "x": ["a"]})],
    ids=lambda workflow: type(workflow).__name__,
)
def test_unknown_agents_are_found_at_construction(workflow):
    with pytest.raises(ValueError, match="names the agent 'x', but the team's agents are 'a', 'b'"):
        workflow.check(["a", "b"])
    assert workflow.describe()["class"] == type(workflow).__name__


def test_a_thousand_turns():
    class Long(Workflow):
        async def run(self, episode):
            turn = await episode.turn("a", sees=[])
            for _ in range(999):
                turn = await episode.turn("a", sees=[turn])
                episode.observe("on", after=[turn])

    def run_long(workflow):
        return collect(
            workflow, [{"prompt": "q"}], ["a"], lambda requests: [request.make_turn("x") for request in requests]
        )

    start = time.process_time()
    (episode,) = run_long(Long())
    assert episode.joint_steps() == list(range(1000))
    run_long(Sequential(["a"], rounds=1000))
    run_long(Graph({str(i): [str(i - 1)] if i else [] for i in range(1000)}, {str(i): "a" for i in range(1000)}))
    assert time.process_time() - start < 60  # under 2 where nothing else runs


class Both(Workflow):
    async def run(self, episode):
        await together([episode.turn("a"), episode.turn("b", sees=[])])
        await episode.turn("c")


def run_again(**change):
    """Rerun an episode of three turns with a change: its texts, and the requests and turns of the rerun."""
    requested = []

    def answer(requests):
        requested.extend(
            (request.agent, request.by_reference, [turn.text for turn in request.seen]) for request in requests
        )
        return echo()(requests)

    (episode,) = run(Both(), list("abc"))
    (rerun,) = collect(Both(), [{"prompt": "q0"}], list("abc"), answer, [Rerun(episode, **change)])
    assert [(turn.agent, turn.sees) for turn in rerun.turns] == [("a", ()), ("b", ()), ("c", (0, 1))]
    return [turn.text for turn in episode.turns], requested, rerun.turns


@pytest.mark.parametrize("changed", range(3))
def test_a_rerun_repeats_turns_side_by_side_as_they_were(changed):
    _, requested, _ = run_again(changed=changed)
    assert [request[:2] for request in requested] == [("abc"[changed], True)] + ([("c", False)] if changed < 2 else [])


@pytest.mark.parametrize("removed", range(3))
def test_removed_turns_are_empty_and_turns_that_saw_them_are_resampled(removed):
    texts, requested, turns = run_again(removed=removed)
    assert (turns[removed].text, turns[removed].raw_text, turns[removed].completion_ids) == ("", "", ())
    seen = ["" if index == removed else text for index, text in enumerate(texts[:2])]
    assert requested == ([("c", False, seen)] if removed < 2 else [])
    assert [turns[k].text for k in range(2) if k != removed] == [texts[k] for k in range(2) if k != removed]


def test_an_episode_that_ends_in_one_branch_ends_in_all():
    class Chains(Workflow):
        async def run(self, episode):
            await together([self.chain(episode, "a"), self.chain(episode, "b")])

        async def chain(self, episode, agent):
            for _ in range(3):
                turn = await episode.turn(agent, sees=[])
            return turn

    def answer(requests):
        turns = echo()(requests)
        ends = [
            request.agent == "a" and len(request.episode.turns) >= 2 and request.episode.index == 0
            for request in requests
        ]
        return [EndOfEpisode("full") if end else turn for end, turn in zip(ends, turns, strict=True)]

    first, second = collect(Chains(), [{"prompt": "q"}] * 2, ["a", "b"], answer)
    assert first.overflowed and len(first.turns) == 3 and not second.overflowed and len(second.turns) == 6


def test_a_picture_of_a_loop_that_waits_for_words():
    class Endless(Workflow):
        async def run(self, episode):
            while "OK" not in (await episode.turn("a")).text:
                pass

    assert Endless().mermaid() == 'flowchart LR\n    n0["a"]\n    n0 --> n0'

    class UntilFine(Workflow):
        async def run(self, episode):
            draft = await episode.turn("writer")
            while "OK" not in (review := await episode.turn("critic", sees=[draft])).text:
                draft = await episode.turn("writer", sees=[draft, review])

    assert UntilFine().links(["writer", "critic"]) == [("writer", "critic"), ("critic", "writer")]


def test_turns_of_another_episode_and_feedback_are_no_answers():
    class Recording(Sequential):
        async def run(self, episode):
            episodes.append(episode)
            await super().run(episode)

    episodes = []
    run(Recording(["a"]), ["a"], rows=2)
    first, second = episodes
    with pytest.raises(ValueError, match=r"`episode.answer` got a turn of 'a' from another episode"):
        first.answer = second.turns[0]
    feedback = first.observe("hm", after=[first.turns[0]])
    with pytest.raises(TypeError, match=r"`episode.earn` takes turns returned by `episode.turn`, got a Feedback"):
        first.earn(feedback, 1.0)


def test_the_pictures_in_the_documentation_are_true():
    text = (Path(__file__).parent.parent / "docs" / "guide" / "workflows.md").read_text()
    cases = re.findall(r"`(\w+\([^`\n]*\))`(?:, with the agents ([^\n]*))?\n\n```mermaid\n(.*?)\n```", text, re.DOTALL)
    shipped = {cls.__name__: cls for cls in (Sequential, Graph, Debate, MixtureOfAgents, UntilApproved, Orchestrated)}
    shipped |= {"EnvironmentLoop": EnvironmentLoop, "Guess": Steps}
    assert [code.partition("(")[0] for code, _, _ in cases] == list(shipped)[:-1]
    for code, agents, picture in cases:
        workflow = eval(code, shipped)  # noqa: S307  # our own documentation
        assert workflow.mermaid(agents.split(", ") if agents else []) == picture, code


def test_joint_actions_by_hand():
    def turn(agent, fed=0, calls=False):
        calling = (ToolCall("add", {}),) if calls else ()
        return Turn(agent, "x", index=0, fed=fed, tool_calls=calling, audience=agent if calls else None)

    assert joint_actions([]) == []
    assert joint_actions([turn("a"), turn("b"), turn("c")]) == [0, 0, 0]  # a chain is one joint action
    assert joint_actions([turn("a"), turn("b"), turn("a"), turn("b")]) == [0, 0, 1, 1]  # an agent speaks again
    assert joint_actions([turn("a"), turn("b", fed=1), turn("c", fed=1)]) == [0, 1, 1]  # an environment came between
    assert joint_actions([turn("a", calls=True), turn("a"), turn("b"), turn("a")]) == [0, 0, 0, 1]  # calls
    assert joint_actions([turn("a"), turn("a"), turn("b"), turn("b")]) == [0, 1, 0, 1]  # side by side
    called = [turn("a", calls=True), turn("a", fed=1), turn("b", fed=1), turn("a", fed=2)]
    assert joint_actions(called) == [0, 0, 0, 1]  # a call of a method of the environment
