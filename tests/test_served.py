"""Teams that train on turns of a fake server: failures, checkpoints, and rollouts concurrent with training."""

import math
import random
import threading
import time
from types import SimpleNamespace

from marft_trl import AgentSpec, Workflow
from marft_trl.extras.engines.server import EngineDownError
from marft_trl.rollout.runner import SeedKeys
from marft_trl.tiny import tiny_dataset

import pytest
from transformers import TrainerCallback

from .families import family_base
from .helpers import StopAt, began_at, logged_steps, moved, team_trainer, weights
from .vllm_server import as_text, fake_servers, turn


@pytest.fixture
def server(tokenizer):
    with fake_servers() as (fake,):
        # Like an untrained model: all tokens are about equally likely, more so at a high temperature
        flat = -math.log(len(tokenizer))
        fake.logps = lambda adapter, ids, temperature: {5: flat if temperature > 1 else flat + 0.5}
        fake.fault = lambda body: as_text(turn({**body, "model": ""}))  # the names of adapters differ between runs
        yield fake


def served(model, folder, server, *, settings=None, **arguments):
    defaults = {"use_vllm": True, "vllm_server_base_url": server.url, "vllm_server_timeout": 2.0}
    # The tokens of the fake server do not come from the model
    defaults |= {"fidelity_tolerance": 1e9, "vllm_importance_sampling_mode": "token_truncate"}
    defaults |= {"max_steps": 4, "save_strategy": "steps", "save_steps": 50}
    return team_trainer(model, folder, settings={**defaults, **(settings or {})}, **arguments)


class Drawing(Workflow):
    """Two turns, and a reward that is drawn between them."""

    earns = True

    def __init__(self, log):
        self._log = log

    async def run(self, episode):
        await episode.turn("reasoner")
        drawn = random.random()
        self._log.append(drawn)
        turn = await episode.turn("actor")
        episode.earn(turn, drawn)


