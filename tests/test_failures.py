"""Users' code that fails, hangs, seeds or lies, and signals: what is saved, what is told, what goes on."""

import asyncio
import concurrent.futures
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from marft_trl.config.checks import check_timeouts
from marft_trl.episodes import collector
from marft_trl.episodes.guard import EpisodeError
from marft_trl.episodes.records import EndOfEpisode, TeamContext
from marft_trl.rollout import reward_scorer
from marft_trl.rollout.failures import Failures
from marft_trl.rollout.reward_scorer import check_scores, wrap_reward_function
from marft_trl.runs.run import RunInterrupted, Signals
from marft_trl.runs.run_folder import RunFolder
from marft_trl.seams.runs import timeout_also_on_cpu
from marft_trl.system.event_loop import run_coroutine
from marft_trl.system.processes import describe_error
from marft_trl.system.randomness import UserState
from marft_trl.system.watchdog import TookTooLong, time_limit
from marft_trl.workflows import EnvironmentLoop, Workflow

import pytest
import torch
from transformers import TrainerState

from .exactness import differences
from .helpers import StopAt, began_at, collect, config, echo, moved, team_trainer, tiny_dataset, varied_reward, weights
from .test_health import Do


ROOT = Path(__file__).parent.parent
SAVE = {"save_strategy": "steps", "save_steps": 50, "max_steps": 4, "per_device_train_batch_size": 4}


def trainer_in(folder, model, callbacks=None, **arguments):
    its = {**SAVE, **arguments.pop("settings", {})}
    return team_trainer(model, folder, settings=its, callbacks=callbacks, **arguments)


class Scores:
    """A reward function that does something at a call, and is [`varied_reward`] otherwise."""

    __name__ = "scores"

    def __init__(self, at=None, do=None):
        self.at, self.do, self.calls = at, do, 0

    def __call__(self, completions, **kwargs):
        self.calls += 1
        if self.calls == self.at:
            self.do()
        return varied_reward(completions)


def boom():
    raise ZeroDivisionError("boom")


@pytest.mark.parametrize("save_steps", [50, pytest.param(1, marks=pytest.mark.slow)])
def test_a_reward_that_fails_ends_the_run_after_a_checkpoint_of_the_last_step(small_model, tmp_path, save_steps):
    """And the run that goes on from it is the one that did not fail, bit for bit, with the state of the function."""
    settings = {"save_steps": save_steps}
    whole = trainer_in(tmp_path / "whole", small_model, reward_funcs=Curriculum(), settings=settings)
    whole.train()
    cut = trainer_in(tmp_path / "cut", small_model, reward_funcs=Curriculum(3, boom), settings=settings)
    with pytest.raises(ZeroDivisionError) as raised:
        cut.train()
    by, note = raised.value.__notes__
    assert by == "Raised by the reward function `scores`."
    assert re.search(r"saved in .*checkpoint-2; `train\(resume_from_checkpoint=True\)` resumes from it", note)
    again = trainer_in(tmp_path / "cut", small_model, reward_funcs=Curriculum(), settings=settings)
    again.train(resume_from_checkpoint=True)
    assert began_at(again) == 2 and not moved(weights(whole), weights(again))
    assert differences(tmp_path / "whole" / "checkpoint-4", tmp_path / "cut" / "checkpoint-4") == []


def test_an_evaluation_that_fails_loses_no_step(small_model, tmp_path):
    settings = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4, "num_generations_eval": 2}
    reward = Scores(3, boom)  # two steps, then the evaluation
    rows = {"eval_dataset": tiny_dataset(4), "train_dataset": tiny_dataset(8)}
    with pytest.raises(ZeroDivisionError):
        trainer_in(tmp_path, small_model, reward_funcs=reward, settings=settings, **rows).train()
    assert RunFolder(tmp_path).newest()[1].step == 2


def test_nothing_is_saved_when_the_weights_may_have_changed(small_model, tmp_path):
    """An error between the optimizer's step and the end of the step: the checkpoint before stands."""
    trainer = trainer_in(tmp_path, small_model, settings={"save_steps": 2}, callbacks=[Do(3, on_optimizer_step=boom)])
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert [folder.name for folder in RunFolder(tmp_path).checkpoints()] == ["checkpoint-2"]


