"""User functions that episodes call: threads, time limits, and results that do not depend on either."""

import asyncio
import contextlib
import contextvars
import sqlite3
import threading
import time

from marft_trl import Workflow
from marft_trl.episodes.guard import EpisodeError
from marft_trl.episodes.tools import ToolCall, ToolLimits
from marft_trl.system import event_loop
from marft_trl.workflows import EnvironmentLoop, Sequential, together

import pytest
from datasets import Dataset

from .helpers import collect, earned, echo, team_trainer
from .test_environment import Countdown, play


@pytest.fixture(autouse=True)
def _little_grace(monkeypatch):
    """Abandoned code gets half a second to finish instead of five."""
    monkeypatch.setattr(event_loop, "_GRACE", 0.5)


class Frozen(Countdown):  # hangs in the function that the row names
    def reset(self, stuck=None, **row):
        self.stuck = stuck
        if stuck == "reset":
            time.sleep(600)
        return super().reset(**row)

    def step(self, turns):
        if self.stuck == "step":
            time.sleep(600)
        return asyncio.sleep(600) if self.stuck == "await" else super().step(turns)

    async def get_reward(self):
        await asyncio.sleep(600 if self.stuck == "reward" else 0)
        return 0.0


class WaitsForNothing(Workflow):
    async def run(self, episode):
        await episode.turn("a")
        if episode.row["stuck"]:
            await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("workflow", "stuck", "turns", "awaited"),
    [
        (EnvironmentLoop(Frozen), "reset", 0, "`Frozen.reset`"),
        (EnvironmentLoop(Frozen), "step", 1, "`Frozen.step`"),
        (EnvironmentLoop(Frozen), "await", 1, "`Frozen.step`"),
        (EnvironmentLoop(Frozen), "reward", 2, "`Frozen.get_reward`"),
        (WaitsForNothing(), "wait", 1, "something that is neither a turn nor a tool"),
    ],
)
def test_hanging_code_is_abandoned_and_named(workflow, stuck, turns, awaited):
    rows = [{"prompt": f"question {index}", "stuck": stuck if index == 1 else None} for index in range(3)]
    start = time.monotonic()
    message = (
        f"`{type(workflow).__name__}` hangs in episode 1 after {turns} turns, on the prompt 'question 1': it has "
        rf"waited 0.3 seconds for {awaited}.*increase `workflow_timeout`"
    )
    with pytest.raises(EpisodeError, match=message):
        collect(workflow, rows, ["a"], echo(), workflow_timeout=0.3)
    assert 0.3 < time.monotonic() - start < 30
    # Others go on in another thread
    assert collect(EnvironmentLoop(Countdown), rows, ["a"], echo(), workflow_timeout=30)


def test_slow_code_does_not_hang():
    class Slow(Countdown):
        def step(self, turns):
            time.sleep(0.2)
            return super().step(turns)

    class Patient(Countdown):
        async def step(self, turns):
            await asyncio.sleep(0.3)
            return super().step(turns)

        async def get_reward(self):
            await asyncio.sleep(0.3)
            return 0.0

    class Looks(Workflow):
        async def run(self, episode):
            for _ in range(3):
                await episode.call(time.sleep, 0.1)
            await episode.turn("a")

    rows = [{"prompt": "q", "rounds": 1}] * 4
    for workflow in (EnvironmentLoop(Slow), EnvironmentLoop(Patient), Looks()):  # in total more than the limit
        start = time.monotonic()
        episodes = collect(workflow, rows, ["a"], echo(), workflow_timeout=0.55)
        assert time.monotonic() - start > 0.55
        assert [len(episode.turns) for episode in episodes] == [1] * 4


def calling(name, agent="a", with_number=False):
    """Lets an agent call a function in its first turn, with the number of its episode."""

    def answer(requests):
        turns = echo()(requests)
        for place, request in enumerate(requests):
            if request.agent == agent and request.functions and request.after is None:
                call = ToolCall(name, {"number": request.episode.index} if with_number else {})
                turns[place] = request.make_turn(turns[place].text, tool_calls=(call,))
        return turns

    return answer


def test_the_time_of_generation_does_not_count():
    async def brief():
        await asyncio.sleep(0.05)

    async def long():
        for _ in range(4):
            await asyncio.sleep(0.1)

    class Both(Workflow):
        async def run(self, episode):
            async def speaks():
                await episode.call(brief)
                await episode.turn("a")

            await together([episode.call(long), speaks()])

    def slow(requests):
        time.sleep(1)
        return echo()(requests)

    (episode,) = collect(Both(), [{"prompt": "q"}], ["a"], slow, workflow_timeout=0.8)
    assert len(episode.turns) == 1


def test_waiting_to_call_does_not_count_as_a_hang():
    class Narrow(Workflow):
        async def run(self, episode):
            async with gate:
                await episode.call(time.sleep, 0.3)
            await episode.turn("a")

    gate = asyncio.Semaphore(1)
    rows = [{"prompt": str(index)} for index in range(6)]  # the last waits for 1.5 seconds
    assert len(collect(Narrow(), rows, ["a"], echo(), workflow_timeout=0.9)) == 6


