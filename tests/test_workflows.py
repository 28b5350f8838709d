"""The order of agents, what they observe, and the collector that runs many episodes at once."""

import asyncio

from marft_trl import Sequential, Workflow
from marft_trl.episodes import collector
from marft_trl.episodes.guard import EpisodeError
from marft_trl.episodes.records import TeamContext
from marft_trl.reporting.transcripts import format_episode
from marft_trl.workflows import rehearse
from marft_trl.workflows.base import together

import pytest

from .helpers import collect


def test_sequential_runs_the_team_in_order_and_everybody_sees_all_before():
    episode = rehearse(Sequential(rounds=2), ["planner", "solver"], lambda agent, seen: f"{agent} after {len(seen)}")
    assert [turn.agent for turn in episode.turns] == ["planner", "solver", "planner", "solver"]
    assert [turn.sees for turn in episode.turns] == [(), (0,), (0, 1), (0, 1, 2)]
    assert episode.answer is episode.turns[-1]


@pytest.mark.parametrize("settings", [{"rounds": 0}, {"rounds": "2"}, {"agents": []}])
def test_sequential_refuses_nonsense(settings):
    with pytest.raises(ValueError, match="Sequential"):
        Sequential(**settings)
    with pytest.raises(TypeError, match="list of agent names"):
        Sequential("solver")


def test_unknown_agents_are_named_before_the_first_turn():
    class Typo(Workflow):
        async def run(self, episode):
            await episode.turn("writer")
            await episode.turn(agent="critik")

    message = r"`Typo` names the agent 'critik'.*'writer', 'critic'.*Did you mean 'critic'"
    with pytest.raises(ValueError, match=message):
        rehearse(Typo(), ["writer", "critic"], lambda agent, seen: pytest.fail("no turn may be asked for"))
    with pytest.raises(ValueError, match="Did you mean 'solver'"):
        Sequential(["slover"]).check(["solver"])


def test_names_computed_at_run_time_are_checked_when_asked_for():
    class Computed(Workflow):
        async def run(self, episode):
            await episode.turn("wri" + "tre")

    with pytest.raises(ValueError, match="Did you mean 'writer'"):
        rehearse(Computed(), ["writer"], lambda agent, seen: "")


def answer_all(batches):
    def answer(requests):
        batches.append([(request.episode.index, request.agent) for request in requests])
        return [request.make_turn("x") for request in requests]

    return answer


def test_parallel_branches_and_episodes_of_other_lengths_share_batches():
    class Branches(Workflow):
        async def run(self, episode):
            plan = await episode.turn("planner")
            if episode.index % 2:
                return
            both = await asyncio.gather(episode.turn("s1", sees=[plan]), episode.turn("s2", sees=[plan]))
            await episode.turn("judge", sees=both)

    batches = []
    agents = ["planner", "s1", "s2", "judge"]
    episodes = collect(Branches(), [{"prompt": "x"}] * 4, agents, answer_all(batches))
    assert batches[1] == [(0, "s1"), (0, "s2"), (2, "s1"), (2, "s2")]
    assert batches[2] == [(0, "judge"), (2, "judge")]
    assert [len(episode.turns) for episode in episodes] == [4, 1, 4, 1]
    assert [turn.sees for turn in episodes[0].turns] == [(), (0,), (0,), (1, 2)]


@pytest.mark.parametrize("iterations", range(12))
def test_a_branch_that_goes_on_after_a_function_shares_the_batch(iterations):
    """For any iteration of the event loop in which the function ends: the branch sends its request a few later."""

    async def write(messages):
        for _ in range(iterations):
            await asyncio.sleep(0)
        return "written"

    async def reply(request):
        return request.make_turn(await request.episode.write(write, []))

    class Branches(Workflow):
        async def run(self, episode):
            await together([self.branch(episode), episode.turn("solver")])

        async def branch(self, episode):
            await episode.turn("script")
            await asyncio.sleep(0)
            await episode.turn("critic")

    batches = []
    context = TeamContext(("solver", "script", "critic"), scripts={"script": reply})
    collector.collect(Branches(), [{"prompt": "x"}] * 2, context, answer_all(batches))
    assert [sorted(batch) for batch in batches] == [[(0, "critic"), (0, "solver"), (1, "critic"), (1, "solver")]]


def test_branches_share_a_batch_if_each_requests_soon_after_another():
    class Staircase(Workflow):
        async def run(self, episode):
            await together(self.branch(episode, number) for number in range(6))

        async def branch(self, episode, number):
            for _ in range(3 * number):
                await asyncio.sleep(0)
            await episode.turn("solver")

    batches = []
    collect(Staircase(), [{"prompt": "x"}], ["solver"], answer_all(batches))
    assert [len(batch) for batch in batches] == [6]


def test_rehearse_works_inside_a_running_loop():
    async def notebook_cell():
        return rehearse(Sequential(), ["a", "b"], lambda agent, seen: agent)

    assert [turn.text for turn in asyncio.run(notebook_cell()).turns] == ["a", "b"]


def test_errors_name_the_workflow_the_episode_and_the_prompt():
    class Broken(Workflow):
        async def run(self, episode):
            await episode.turn("solver")
            if episode.index == 2:
                raise KeyError("boom")

    rows = [{"prompt": f"question {i}"} for i in range(4)]
    with pytest.raises(EpisodeError, match=r"`Broken` failed in episode 2 after 1 turns.*'question 2'.*KeyError"):
        collect(Broken(), rows, ["solver"], answer_all([]))

    class Silent(Workflow):
        async def run(self, episode):
            pass

    with pytest.raises(EpisodeError, match="`Silent` ended episode 0 without a turn"):
        collect(Silent(), rows, ["solver"], answer_all([]))


def test_answers_and_seen_turns_have_to_be_turns_of_the_episode():
    class Leaky(Workflow):
        last = None

        async def run(self, episode):
            turn = await episode.turn("solver", sees=[self.last] if self.last else [])
            Leaky.last = turn

    collect(Leaky(), [{"prompt": "x"}], ["solver"], answer_all([]))
    with pytest.raises(EpisodeError, match="from another episode"):
        collect(Leaky(), [{"prompt": "x"}], ["solver"], answer_all([]))

    class Text(Workflow):
        async def run(self, episode):
            turn = await episode.turn("solver")
            episode.answer = turn.text

    with pytest.raises(EpisodeError, match="must be a turn"):
        collect(Text(), [{"prompt": "x"}], ["solver"], answer_all([]))


def test_transcripts_fit_80_columns_and_cannot_paint_the_terminal():
    replies = iter(["a" * 200 + "\x1b[31m", "two words " * 30])
    episode = rehearse(Sequential(), ["planner", "solver"], lambda *_: next(replies), prompt="long " * 50)
    text = format_episode(episode, {"accuracy": 1.0, "style": None}, title="step 3")
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "\x1b" not in text and "sees planner #1" in text and "accuracy 1, style none" in text