def test_whatever_a_reward_raises_is_saved_before(small_model, tmp_path):
    for strategy, saved in (("no", []), ("steps", ["checkpoint-1"])):
        reward, settings = Scores(2, lambda: sys.exit(3)), {"save_strategy": strategy}
        with pytest.raises(RuntimeError, match=r"called `sys.exit\(3\)`"):
            trainer_in(tmp_path, small_model, reward_funcs=reward, settings=settings).train()
        assert [folder.name for folder in RunFolder(tmp_path).checkpoints()] == saved


def test_out_of_memory_in_a_turn_is_saved_before(small_model, tmp_path):
    trainer = trainer_in(tmp_path, small_model)
    generate = trainer.parts.runner.generator.generate

    def full(*arguments, **named):
        if trainer.state.global_step == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return generate(*arguments, **named)

    trainer.parts.runner.generator.generate = full
    with pytest.raises(torch.OutOfMemoryError):
        trainer.train()
    assert RunFolder(tmp_path).newest()[1].step == 2


def by_completion(fails):
    def judge(completions, **kwargs):
        return [boom() if fails(text) else 1.0 + "abcd".index(text) for text in completions]

    return judge


def scored(function, timeout=None, **policy):
    failures = Failures(**policy) if policy else None
    wrapped = wrap_reward_function(function, timeout, failures)
    found = wrapped(prompts=["q"] * 4, completions=list("abcd"))
    return asyncio.run(found) if asyncio.iscoroutine(found) else found, failures and failures.take()[0]


def test_a_completion_that_cannot_be_scored_is_skipped_alone():
    scores, counts = scored(by_completion(lambda text: text == "c"), action="skip")
    assert scores == [1.0, 2.0, None, 4.0] and counts == {"rewards/judge/skipped": 1}


def test_a_function_that_fails_once_is_tried_again():
    calls = []

    def judge(completions, **kwargs):
        calls.append(len(completions))
        return boom() if len(calls) == 1 else [1.0] * len(completions)

    scores, counts = scored(judge, action="retry", retries=2)
    assert scores == [1.0] * 4 and calls == [4, 4] and counts == {"rewards/judge/retried": 1}
    with pytest.raises(ZeroDivisionError):
        scored(by_completion(lambda text: True), action="retry", retries=1)


def test_what_hangs_and_wrong_results_are_skipped_as_a_whole():
    for outcome in (lambda: time.sleep(60), lambda: [1.0] * 7):
        scores, counts = scored(lambda completions, of=outcome, **_: of(), action="skip", timeout=0.3)
        assert scores == [None] * 4 and list(counts.values()) == [4]
    with pytest.raises(ValueError, match="returned 7 rewards, but 4 were expected"):
        scored(lambda completions, **_: [1.0] * 7)


@pytest.mark.parametrize("kind", ["waits", "sleeps", "computes"])
def test_a_reward_that_hangs_is_ended_and_named(kind):
    def judge(completions, **kwargs):
        if kind == "sleeps":
            time.sleep(60)
        while kind == "computes":
            pass

    async def later(completions, **kwargs):
        await asyncio.sleep(60)

    start = time.monotonic()
    with pytest.raises(TookTooLong, match=r"`(judge|later)` has not returned for 0.4 seconds .*`reward_timeout`"):
        scored(later if kind == "waits" else judge, timeout=0.4)
    assert time.monotonic() - start < 10


def test_a_timeout_of_the_functions_own_is_its_own():
    async def judge(completions, **kwargs):
        raise TimeoutError("the service does not answer")

    with pytest.raises(TimeoutError, match="the service does not answer"):
        scored(judge, timeout=30)


def test_an_asynchronous_reward_that_hangs_ends_the_run(small_model, tmp_path, monkeypatch):
    """One that blocks the event loop, which no timeout of asyncio can see."""
    monkeypatch.setattr(reward_scorer, "_BLOCKED_EXTRA_SECONDS", 0.5)
    calls = []

    async def judge(completions, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            time.sleep(60)
        return varied_reward(completions)

    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"`reward_timeout`"):
        trainer_in(tmp_path, small_model, reward_funcs=judge, settings={"reward_timeout": 0.5}).train()
    assert time.monotonic() - start < 30
    assert RunFolder(tmp_path).newest()[1].step == 1


