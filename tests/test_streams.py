"""Episodes that do not wait for one another: the same turns, in the same order, however long servers take."""

import asyncio
import contextlib
import random
import time

from marft_trl import Workflow
from marft_trl.episodes import collector
from marft_trl.episodes.guard import EpisodeError
from marft_trl.episodes.records import EndOfEpisode, TeamContext
from marft_trl.episodes.rerun import Rerun
from marft_trl.episodes.tools import ToolCall, ToolLimits
from marft_trl.system.event_loop import run_coroutine
from marft_trl.system.randomness import EpisodeRandomness
from marft_trl.system.watchdog import TookTooLong
from marft_trl.workflows import EnvironmentLoop, Graph, Sequential, UntilApproved

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from .helpers import add, echo
from .test_environment import Countdown


ROWS = [{"prompt": f"question {index}", "number": index} for index in range(12)]
CONTEXT = TeamContext(("a", "b", "c"))


@contextlib.asynccontextmanager
async def limited(workflow, seconds):
    async with collector.limit_blocking_code(workflow, seconds) as limit:
        with collector.apply_time_limit(limit):
            yield


def streamed(workflow, rows=ROWS, answer=None, context=CONTEXT, delays=0.003, seed=0, reruns=None, **options):
    """Runs a workflow with answers that take random times."""
    draw, answer = random.Random(seed), answer or echo()

    async def slowly(requests):
        await asyncio.sleep(draw.random() * delays)
        return answer(requests)

    options = {"workflow_timeout": 60, "reruns": reruns, **options}

    async def run():
        async with limited(workflow, options["workflow_timeout"]):
            return await collector.collect_async(workflow, rows, context, slowly, **options)

    return run_coroutine(run)


def facts(episode):
    """The content of an episode as plain data."""
    turns = [(t.agent, t.text, t.index, t.sees, t.hears, t.fed, t.audience) for t in episode.turns]
    feedback = [(observation.agent, observation.text, observation.index) for observation in episode.feedback]
    history = [(type(event).__name__, event.index) for event in episode.history]
    numbers = episode.fed, episode.earned, dict(episode.counts), episode.answer.index, episode.overflowed
    return turns, feedback, history, numbers


class Branches(Workflow):
    """Parallel branches of several turns each, which see all earlier turns."""

    async def run(self, episode):
        await episode.turn("a")

        async def branch(agent, count):
            for _ in range(count):
                await episode.turn(agent)

        await asyncio.gather(branch("b", 3), branch("c", 1 + episode.row["number"] % 3))
        await episode.turn("a")


def slow_draw():
    time.sleep(0.002)
    return random.random()


class Draws(Workflow):
    """Draws from the global random generators, also in tasks and in functions that run in threads."""

    async def run(self, episode):
        first = random.random()

        async def branch(agent):
            await episode.turn(agent)
            episode.count(agent, np.random.rand())
            if torch.rand(()) < 0.5:
                await episode.turn(agent)

        await asyncio.gather(branch("a"), branch("b"))
        episode.count("first", first)
        episode.count("thread", await episode.call(random.random))
        episode.count("slow", await episode.call(slow_draw))
        for _ in range(random.randrange(3)):
            await episode.turn("c")


def calling(requests):
    """Every second turn of an agent calls a tool."""
    completions = echo()(requests)
    for place, request in enumerate(requests):
        if request.functions and not request.is_final and len(request.seen) % 2 == 0:
            call = ToolCall("add", {"a": request.episode.index, "b": len(request.seen)})
            completions[place] = request.make_turn(completions[place].text, tool_calls=(call,))
    return completions


def full(requests):
    """The window of one agent is full."""
    return [EndOfEpisode("full") if request.agent == "c" else request.make_turn("x") for request in requests]


TOOLS = TeamContext(("a", "b", "c"), {"b": (add,), "c": (add,)}, ToolLimits(calls=3))
WORKFLOWS = {
    "chain": (Sequential(), echo(), CONTEXT),
    "branches": (Branches(), echo(), CONTEXT),
    "graph": (Graph({"a": [], "b": ["a"], "c": ["a", "b"]}), echo(), CONTEXT),
    "full window": (Sequential(), full, CONTEXT),
    "loop": (UntilApproved("a", "b"), echo(), CONTEXT),
    "environment": (EnvironmentLoop(Countdown), echo(), CONTEXT),
    "tools in branches": (Branches(), calling, TOOLS),
}


