"""User code that fails, hangs or misbehaves, and signals: what is saved, which error is raised, what continues."""

import asyncio
import concurrent.futures
import functools
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
    settings = {**SAVE, **arguments.pop("settings", {})}
    return team_trainer(model, folder, settings=settings, callbacks=callbacks, **arguments)


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
    """The resumed run equals the run that did not fail, bit for bit, including the state of the function."""
    settings = {"save_steps": save_steps}
    whole = trainer_in(tmp_path / "whole", small_model, reward_funcs=Curriculum(), settings=settings)
    whole.train()
    cut = trainer_in(tmp_path / "cut", small_model, reward_funcs=Curriculum(3, boom), settings=settings)
    with pytest.raises(ZeroDivisionError) as raised:
        cut.train()
    origin, note = raised.value.__notes__
    assert origin == "Raised by the reward function `scores`."
    assert re.search(r"saved in .*checkpoint-2; `train\(resume_from_checkpoint=True\)` resumes from it", note)
    resumed = trainer_in(tmp_path / "cut", small_model, reward_funcs=Curriculum(), settings=settings)
    resumed.train(resume_from_checkpoint=True)
    assert began_at(resumed) == 2 and not moved(weights(whole), weights(resumed))
    assert differences(tmp_path / "whole" / "checkpoint-4", tmp_path / "cut" / "checkpoint-4") == []


def test_an_evaluation_that_fails_loses_no_step(small_model, tmp_path):
    settings = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4, "num_generations_eval": 2}
    reward = Scores(3, boom)  # two steps, then the evaluation
    rows = {"eval_dataset": tiny_dataset(4), "train_dataset": tiny_dataset(8)}
    with pytest.raises(ZeroDivisionError):
        trainer_in(tmp_path, small_model, reward_funcs=reward, settings=settings, **rows).train()
    assert RunFolder(tmp_path).newest()[1].step == 2


def test_nothing_is_saved_when_the_weights_may_have_changed(small_model, tmp_path):
    """An error between the optimizer's step and the end of the step keeps the previous checkpoint."""
    trainer = trainer_in(tmp_path, small_model, settings={"save_steps": 2}, callbacks=[Do(3, on_optimizer_step=boom)])
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert [folder.name for folder in RunFolder(tmp_path).checkpoints()] == ["checkpoint-2"]


def test_a_reward_that_exits_ends_the_run_after_a_checkpoint(small_model, tmp_path):
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
    scores = wrapped(prompts=["q"] * 4, completions=list("abcd"))
    return asyncio.run(scores) if asyncio.iscoroutine(scores) else scores, failures and failures.take()[0]


def test_a_completion_that_cannot_be_scored_is_skipped_alone():
    scores, counts = scored(by_completion(lambda text: text == "c"), action="skip")
    assert scores == [1.0, 2.0, None, 4.0]
    assert counts == {"rewards/judge/one_by_one": 1, "rewards/judge/skipped": 1}


def test_a_function_that_fails_once_is_tried_again():
    calls = []

    def judge(completions, **kwargs):
        calls.append(len(completions))
        return boom() if len(calls) == 1 else [1.0] * len(completions)

    scores, counts = scored(judge, action="retry", retries=2)
    assert scores == [1.0] * 4 and calls == [4, 4] and counts == {"rewards/judge/retried": 1}
    with pytest.raises(ZeroDivisionError):
        scored(by_completion(lambda text: True), action="retry", retries=1)


def test_a_hang_or_a_wrong_number_of_rewards_skips_all_completions():
    for outcome in (lambda: time.sleep(60), lambda: [1.0] * 7):
        scores, counts = scored(lambda completions, of=outcome, **_: of(), action="skip", timeout=0.3)
        skipped = [count for kind, count in counts.items() if kind.endswith("/skipped")]
        assert scores == [None] * 4 and skipped == [4]
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

    with pytest.raises(TookTooLong, match=r"`(judge|later)` has not returned for 0.4 seconds .*`reward_timeout`"):
        scored(later if kind == "waits" else judge, timeout=0.4)