def python(code, **environment):
    command, whole = [sys.executable, "-c", code], {**os.environ, **environment}
    return subprocess.run(command, env=whole, capture_output=True, text=True, timeout=60, cwd=ROOT)


def test_code_that_cannot_be_interrupted_ends_the_process():
    """With code 124, the reason and a traceback of all threads."""
    code = (
        "import signal, time\nfrom marft_trl.system import watchdog\n"
        "watchdog.GRACE = 0.5\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGRTMAX, signal.SIGALRM])\n"
        "said = []\nwatchdog.ON_EXIT.append(lambda message: print('last words:', message, flush=True))\n"
        "with watchdog.time_limit(0.3, lambda where: f'{where} hangs.'):\n"
        "    time.sleep(60)\n"
    )
    done = python(code)
    assert done.returncode == 124, done.stderr
    assert "could not be interrupted, so the process exits" in done.stderr and "most recent call first" in done.stderr
    assert "last words:" in done.stdout


def test_a_pattern_that_takes_for_ever_is_interrupted():
    """
    It keeps the interpreter to itself, so no other thread could. An alarm that users' code has set does no harm, nor
    does a limit outside.
    """
    code = (
        "import contextlib, re, signal, time\nfrom marft_trl.system.watchdog import time_limit\n"
        "outer = [contextlib.nullcontext(), time_limit(30, lambda where: 'outer')]\n"
        "for handler in (signal.SIG_DFL, lambda *_: None):\n"
        "    with time_limit(30, lambda where: where):\n"
        "        signal.signal(signal.SIGALRM, handler); signal.alarm(1); signal.alarm(0)\n"
        "    start = time.monotonic()\n"
        "    try:\n"
        "        with outer.pop(), time_limit(0.5, lambda where: f'{where} hangs'):\n"
        "            re.match('(a|aa)+$', 'a' * 60 + 'b')\n"
        "    except TimeoutError as error:\n        print(error, time.monotonic() - start < 10)\n"
        "    time.sleep(0.3)\nprint('no signal comes after')\n"
    )
    done = python(code)
    assert done.stdout.count("hangs True") == 2, (done.stdout, done.stderr[-2000:])
    assert done.returncode == 0 and "comes after" in done.stdout


@pytest.mark.parametrize("nested", [False, True])
def test_a_limit_does_not_count_the_time_of_one_inside(nested):
    """Each ends its own code, by its own message, and nothing comes after."""
    with (
        pytest.raises(TookTooLong, match="inner"),
        time_limit(0.1, lambda _: "outer"),
        time_limit(0.4, lambda _: "inner"),
    ):
        time.sleep(20)
    with pytest.raises(TookTooLong, match="outer"), time_limit(0.3, lambda _: "outer"):
        if nested:
            with time_limit(0.6, lambda _: "inner"):
                time.sleep(0.5)
        time.sleep(20)
    with time_limit(0.2, lambda _: "short"):
        pass
    time.sleep(0.4)


def test_code_that_catches_the_interruption_is_interrupted_again():
    caught = []
    with pytest.raises(TookTooLong), time_limit(0.1, lambda _: "x"):
        while len(caught) < 2:
            try:
                time.sleep(20)
            except TookTooLong as error:
                caught.append(error)


@pytest.mark.slow
def test_no_timeout_of_many_ends_the_process():
    for _ in range(300):
        with pytest.raises(TookTooLong), time_limit(0.005, lambda _: "x"):
            time.sleep(20)


class Fragile(Workflow):
    """Fails in some episodes; each try counts."""

    def __init__(self, fails):
        self.fails, self.tries = fails, 0

    async def run(self, episode):
        self.tries += 1
        await episode.turn("reasoner")
        if self.fails(episode, self.tries):
            boom()
        await episode.turn("actor")