def test_a_hang_is_noticed_while_others_call_forever():
    class Polls(Workflow):
        async def run(self, episode):
            await episode.turn("a")
            while episode.index == 0:
                await episode.call(asyncio.sleep, 0.05)
            await asyncio.Event().wait()

    message = "hangs in episode 1 after 1 turns.*waited 0.8 seconds for .*neither a turn nor a tool"
    with pytest.raises(EpisodeError, match=message):
        collect(Polls(), [{"prompt": "q"}, {"prompt": "p"}], ["a"], echo(), workflow_timeout=0.4)


def test_a_hang_is_noticed_while_tools_wait_behind_it():
    rows = [{"prompt": f"question {index}", "stuck": "step" if index == 0 else None} for index in range(2)]

    def look():
        return "fine"

    def answer(requests):  # the second episode's call comes when the first one hangs
        return calling("look", agent="a" if requests[0].episode.index == 1 else "nobody")(requests)

    class Late(EnvironmentLoop):
        async def run(self, episode):
            if episode.index == 1:
                await asyncio.sleep(0.2)
            await super().run(episode)

    with pytest.raises(EpisodeError, match="hangs in episode 0 .* waited 0.5 seconds for `Frozen.step`"):
        collect(Late(Frozen), rows, ["a"], answer, tools={"a": [look]}, workflow_timeout=0.5)


def test_a_tool_that_hangs_leaves_environments_in_their_thread():
    threads = []

    def sleep():
        time.sleep(2)

    class Noted(Countdown):
        def reset(self, **row):
            threads.append(threading.get_ident())
            return super().reset(**row)

        def step(self, turns):
            threads.append(threading.get_ident())
            return super().step(turns)

    options = {"tools": {"a": [sleep]}, "limits": ToolLimits(seconds=0.2), "workflow_timeout": 30}
    (episode,) = collect(EnvironmentLoop(Noted), [{"prompt": "q"}], ["a"], calling("sleep"), **options)
    assert episode.counts["tools/timeout"] == 2 and len(threads) == 3 and len(set(threads)) == 1


def test_functions_run_one_at_a_time_after_a_wait_times_out():
    running, most = [], []

    def work(seconds):
        running.append(1)
        most.append(len(running))
        time.sleep(seconds)
        running.pop()

    class Impatient(Workflow):
        async def run(self, episode):
            if episode.index == 0:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(episode.call(given_up, *arguments), 0.1)
            else:
                await asyncio.sleep(0.05)
            await episode.call(work, 0.1)
            await episode.turn("a")

    given_up, arguments = work, [0.5]
    collect(Impatient(), [{"prompt": "q"}] * 3, ["a"], echo(), workflow_timeout=30)
    assert most == [1] * 4
    given_up, arguments, start = time.sleep, [600], time.monotonic()  # it hangs
    (episode,) = collect(Impatient(), [{"prompt": "q"}], ["a"], echo(), workflow_timeout=20)
    assert len(episode.turns) == 1 and time.monotonic() - start < 10


@pytest.mark.parametrize("seconds", [(0.02, 0.2), (0.2, 0.02)])
def test_dependencies_of_turns_do_not_depend_on_timing(seconds):
    of_tool, of_call = seconds

    async def look():
        await asyncio.sleep(of_tool)
        return "seen"

    class Branches(Workflow):
        async def run(self, episode):
            async def first():
                await episode.turn("a", tools=[look])

            async def second():
                turn = await episode.turn("b", tools=[])
                await episode.call(time.sleep, of_call)
                episode.observe("env says", after=[turn])
                await episode.turn("c")

            await asyncio.gather(first(), second())

    (episode,) = collect(Branches(), [{"prompt": "q"}], ["a", "b", "c"], calling("look"))
    assert [observation.text for observation in episode.feedback] == ["seen", "env says"]
    assert [(turn.agent, turn.fed) for turn in episode.turns] == [("a", 0), ("b", 0), ("a", 1), ("c", 2)]


@pytest.mark.parametrize("seconds", [0.0, 0.1])
def test_branches_do_not_depend_on_how_long_a_function_takes(seconds):
    class Branches(Workflow):
        async def run(self, episode):
            async def first():
                await episode.call(time.sleep, seconds)
                await episode.turn("x")

            async def second():
                await episode.turn("y")
                await episode.turn("z")

            await asyncio.gather(first(), second())

    for _ in range(3 if seconds else 300):  # a function may come back at any moment of the event loop
        waves = []
        collect(Branches(), [{"prompt": "q"}], ["x", "y", "z"], echo(waves))
        assert [sorted(wave) for wave in waves] == [["x", "y"], ["z"]]