@pytest.mark.slow
def test_a_server_that_stays_away_ends_the_run_after_a_checkpoint_of_the_last_step(model_folder, tmp_path, server):
    """The run resumed from that checkpoint equals a run whose server stayed up."""
    whole = served(model_folder, tmp_path / "whole", server)
    whole.train()

    class Dies(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                server.stop()

    cut = served(model_folder, tmp_path / "cut", server, callbacks=[Dies()])
    try:
        with pytest.raises(EngineDownError, match=f"{server.url} has not answered for 2 seconds") as error:
            cut.train()
    finally:
        server.start()
    assert any("checkpoint-2" in note for note in error.value.__notes__)
    again = served(model_folder, tmp_path / "cut", server)
    again.train(resume_from_checkpoint=True)
    assert began_at(again) == 2 and not moved(weights(whole), weights(again))


@pytest.mark.parametrize("staleness", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_checkpoints_change_nothing_while_rollouts_go_on(model_folder, tmp_path, server, staleness):
    """Checkpoints save and restore the random states of users' code while the next batch draws from its own states."""
    server.delay = lambda body: 0.003 * (body["seed"] % 7)

    def train(name, **settings):
        log = []
        run_settings = {"max_staleness": staleness, "max_steps": 3, **settings}
        trainer = served(model_folder, tmp_path / name, server, settings=run_settings, workflow=Drawing(log))
        trainer.train()
        return weights(trainer), log

    plain, drawn = train("plain")
    saved, drawn_too = train("saved", save_steps=1)
    assert set(drawn) <= set(drawn_too) and len(set(drawn)) > 24  # a checkpoint rehearses the workflow
    assert not moved(plain, saved)


def test_a_run_that_ends_early_leaves_no_thread_and_no_adapter(model_folder, tmp_path, server):
    server.delay = lambda body: 0.02
    trainer = served(model_folder, tmp_path, server, settings={"max_staleness": 2}, callbacks=[StopAt(1)])
    trainer.train()
    assert not [thread for thread in threading.enumerate() if thread.name == "marft-rollouts"]
    assert not server.loaded


class Failing(Workflow):
    """Two turns; some episodes fail."""

    def __init__(self, fails):
        self._fails = fails

    async def run(self, episode):
        await episode.turn("reasoner")
        if self._fails(episode):
            raise KeyError("lost")
        await episode.turn("actor")


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_retried_episode_is_not_a_copy_of_another(model_folder, tmp_path, server, staleness):
    fail_once = [2]  # index of an episode
    workflow = Failing(lambda episode: episode.index in fail_once and bool(fail_once.pop()))
    settings = {"max_staleness": staleness, "on_episode_error": "retry", "max_steps": 2}
    served(model_folder, tmp_path, server, settings=settings, workflow=workflow).train()
    assert not fail_once
    requests = [(tuple(body["prompt"]), body["seed"]) for body in server.requests]
    assert len(set(requests)) == len(requests)


@pytest.mark.slow
def test_skipped_episodes_count_for_their_own_batch(model_folder, tmp_path, server):
    settings = {"max_staleness": 3, "on_episode_error": "skip", "max_skipped_share": 0.3}
    workflow = Failing(lambda episode: episode.index % 4 == 3)
    trainer = served(model_folder, tmp_path, server, settings=settings, workflow=workflow)
    trainer.train()
    assert [log["episodes/skipped"] for log in logged_steps(trainer)] == [0.25] * 4


@pytest.mark.slow
def test_an_evaluation_between_two_updates_makes_no_turn_staler(model_folder, tmp_path, server):
    settings = {"max_staleness": 1, "num_iterations": 2, "max_steps": 6, "eval_strategy": "steps", "eval_steps": 1}
    team = {"eval_dataset": tiny_dataset(4, seed=1)}
    trainer = served(model_folder, tmp_path, server, settings={**settings, "num_generations_eval": 1}, **team)
    trainer.train()
    logs = [log["sampling/staleness"] for log in trainer.state.log_history if "sampling/staleness" in log]
    assert logs == [0.0, 1.0, 1.0]


def test_an_agent_with_truncated_sampling_cannot_be_stale(model_folder, tmp_path, server):
    agents = [AgentSpec("reasoner"), AgentSpec("actor", top_p=0.5)]
    with pytest.raises(ValueError, match="`max_staleness=1` .* is unknown for 'actor'"):
        served(model_folder, tmp_path, server, settings={"max_staleness": 1}, agents=agents)


def test_an_agent_may_be_called_base(model_folder, tmp_path, server):
    agents = [AgentSpec("base"), AgentSpec("reasoner")]
    settings = {"credit": "counterfactual", "max_steps": 1}
    trainer = served(model_folder, tmp_path, server, settings=settings, agents=agents)
    library = trainer.parts.runner.generator.library
    current = library.publish()
    assert {"base", "reasoner"} < set(current) and len(current) == 3
    library.close()


def test_reruns_are_the_same_for_any_number_of_processes(model_folder, tmp_path, server):
    """Re-runs are numbered over all processes, so no two of them draw the same turn."""
    settings = {"credit": "counterfactual", "counterfactual_samples": 2}
    trainer = served(model_folder, tmp_path, server, settings=settings)
    rollouts = trainer.parts.rollouts
    episodes = rollouts.run(tiny_dataset(3).to_list(), training=True).episodes
    alternatives, runner = rollouts._alternatives, trainer.parts.runner

    def rerun_seeds(batch, count, index):
        """Seeds of the requests for re-runs of `batch`, as process `index` of processes with `count` re-runs each."""
        number = len(server.requests)
        alternatives._processes = SimpleNamespace(gather=lambda counts: count or counts, index=index)
        alternatives._runner = runner.changed(keys=SeedKeys("seeded", 0))
        rewards = alternatives.counterfactual_rewards(batch)
        assert alternatives._runner.keys.state_dict() == {"runs": 2}  # also if a process has no re-run
        assert [tuple(reward.shape) for reward in rewards] == [(2, 2)] * len(batch)
        return sorted(body["seed"] for body in server.requests[number:])

    single = rerun_seeds(episodes, None, 0)
    assert len(single) == len(set(single)) == 2 * 3 * (2 + 1)  # a new first turn brings a new second
    split = rerun_seeds(episodes[:1], [2, 4], 0) + rerun_seeds(episodes[1:], [2, 4], 1)
    assert sorted(split) == single
    assert rerun_seeds([], [0, 6], 0) == []


class Slow(Workflow):
    """A function of the user holds the random states of its episode for a while."""

    async def run(self, episode):
        await episode.turn("reasoner")
        await episode.call(self.think)
        await episode.turn("actor")

    def think(self):
        time.sleep(0.03)
        return random.random()


@pytest.mark.slow
def test_random_draws_in_rewards_do_not_depend_on_concurrent_rollouts(model_folder, tmp_path, server):
    def train(name, delay):
        server.delay = lambda body: delay * (body["seed"] % 7)
        draws = []

        def reward(completions, **columns):
            draws.append([random.random() for _ in completions])
            return draws[-1]

        team = {"workflow": Slow(), "reward_funcs": reward, "settings": {"max_staleness": 1, "max_steps": 3}}
        trainer = served(model_folder, tmp_path / name, server, **team)
        trainer.train()
        return draws, weights(trainer)

    (fast_draws, fast_weights), (slow_draws, slow_weights) = train("a", 0.0), train("b", 0.01)
    assert fast_draws == slow_draws and not moved(fast_weights, slow_weights)


def test_loras_on_experts_are_refused_with_the_setting_that_names_them(tokenizer, tmp_path):
    base, settings = family_base("qwen3_moe", len(tokenizer)), {"use_vllm": True}
    with pytest.raises(ValueError, match=r"`target_parameters=.* Target only attention layers in `target_modules`"):
        team_trainer(base, tmp_path, processing_class=tokenizer, settings=settings)