def test_an_episode_that_fails_is_left_out_and_counted(small_model, tmp_path, caplog):
    workflow, settings = Fragile(lambda episode, _: episode.index == 1), {"on_episode_error": "skip", "max_steps": 2}
    trainer = trainer_in(tmp_path, small_model, workflow=workflow, settings=settings)
    before = weights(trainer)
    trainer.train()
    assert moved(before, weights(trainer))
    log = trainer.state.log_history[0]
    assert log["episodes/skipped"] == 0.25 and log["frac_unscored"] == 0.25
    assert "episodes/skipped: The workflow `Fragile` failed in episode 1 after 1 turns" in caplog.text
    assert "returned None for the following kwargs: those of 1 of 4 episodes" in caplog.text


def test_too_many_failures_end_the_run(small_model, tmp_path):
    workflow, settings = Fragile(lambda episode, _: episode.index < 3), {"on_episode_error": "skip"}
    with pytest.raises(RuntimeError, match=r"`episodes/skipped`: 3 of 4 .*`max_skipped_share=0.5`.*ZeroDivisionError"):
        trainer_in(tmp_path, small_model, workflow=workflow, settings=settings).train()


def test_an_episode_that_fails_once_is_tried_again(small_model, tmp_path):
    """It runs again alone, so it is the first of its batch then."""
    seen, settings = [], {"on_episode_error": "retry", "max_steps": 1}
    workflow = Fragile(lambda episode, _: episode.index == 2 and not seen.append(episode.row))
    trainer = trainer_in(tmp_path, small_model, workflow=workflow, settings=settings)
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["episodes/retried"] == 0.25 and log["frac_unscored"] == 0.0 and len(seen) == 1
    stubborn = Fragile(lambda episode, _: episode.row == seen[0])
    with pytest.raises(EpisodeError, match="failed in episode"):
        trainer_in(tmp_path / "stubborn", small_model, workflow=stubborn, settings=settings).train()


class World:
    def __init__(self, step):
        self._step = step

    def reset(self, **row):
        return "begin"

    def step(self, turns):
        return self._step()


def test_environments_that_fail_can_be_skipped(small_model, tmp_path):
    calls, fail = [], [boom, lambda: ("x", 1.0, "False"), lambda: sys.exit(1)]

    def once():
        calls.append(1)
        return fail.pop()() if fail else ("x", float(len(calls)), True)

    settings = {"on_episode_error": "skip", "max_steps": 1, "per_device_train_batch_size": 8}
    workflow = EnvironmentLoop(lambda: World(once))
    trainer = trainer_in(tmp_path, small_model, reward_funcs=None, workflow=workflow, settings=settings)
    trainer.train()
    assert trainer.state.log_history[0]["episodes/skipped"] == 3 / 8


def test_an_episode_without_end_is_ended(small_model, tmp_path):
    class Loop(Workflow):
        async def run(self, episode):
            while True:
                await episode.turn("actor")

    with pytest.raises(EpisodeError, match=r"after 5 turns.*`max_episode_turns`"):
        trainer_in(tmp_path, small_model, workflow=Loop(), settings={"max_episode_turns": 5}).train()


def play(workflow, episodes=1, **settings):
    return collect(workflow, [{"prompt": "q"}] * episodes, ["a"], echo(), **settings)


def test_a_workflow_that_blocks_the_event_loop_is_named(monkeypatch):
    class Blocking(Workflow):
        async def run(self, episode):
            time.sleep(60)

    monkeypatch.setattr(collector, "BLOCKED_EXTRA_SECONDS", 0.2)
    start = time.monotonic()
    message = r"`Blocking` blocks the event loop: run \(test_failures.py:\d+\) has.*episode.call"
    with pytest.raises(EpisodeError, match=message):
        play(Blocking(), workflow_timeout=0.3)
    assert time.monotonic() - start < 20


def test_a_turn_that_is_not_awaited_is_an_error():
    class Forgetful(Workflow):
        async def run(self, episode):
            episode.turn("a")
            await episode.turn("a")

    for workflow in (Forgetful(), Leaves(lambda episode: episode.turn("a"))):  # also one that is under way at the end
        with pytest.raises(EpisodeError, match="did not await 1 of its turns or calls in episode 0.*`await episode"):
            play(workflow)