def test_a_timeout_error_of_the_reward_function_is_raised_unchanged():
    async def judge(completions, **kwargs):
        raise TimeoutError("the service does not answer")

    with pytest.raises(TimeoutError, match="the service does not answer"):
        scored(judge, timeout=30)


def test_an_asynchronous_reward_that_hangs_ends_the_run(small_model, tmp_path, monkeypatch):
    """The function blocks the event loop, which no timeout of asyncio notices."""
    monkeypatch.setattr(reward_scorer, "_BLOCKED_EXTRA_SECONDS", 0.5)
    calls = []

    async def judge(completions, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            time.sleep(60)
        return varied_reward(completions)

    with pytest.raises(TimeoutError, match=r"`reward_timeout`"):
        trainer_in(tmp_path, small_model, reward_funcs=judge, settings={"reward_timeout": 0.5}).train()
    assert RunFolder(tmp_path).newest()[1].step == 1


def python(code, **environment):
    command, full_environment = [sys.executable, "-c", code], {**os.environ, **environment}
    return subprocess.run(command, env=full_environment, capture_output=True, text=True, timeout=60, cwd=ROOT)


def test_code_that_cannot_be_interrupted_ends_the_process():
    """With code 124, the reason and a traceback of all threads."""
    code = (
        "import signal, time\nfrom marft_trl.system import watchdog\n"
        "watchdog.GRACE = 0.5\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGRTMAX, signal.SIGALRM])\n"
        "watchdog.ON_EXIT.append(lambda message: print('last words:', message, flush=True))\n"
        "with watchdog.time_limit(0.3, lambda where: f'{where} hangs.'):\n"
        "    time.sleep(60)\n"
    )
    run = python(code)
    assert run.returncode == 124, run.stderr
    assert "could not be interrupted, so the process exits" in run.stderr and "most recent call first" in run.stderr
    assert "last words:" in run.stdout


def test_a_pattern_that_takes_for_ever_is_interrupted():
    """
    The pattern never releases the interpreter, so no other thread could interrupt it. Neither an alarm of user code
    nor an outer limit interferes.
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
    run = python(code)
    assert run.stdout.count("hangs True") == 2, (run.stdout, run.stderr[-2000:])
    assert run.returncode == 0 and "comes after" in run.stdout


@pytest.mark.parametrize("nested", [False, True])
def test_a_time_limit_does_not_count_the_time_of_a_nested_limit(nested):
    """Each limit interrupts its own code with its own message, and no signal arrives later."""
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
    assert "All reward functions returned None for 1 of 4 episodes" in caplog.text


def test_too_many_failures_end_the_run(small_model, tmp_path):
    workflow, settings = Fragile(lambda episode, _: episode.index < 3), {"on_episode_error": "skip"}
    with pytest.raises(RuntimeError, match=r"`episodes/skipped`: 3 of 4 .*`max_skipped_share=0.5`.*ZeroDivisionError"):
        trainer_in(tmp_path, small_model, workflow=workflow, settings=settings).train()


def test_an_episode_that_fails_once_is_tried_again(small_model, tmp_path):
    """The episode runs again alone, so it is the first of the new batch."""
    failed_rows, settings = [], {"on_episode_error": "retry", "max_steps": 1}
    workflow = Fragile(lambda episode, _: episode.index == 2 and not failed_rows.append(episode.row))
    trainer = trainer_in(tmp_path, small_model, workflow=workflow, settings=settings)
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["episodes/retried"] == 0.25 and log["frac_unscored"] == 0.0 and len(failed_rows) == 1
    stubborn = Fragile(lambda episode, _: episode.row == failed_rows[0])
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
    calls, failures = [], [boom, lambda: ("x", 1.0, "False"), lambda: sys.exit(1)]

    def step():
        calls.append(1)
        return failures.pop()() if failures else ("x", float(len(calls)), True)

    settings = {"on_episode_error": "skip", "max_steps": 1, "per_device_train_batch_size": 8}
    workflow = EnvironmentLoop(lambda: World(step))
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
    message = r"`Blocking` blocks the event loop: run \(test_failures.py:\d+\) has.*episode.call"
    with pytest.raises(EpisodeError, match=message):
        play(Blocking(), workflow_timeout=0.3)


def test_a_turn_that_is_not_awaited_is_an_error():
    class Forgetful(Workflow):
        async def run(self, episode):
            episode.turn("a")
            await episode.turn("a")

    for workflow in (Forgetful(), Leaves(lambda episode: episode.turn("a"))):  # also a turn that is active at the end
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


def test_a_turn_of_a_task_that_the_workflow_did_not_await_is_an_error():
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
def test_a_branch_that_the_workflow_canceled_is_no_error(branch):
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
    def is_full(request):
        return request.episode.index == 0 and request.agent == "a" and len(request.episode.turns) > 1

    def answer(requests):
        return [EndOfEpisode("full") if is_full(request) else echo()([request])[0] for request in requests]

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
def test_a_workflow_that_ends_the_trainers_loop_gets_an_error(task, did):
    class Ends(Workflow):
        async def run(self, episode):
            await task(episode)

    with pytest.raises(RuntimeError, match=f"has {did}"):
        play(Ends())
    assert len(play(Leaves(asyncio.sleep))) == 1  # and the next batch runs


KINDS = [StopIteration, StopAsyncIteration, GeneratorExit, MemoryError, asyncio.CancelledError, OSError]
KINDS += [concurrent.futures.CancelledError]  # of the reward's own thread pool


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_errors_of_a_reward_name_the_function(is_async, kind):
    def fails(completions, **kwargs):
        raise kind

    async def fails_later(completions, **kwargs):
        raise kind

    if is_async and kind is GeneratorExit:
        pytest.skip("ends a coroutine that is closed")
    reward = wrap_reward_function(fails_later if is_async else fails)
    with pytest.raises(Exception) as caught:
        asyncio.run(reward(prompts=["q"], completions=["a"]))
    message = str(describe_error(caught.value))
    assert re.search("(The reward function `fails(_later)?` raised|by the reward function `fails(_later)?`)", message)


def test_a_reward_that_cancels_the_trainers_tasks_gets_an_error(small_model, tmp_path):
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
    """The state is one counter."""

    def state_dict(self):
        return {self.counts: getattr(self, self.counts)}

    def load_state_dict(self, state):
        setattr(self, self.counts, state[self.counts])


class Curriculum(Stateful, Scores):
    """Scores depend on the number of calls."""

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
    """After a stop, and after a failure in the middle of a step that has already changed the state."""
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
    resumed = trainer_in(tmp_path / "cut", small_model, settings=settings, **OBJECTS[kind]())
    resumed.train(resume_from_checkpoint=True)
    assert began_at(resumed) == 2
    assert differences(tmp_path / "whole" / "checkpoint-5", tmp_path / "cut" / "checkpoint-5") == []


def test_state_that_cannot_be_saved_raises_before_the_first_generation(small_model, tmp_path):
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
    curriculum = Curriculum()
    user_state = UserState({"reward_funcs[0]": curriculum, "workflow": object(), "reward_funcs[1]": Curriculum})
    assert user_state.state_dict() == {"reward_funcs[0]": {"calls": 0}}
    with pytest.raises(ValueError, match=r"no state of reward_funcs\[0\]"):
        user_state.load_state_dict({})
    with pytest.raises(ValueError, match=r"of reward_funcs\[0\] failed .*KeyError"):
        user_state.load_state_dict({"reward_funcs[0]": {}})
    with pytest.raises(ValueError, match="has the state of judge, but no object of this run loads it"):
        user_state.load_state_dict({"reward_funcs[0]": {"calls": 1}, "judge": {}})


@pytest.fixture
def heard():
    """Signals are not ignored, as they are in the background and under `nohup`."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)}
    for number in before:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


SLOW_SIGNALS = [("SIGHUP", 129, "reward"), ("SIGINT", 130, "reward")]
SLOW_SIGNALS += [("SIGTERM", 143, "reward"), ("SIGINT", 130, "optimizer")]


@pytest.mark.parametrize(
    ("name", "code", "moment"),
    [("SIGTERM", 143, "optimizer"), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_SIGNALS)],
)
def test_a_signal_saves_the_finished_step_and_sets_the_exit_code(heard, small_model, tmp_path, name, code, moment):
    number = getattr(signal, name)
    end = functools.partial(kill, number)
    before = signal.getsignal(number)
    whole = trainer_in(tmp_path / "whole", small_model)
    whole.train()
    reward, callbacks = (Scores(2, end), []) if moment == "reward" else (Scores(), [Do(1, on_optimizer_step=end)])
    cut = trainer_in(tmp_path / "cut", small_model, callbacks, reward_funcs=reward)
    # The message says how to resume: this script did not set `resume_from_checkpoint`, so it would start at step 1
    message = rf"by {name} after step 2. It is saved in .*checkpoint-2. Call `train\(resume_from_checkpoint=True\)`"
    with pytest.raises(RunInterrupted, match=message) as raised:
        cut.train()
    assert raised.value.code == code and raised.value.signal == number and signal.getsignal(number) == before
    resumed = trainer_in(tmp_path / "cut", small_model)
    resumed.train(resume_from_checkpoint=True)
    assert began_at(resumed) == 2 and not moved(weights(whole), weights(resumed))


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
    with_retries = config(tmp_path, reward_timeout=10, workflow_timeout=5, tool_timeout=5, on_episode_error="retry")
    with pytest.raises(ValueError, match=r"`reward_timeout` \(10 s times 3 tries\)"):
        check_timeouts(with_retries, 20)