def test_context_variables_stay_with_the_episode():
    variable = contextvars.ContextVar("variable")

    class Remembers(Countdown):
        def reset(self, number, **row):
            variable.set(number)
            return super().reset(**row)

        def look(self):
            return str(variable.get())

        async def step(self, turns):
            return "", float(variable.get()), True

    loop, rows = EnvironmentLoop(Remembers, tools=["look"]), [{"prompt": "q", "number": number} for number in range(3)]
    episodes = collect(loop, rows, ["a"], calling("look"))
    assert [earned(episode) for episode in episodes] == [{}, {1: 1.0}, {1: 2.0}]
    assert [episode.feedback[1].text for episode in episodes] == ["0", "1", "2"]


def test_errors_of_a_function_name_the_episode():
    class Fails(Countdown):
        def step(self, turns):
            raise error

    class FailsLater(Countdown):
        async def step(self, turns):
            raise error

    for error in (asyncio.CancelledError(), StopIteration(), ValueError("no")):
        for environment in (Fails, FailsLater):
            with pytest.raises(EpisodeError, match=rf"failed in episode 0 after 1 turns.*(no|{type(error).__name__})"):
                play(EnvironmentLoop(environment), ["a"], [{"prompt": "q"}])


def test_a_workflow_that_will_not_end_is_left_behind():
    class Stubborn(Workflow):
        async def run(self, episode):
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(600)
            await asyncio.sleep(600)

    with pytest.raises(EpisodeError, match="`Stubborn` hangs in episode 0"):
        collect(Stubborn(), [{"prompt": "q"}], ["a"], echo(), workflow_timeout=0.2)


def test_episodes_may_be_run_within_episodes_in_a_notebook():
    def answer(requests):
        (episode,) = collect(EnvironmentLoop(Countdown), [{"prompt": "inner"}], ["a"], echo())
        assert len(episode.turns) == 2
        return echo()(requests)

    async def notebook():
        return collect(EnvironmentLoop(Countdown), [{"prompt": "outer"}], ["a"], answer)

    assert len(asyncio.run(notebook())[0].turns) == 2


def test_an_environment_lives_in_one_thread():
    threads = []

    class Shelf(Countdown):
        def __init__(self):
            self.thread = threading.get_ident()
            self.store = sqlite3.connect(":memory:")  # refuses to be used from another thread

        def reset(self, **row):
            self.store.execute("create table shelf (word)")
            return super().reset(**row)

        def step(self, turns):
            threads.append((self.thread, threading.get_ident()))
            self.store.execute("insert into shelf values (?)", (turns[0].text,))
            return super().step(turns)

        def get_reward(self):
            return float(self.store.execute("select count(*) from shelf").fetchone()[0])

    episodes = play(EnvironmentLoop(Shelf), ["a"], [{"prompt": "q", "rounds": rounds} for rounds in (1, 3)])
    assert [episode.earned[len(episode.turns) - 1] for episode in episodes] == [1.0 + 1, 3.0 + 3]
    assert len({thread for pair in threads for thread in pair}) == 1
    assert threads[0][0] != threading.get_ident()


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"workflow_timeout": 0.5}, "it has waited 0.5 seconds for `Frozen.step`"),
        ({"workflow_timeout": 0}, "`workflow_timeout` must be a finite number above 0, or None for no limit"),
    ],
)
def test_training_does_not_wait_for_ever(model_folder, tmp_path, settings, problem):
    rows = Dataset.from_list([{"prompt": "q", "stuck": "step"}] * 8)
    arguments = {"workflow": EnvironmentLoop(Frozen), "train_dataset": rows, "reward_funcs": None}
    with pytest.raises((EpisodeError, ValueError), match=problem):
        team_trainer(model_folder, tmp_path, settings=settings, **arguments).train()


@pytest.mark.parametrize("parallel", [False, True])
def test_asynchronous_tools_run_concurrently(parallel):
    running, most = [], []

    def slow(number: int) -> int:
        running.append(number)
        most.append(len(running))
        time.sleep(0.2)
        running.remove(number)
        if number == 3:
            raise KeyError("three")
        return 10 * number

    async def slow_beside_others(number: int) -> int:
        return await asyncio.to_thread(slow, number)

    tool = slow_beside_others if parallel else slow
    answer = calling(tool.__name__, with_number=True)
    episodes = collect(Sequential(["a"]), [{"prompt": "q"}] * 6, ["a"], answer, tools={"a": (tool,)})
    replies = [episode.feedback[0].text for episode in episodes]
    assert [*replies[:3], *replies[4:]] == ["0", "10", "20", "40", "50"] and "three" in replies[3]
    assert (max(most) > 1) == parallel


def test_a_tool_that_hangs_beside_others_is_given_up():
    async def tool(number: int) -> int:
        await asyncio.sleep(600 if number == 1 else 0.01)
        return number

    options = {"tools": {"a": (tool,)}, "limits": ToolLimits(seconds=0.3)}
    answer = calling("tool", with_number=True)
    episodes = collect(Sequential(["a"]), [{"prompt": "q"}] * 3, ["a"], answer, **options)
    replies = [episode.feedback[0].text for episode in episodes]
    assert replies[0] == "0" and "did not answer within 0.3 seconds" in replies[1] and replies[2] == "2"