class Leaves(Workflow):
    """Starts a task that it does not wait for."""

    def __init__(self, task):
        self.task = task

    async def run(self, episode):
        await episode.turn("a")
        self.started = asyncio.ensure_future(self.task(episode))
        await asyncio.sleep(0)
        if episode.index == 1:  # the others have ended
            await asyncio.sleep(0.2)


async def _late(episode):
    if episode.index == 0:
        await asyncio.sleep(0.05)
        await episode.turn("a")


def test_a_turn_of_a_task_that_its_workflow_has_left_is_an_error():
    words, failures = "requested 1 turns after the end of episode 0.*Await the task", {}
    with pytest.raises(EpisodeError, match=words):
        play(Leaves(_late), episodes=2)
    collector.collect(Leaves(_late), [{"prompt": "q"}] * 2, TeamContext(("a",)), echo(), failures=failures)
    assert failures.keys() == {0} and re.search(words, str(failures[0]))


async def _ends_slowly(episode):
    try:
        await asyncio.wait_for(episode.turn("a"), 60)
    finally:
        await asyncio.sleep(0)


@pytest.mark.parametrize("branch", [lambda episode: episode.turn("a"), _ends_slowly])
def test_a_branch_that_its_workflow_has_cancelled_is_no_error(branch):
    class First(Leaves):
        async def run(self, episode):
            await super().run(episode)
            self.started.cancel()

    (episode,) = play(First(branch))
    assert len(episode.turns) == 1


class Splits(Workflow):
    """Two branches; in the first episode, the first branch does not fit the window."""

    def __init__(self, how, pause):
        self.how, self.pause = how, pause

    async def run(self, episode):
        async def chain(name):
            for _ in range(3 + 3 * episode.index):
                await episode.turn(name, sees=[])
                if self.pause:
                    await asyncio.sleep(self.pause if name == "b" else 0)

        if self.how == "gather":
            await asyncio.gather(chain("a"), chain("b"))
        else:
            async with asyncio.TaskGroup() as group:
                for name in "ab":
                    group.create_task(chain(name))


@pytest.mark.parametrize("pause", [0, 0.02])
@pytest.mark.parametrize("how", ["gather", "group"])
def test_branches_of_an_episode_that_has_ended_are_no_error(how, pause, caplog):
    def answer(requests):
        full = [one.episode.index == 0 and one.agent == "a" and len(one.episode.turns) > 1 for one in requests]
        return [EndOfEpisode("full") if its else echo()([one])[0] for its, one in zip(full, requests, strict=True)]

    first, second = collect(Splits(how, pause), [{"prompt": "q"}] * 2, ["a", "b"], answer)
    assert first.overflowed and not second.overflowed and len(second.turns) == 12
    assert {turn.agent for turn in first.turns} == {"a", "b"}
    assert "is still running after the end of its episode" not in caplog.text


def test_an_error_of_a_signal_within_the_loop_is_that_error():
    def handle(*_):
        raise RuntimeError("a worker has died")

    before = signal.signal(signal.SIGALRM, handle)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(RuntimeError, match="a worker has died"):
            run_coroutine(asyncio.sleep, 30)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_tasks_that_are_left_are_named(caplog):
    async def idles(episode):
        await asyncio.sleep(60)

    for _ in range(2):
        play(Leaves(idles))
    words = "The task `.*idles.*` that the workflow `Leaves` started is still running after the end of its episode"
    assert re.search(words, caplog.text)
    assert caplog.text.count("is still running") == 1


async def _cancel_all(*_, **__):
    for task in asyncio.all_tasks():
        task.cancel()
    await asyncio.sleep(0)


async def _stop(episode):
    asyncio.get_running_loop().stop()
    await asyncio.sleep(0.1)