@pytest.mark.parametrize("name", WORKFLOWS)
def test_streams_give_the_episodes_of_waves_whatever_the_timing(name):
    workflow, answer, context = WORKFLOWS[name]
    waves = [facts(episode) for episode in collector.collect(workflow, ROWS, context, answer)]
    for seed in range(3):
        episodes = streamed(workflow, answer=answer, context=context, seed=seed)
        assert [facts(episode) for episode in episodes] == waves


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**16), st.sampled_from([0.0, 0.001, 0.01]))
def test_random_draws_of_user_code_do_not_depend_on_timing(seed, delays):
    def once(seed, delays):
        def around(index):
            return EpisodeRandomness(1000 + index).active

        episodes = streamed(Draws(), ROWS[:5], delays=delays, seed=seed, make_step_context=around)
        return [(facts(episode), dict(episode.counts)) for episode in episodes]

    random.seed(0)
    state = random.getstate()
    expected = once(0, 0.002)
    assert len({str(outcome[1]) for outcome in expected}) == 5  # each episode draws its own numbers
    assert once(seed, delays) == expected
    assert random.getstate() == state


def test_batches_in_the_same_loop_are_independent():
    """The random draws of a batch do not depend on when another batch ends."""

    async def batch(first, pause):
        async def slowly(requests):
            await asyncio.sleep(pause)
            return echo()(requests)

        def around(index):
            return EpisodeRandomness(first + index).active

        options = {"workflow_timeout": 60, "make_step_context": around}
        episodes = await collector.collect_async(Draws(), ROWS[:3], CONTEXT, slowly, **options)
        return [(facts(episode), dict(episode.counts)) for episode in episodes]

    async def beside(other):
        async with limited(Draws(), 60):
            others = [batch(0, 0.001)] if other else []
            return (await asyncio.gather(batch(100, 0.05), *others))[0]

    assert run_coroutine(beside, True) == run_coroutine(beside, False)


def test_no_episode_waits_for_another():
    """Episodes of 4 turns, one of which takes long: in waves, all would wait for it."""
    events = []

    class Four(Workflow):
        async def run(self, episode):
            for _ in range(4):
                await episode.turn("a")

    async def answer(requests):
        (request,) = requests
        place = request.episode.index, request.number
        await asyncio.sleep(1.0 if place == (0, 0) else 0.0)
        events.append(place)
        return echo()(requests)

    run_coroutine(lambda: collector.collect_async(Four(), ROWS[:4], CONTEXT, answer))
    assert {events.index((index, 3)) < events.index((0, 0)) for index in (1, 2, 3)} == {True}


def test_a_failing_episode_ends_all_or_is_left_out():
    class Fails(Workflow):
        async def run(self, episode):
            await episode.turn("a")
            if episode.row["number"] in (3, 5):
                raise KeyError("lost")
            await episode.turn("b")

    with pytest.raises(EpisodeError, match="failed in episode . after 1 turns.*KeyError: 'lost'"):
        streamed(Fails())
    failures = {}
    episodes = streamed(Fails(), failures=failures)
    assert sorted(failures) == [3, 5] and all("lost" in str(error) for error in failures.values())
    assert [len(episode.turns) for episode in episodes] == [2, 2, 2, 0, 2, 0, *[2] * 6]


def test_an_episode_that_hangs_is_given_up_while_others_go_on():
    class Waits(Workflow):
        async def run(self, episode):
            await episode.turn("a")
            if episode.row["number"] == 2:
                await asyncio.Event().wait()
            await episode.turn("b")

    failures = {}
    episodes = streamed(Waits(), workflow_timeout=0.5, failures=failures)
    assert list(failures) == [2] and "neither a turn nor a tool" in str(failures[2])
    assert sum(len(episode.turns) for episode in episodes) == 22
    with pytest.raises(EpisodeError, match="hangs in episode 2"):
        streamed(Waits(), workflow_timeout=0.5)