@pytest.mark.slow
def test_the_timeout_of_processes_holds_on_the_cpu_too():
    """`timeout_also_on_cpu`, `timeout_of_processes`: a real process group with one process, from a config."""
    code = (
        "from marft_trl import MARFTConfig\nfrom marft_trl.seams.runs import timeout_of_processes\n"
        "MARFTConfig('out', use_cpu=True, ddp_timeout=77)\nprint(timeout_of_processes())"
    )
    variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    run = python(code, **variables, HF_HUB_OFFLINE="1")
    assert run.stdout.strip() == "77.0", run.stderr[-2000:]
    with timeout_also_on_cpu(None):
        pass


@pytest.mark.parametrize(("seconds", "launcher", "warns"), [(42, True, True), (5, True, False), (42, False, False)])
def test_sigterm_warns_if_a_launcher_waits_for_less_than_a_step(monkeypatch, capfd, seconds, launcher, warns):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if launcher:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    signals = Signals(saves=True)
    signals.step_seconds = seconds
    with signals.watched():
        kill()
    stderr = capfd.readouterr().err
    assert "SIGTERM: finishing the step, then saving" in stderr and signals.received == signal.SIGTERM
    assert ("`--shutdown-timeout 120`" in stderr) == warns


def test_metrics_of_a_function_are_logged_once_though_each_completion_is_tried_alone():
    logged = []

    def judge(completions, log_metric, log_extra, **kwargs):
        log_metric("count", float(len(completions)))
        log_extra("text", list(completions))
        return [boom() if text == "c" else 1.0 for text in completions]

    wrapped = wrap_reward_function(judge, None, Failures("skip"))
    columns = {"prompts": ["q"] * 4, "completions": list("abcd")}
    logs = {name: lambda key, value: logged.append((key, value)) for name in ("log_metric", "log_extra")}
    assert wrapped(**columns, **logs) == [1.0, 1.0, None, 1.0]
    assert logged == [("count", 4.0), ("text", list("abcd"))]