@pytest.mark.parametrize(("task", "did"), [(_cancel_all, "cancelled tasks that"), (_stop, "stopped the event loop")])
def test_a_workflow_that_ends_the_trainers_loop_is_told_so(task, did):
    class Ends(Workflow):
        async def run(self, episode):
            await task(episode)

    with pytest.raises(RuntimeError, match=f"has {did}"):
        play(Ends())
    assert len(play(Leaves(asyncio.sleep))) == 1  # and the next batch runs


KINDS = [StopIteration, StopAsyncIteration, GeneratorExit, MemoryError, asyncio.CancelledError, OSError]
KINDS += [concurrent.futures.CancelledError]  # of a pool of the reward's own


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_a_reward_raises_has_its_name(is_async, kind):
    def fails(completions, **kwargs):
        raise kind

    async def fails_later(completions, **kwargs):
        raise kind

    if is_async and kind is GeneratorExit:
        pytest.skip("ends a coroutine that is closed")
    reward = wrap_reward_function(fails_later if is_async else fails)
    with pytest.raises(Exception) as caught:
        asyncio.run(reward(prompts=["q"], completions=["a"]))
    words = str(describe_error(caught.value))
    assert re.search("(The reward function `fails(_later)?` raised|by the reward function `fails(_later)?`)", words)


def test_a_reward_that_cancels_the_trainers_tasks_is_told_so(small_model, tmp_path):
    with pytest.raises(RuntimeError, match="reward function canceled tasks that it did not start"):
        team_trainer(small_model, tmp_path, reward_funcs=_cancel_all).train()


@pytest.mark.parametrize("scores", [torch.zeros(2, device="meta"), torch.zeros(2).to_sparse()])
def test_scores_that_cannot_be_read(scores):
    with pytest.raises(TypeError, match="`f` returned a tensor whose numbers cannot be read"):
        check_scores(scores, "f", 2)


def test_a_workflow_that_exits_has_failed():
    class Exits(Workflow):
        async def run(self, episode):
            sys.exit(4)

    with pytest.raises(EpisodeError, match="`Exits` failed in episode 0 .*SystemExit: 4"):
        play(Exits())


def test_a_reward_cannot_set_the_state_of_the_trainer(small_model, tmp_path):
    def meddles(completions, trainer_state, **kwargs):
        assert isinstance(trainer_state, TrainerState) and trainer_state.max_steps == 4
        trainer_state.log_history.append("mine")
        trainer_state.global_step = 9
        return varied_reward(completions)

    trainer = trainer_in(tmp_path, small_model, reward_funcs=meddles)
    with pytest.raises(AttributeError, match="reward function cannot set `trainer_state.global_step`"):
        trainer.train()
    assert trainer.state.global_step == 0 and trainer.state.log_history == []


class Stateful:
    """Its state is what it counts."""

    def state_dict(self):
        return {self.counts: getattr(self, self.counts)}

    def load_state_dict(self, state):
        setattr(self, self.counts, state[self.counts])


class Curriculum(Stateful, Scores):
    """Its scores depend on how often it was called."""

    counts = "calls"

    def __call__(self, completions, **kwargs):
        super().__call__(completions)
        return [score * self.calls for score in varied_reward(completions)]


class Course(Stateful, Fragile):
    """A workflow with state: every third episode has one turn more."""

    counts = "tries"

    def __init__(self):
        super().__init__(lambda *_: False)

    async def run(self, episode):
        await super().run(episode)
        if self.tries % 3 == 0:
            await episode.turn("actor")


class Maker(Stateful):
    """Makes environments whose rewards depend on how many were made."""

    counts, made = "made", 0

    def __call__(self):
        self.made += 1
        number = self.made
        return World(lambda: ("x", float(number % 5), True))


OBJECTS = {
    "reward": lambda: {"reward_funcs": Curriculum()},
    "method": lambda: {"reward_funcs": Curriculum().__call__},
    "workflow": lambda: {"workflow": Course()},
    "environment": lambda: {"workflow": EnvironmentLoop(Maker()), "reward_funcs": None},
}