def test_code_that_blocks_is_interrupted_and_slow_servers_are_no_block(monkeypatch):
    monkeypatch.setattr(collector, "BLOCKED_EXTRA_SECONDS", 0.5)
    monkeypatch.setattr(collector, "HEARTBEAT_SECONDS", 0.05)

    class Blocks(Workflow):
        async def run(self, episode):
            await episode.turn("a")
            time.sleep(60)

    with pytest.raises(EpisodeError, match="TookTooLong.*blocks the event loop: run .* returned for 0.3 seconds"):
        streamed(Blocks(), ROWS[:2], workflow_timeout=0.3)
    assert streamed(Sequential(), ROWS[:2], delays=1.5, workflow_timeout=0.3)


def test_an_error_of_a_server_ends_all():
    def broken(requests):
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError, match="gone"):
        streamed(Sequential(), answer=broken)


def test_generation_that_blocks_the_loop_is_not_a_workflow_that_blocks(monkeypatch):
    """A model in this process answers all episodes at once, which has no time limit."""
    monkeypatch.setattr(collector, "BLOCKED_EXTRA_SECONDS", 0.05)

    def answer(requests):
        time.sleep(0.5)
        return [request.make_turn("x") for request in requests]

    assert len(collector.collect(Sequential(), ROWS[:2], CONTEXT, answer, workflow_timeout=0.05)) == 2


def test_a_workflow_that_blocks_in_a_notebook_is_an_error_and_not_the_end_of_the_process(monkeypatch):
    """A loop runs already, so episodes run in another thread, where `time.sleep` cannot be interrupted."""
    monkeypatch.setattr(collector, "BLOCKED_EXTRA_SECONDS", 0.05)

    class Blocks(Workflow):
        async def run(self, episode):
            time.sleep(2)
            await episode.turn("a")

    async def cell():
        collector.collect(Blocks(), ROWS[:1], CONTEXT, echo(), workflow_timeout=0.1)

    with pytest.raises(TookTooLong, match="blocks"):
        asyncio.run(cell())


def test_recorded_episodes_are_run_again_in_streams():
    recorded = streamed(Branches())

    def again(requests):
        return [request.make_turn(f"new {request.agent}") for request in requests]

    rows = [episode.row for episode in recorded]
    reruns = [[Rerun(episode, changed=1) for episode in recorded] for _ in range(2)]
    waves = collector.collect(Branches(), rows, CONTEXT, again, reruns[0])
    episodes = streamed(Branches(), rows, again, reruns=reruns[1])
    assert list(map(facts, episodes)) == list(map(facts, waves))
    assert all("new b" in episode.turns[1].text and episode.turns[0].text == "a()" for episode in episodes)


def test_turns_have_numbers_before_they_are_taken():
    numbers = []

    def noting(requests):
        numbers.extend((request.episode.index, request.number) for request in requests)
        return echo()(requests)

    episodes = streamed(Branches(), answer=noting)
    assert sorted(numbers) == [(index, turn.index) for index, episode in enumerate(episodes) for turn in episode.turns]


def test_a_rerun_repeats_only_what_a_turn_was_shown():
    """The window of the model may have left out the oldest turns."""

    class Three(Workflow):
        async def run(self, episode):
            for name in ("a", "b", "c"):
                await episode.turn(name)

    def latest(requests):
        return [request.make_turn(request.agent, request.seen[-1:], completion_ids=(7,)) for request in requests]

    rows, context = [{"prompt": "q"}], TeamContext(("a", "b", "c"))
    (record,) = collector.collect(Three(), rows, context, latest)
    (again,) = collector.collect(Three(), rows, context, lambda requests: pytest.fail("generated"), [Rerun(record)])
    for episode in (record, again):
        assert [turn.sees for turn in episode.turns] == [(), (0,), (1,)]
        assert [(turn.index, turn.completion_ids) for turn in episode.turns] == [(0, (7,)), (1, (7,)), (2, (7,))]