@pytest.mark.slow
@pytest.mark.parametrize("end", ["stops", "fails"])
@pytest.mark.parametrize("kind", OBJECTS)
def test_the_state_of_users_objects_is_resumed(small_model, tmp_path, kind, end):
    """After a stop, and after a failure in the middle of a step, which has changed it already."""
    settings = {"save_steps": 1, "max_steps": 5}
    whole = trainer_in(tmp_path / "whole", small_model, settings=settings, **OBJECTS[kind]())
    whole.train()
    cut = trainer_in(tmp_path / "cut", small_model, settings={**settings, "save_steps": 50}, **OBJECTS[kind]())
    if end == "stops":
        cut.add_callback(StopAt(2))
        cut.add_callback(Do(2, on_step_end=lambda: setattr(cut.control, "should_save", True)))
        cut.train()
    else:
        training_step = cut.training_step

        def failing(*arguments, **named):
            loss = training_step(*arguments, **named)
            return boom() if cut.state.global_step == 2 else loss

        cut.training_step = failing
        with pytest.raises(ZeroDivisionError):
            cut.train()
    again = trainer_in(tmp_path / "cut", small_model, settings=settings, **OBJECTS[kind]())
    again.train(resume_from_checkpoint=True)
    assert began_at(again) == 2
    assert differences(tmp_path / "whole" / "checkpoint-5", tmp_path / "cut" / "checkpoint-5") == []


def test_state_that_cannot_be_saved_is_said_before_the_first_generation(small_model, tmp_path):
    class Half(Scores):
        def state_dict(self):
            return {}

    with pytest.raises(TypeError, match=r"reward_funcs\[0\] \(Half\) has `state_dict` but no `load_state_dict`"):
        trainer_in(tmp_path, small_model, reward_funcs=Half())
    for value, message in [(object(), "JSON-serializable"), ((1,), "tuples"), (float("nan"), "JSON-serializable")]:
        reward = Curriculum()
        reward.state_dict = lambda value=value: {"x": value}
        with pytest.raises(TypeError, match=rf"`state_dict` of reward_funcs\[0\] .*{message}"):
            trainer_in(tmp_path, small_model, reward_funcs=reward).train()
        assert reward.calls == 0


def test_state_that_does_not_fit_is_refused():
    one = Curriculum()
    users = UserState({"reward_funcs[0]": one, "workflow": object(), "reward_funcs[1]": Curriculum})
    assert users.names == ["reward_funcs[0]"] and users.state_dict() == {"reward_funcs[0]": {"calls": 0}}
    with pytest.raises(ValueError, match=r"no state of reward_funcs\[0\]"):
        users.load_state_dict({})
    with pytest.raises(ValueError, match=r"of reward_funcs\[0\] failed .*KeyError"):
        users.load_state_dict({"reward_funcs[0]": {}})
    with pytest.raises(ValueError, match="has the state of judge, but no object of this run loads it"):
        users.load_state_dict({"reward_funcs[0]": {"calls": 1}, "judge": {}})


@pytest.fixture
def heard():
    """Signals are not ignored, as they are in the background and under `nohup`."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)}
    for number in before:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("name", "code", "moment"),
    [
        ("SIGTERM", 143, "optimizer"),
        *(pytest.param(*its, "reward", marks=pytest.mark.slow) for its in (("SIGHUP", 129), ("SIGINT", 130))),
        pytest.param("SIGTERM", 143, "reward", marks=pytest.mark.slow),
        pytest.param("SIGINT", 130, "optimizer", marks=pytest.mark.slow),
    ],
)
def test_a_signal_finishes_the_step_saves_and_exits_with_its_code(heard, small_model, tmp_path, name, code, moment):
    def kill():
        os.kill(os.getpid(), getattr(signal, name))

    before = signal.getsignal(getattr(signal, name))
    whole = trainer_in(tmp_path / "whole", small_model)
    whole.train()
    reward, callbacks = (Scores(2, kill), []) if moment == "reward" else (Scores(), [Do(1, on_optimizer_step=kill)])
    cut = trainer_in(tmp_path / "cut", small_model, callbacks, reward_funcs=reward)
    # The words tell how this script goes on: it did not ask to resume, so starting it again would begin at step 1
    said = rf"by {name} after step 2. It is saved in .*checkpoint-2. Call `train\(resume_from_checkpoint=True\)`"
    with pytest.raises(RunInterrupted, match=said) as raised:
        cut.train()
    assert raised.value.code == code and raised.value.signal == getattr(signal, name)
    assert signal.getsignal(getattr(signal, name)) == before
    again = trainer_in(tmp_path / "cut", small_model)
    again.train(resume_from_checkpoint=True)
    assert began_at(again) == 2 and not moved(weights(whole), weights(again))


def kill(number=signal.SIGTERM):
    os.kill(os.getpid(), number)


def test_a_second_interrupt_ends_at_once(heard, small_model, tmp_path):
    reward = Scores(2, lambda: kill(signal.SIGINT) or kill(signal.SIGINT))
    trainer = trainer_in(tmp_path, small_model, reward_funcs=reward)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert trainer.state.global_step == 1


def test_a_signal_without_checkpoints_says_that_nothing_is_saved(heard, small_model, tmp_path, capfd):
    with pytest.raises(RunInterrupted, match=r"Nothing was saved .* the next run starts at step 1"):
        trainer_in(tmp_path, small_model, reward_funcs=Scores(1, kill), settings={"save_strategy": "no"}).train()
    assert RunFolder(tmp_path).checkpoints() == []
    assert "nothing is saved" in capfd.readouterr().err


def test_a_script_that_resumes_by_itself_is_started_again(heard, small_model, tmp_path):
    with pytest.raises(RunInterrupted, match="Run the same command again to resume"):
        trainer_in(tmp_path, small_model, reward_funcs=Scores(1, kill)).train(resume_from_checkpoint=True)


def test_time_limits_are_below_that_of_the_processes(tmp_path):
    args = config(tmp_path, reward_timeout=30, workflow_timeout=5, tool_timeout=5)
    check_timeouts(args, 31)
    with pytest.raises(ValueError, match=r"`reward_timeout` \(30 s\) must be below the 20 s .*`ddp_timeout`"):
        check_timeouts(args, 20)
    again = config(tmp_path, reward_timeout=10, workflow_timeout=5, tool_timeout=5, on_episode_error="retry")
    with pytest.raises(ValueError, match=r"`reward_timeout` \(10 s times 3 tries\)"):
        check_timeouts(again, 20)


@pytest.mark.slow
def test_the_timeout_of_processes_holds_on_the_cpu_too():
    """`timeout_also_on_cpu`, `timeout_of_processes`: a real process group of one, from a config."""
    code = (
        "from marft_trl import MARFTConfig\nfrom marft_trl.seams.runs import timeout_of_processes\n"
        "MARFTConfig('out', use_cpu=True, ddp_timeout=77)\nprint(timeout_of_processes())"
    )
    where = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = python(code, **where, HF_HUB_OFFLINE="1")
    assert done.stdout.strip() == "77.0", done.stderr[-2000:]
    with timeout_also_on_cpu(None):
        pass


@pytest.mark.parametrize(("seconds", "launcher", "said"), [(42, True, True), (5, True, False), (42, False, False)])
def test_sigterm_says_where_a_launcher_is_quicker_than_a_step(monkeypatch, capfd, seconds, launcher, said):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if launcher:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    signals = Signals(saves=True)
    signals.step_seconds = seconds
    with signals.watched():
        kill()
    found = capfd.readouterr().err
    assert "SIGTERM: finishing the step, then saving" in found and signals.received == signal.SIGTERM
    assert ("`--shutdown-timeout 120`" in found) == said


def test_what_a_function_logs_is_logged_once_though_each_completion_is_tried_alone():
    logged = []

    def judge(completions, log_metric, log_extra, **kwargs):
        log_metric("count", float(len(completions)))
        log_extra("text", list(completions))
        return [boom() if text == "c" else 1.0 for text in completions]

    wrapped = wrap_reward_function(judge, None, Failures("skip"))
    given = {"prompts": ["q"] * 4, "completions": list("abcd")}
    logs = {name: lambda key, value: logged.append((key, value)) for name in ("log_metric", "log_extra")}
    assert wrapped(**given, **logs) == [1.0, 1.0, None, 1.0]
    assert logged == [("count", 4.0), ("text", list("abcd"))]
