"""Evaluations that fall from their best: one warning, or back to the best adapters."""

import json

from marft_trl.seams.trl import TrlState
from marft_trl.tiny import tiny_agents, tiny_dataset

import numpy as np
import pytest
from datasets import Dataset
from transformers import TrainerCallback

from .helpers import StopAt, config, moved, team_trainer, weights


EVALUATED = {"eval_strategy": "steps", "eval_steps": 1, "num_generations_eval": 1}
RESTORED = {"on_collapse": "restore", **EVALUATED}


class Evaluations(TrainerCallback):
    """Evaluates with predefined rewards instead of sampled ones, and keeps the weights of each step."""

    def __init__(self, rewards):
        self.rewards, self.weights, self.trainer = rewards, {}, None

    def on_step_end(self, args, state, control, **kwargs):
        self.weights[state.global_step] = weights(self.trainer)
        if state.global_step in self.rewards:
            metrics = {"eval_reward": self.rewards[state.global_step]}
            self.trainer.callback_handler.on_evaluate(args, state, control, metrics)


def make(model, folder, rewards=None, callbacks=(), agents=None, **settings):
    callback = Evaluations(rewards or {})
    # The evaluations of the trainer itself come after training
    settings = {"max_steps": 4, "on_collapse": "restore", **EVALUATED, "eval_steps": 1000, **settings}
    arguments = {
        "agents": agents or tiny_agents(),
        "eval_dataset": tiny_dataset(8),
        "callbacks": [callback, *callbacks],
    }
    callback.trainer = team_trainer(model, folder, settings=settings, **arguments)
    return callback.trainer, callback


def collapse_warnings(caplog):
    return [text for text in caplog.messages if "THE TEAM HAS COLLAPSED" in text]


def test_all_adapters_and_moments_go_back_to_the_best_evaluation(model_folder, tmp_path, caplog, monkeypatch):
    """Before the next episodes are sampled, so that nothing is trained on episodes of other weights."""
    sampled = {}
    trainer, callback = make(model_folder, tmp_path, {1: 0.5, 2: 0.7, 3: 0.2})
    run = trainer.parts.rollouts.run

    def noting(rows, training, **kwargs):
        steps = {float(state["step"]) for state in trainer.optimizer.state.values()}
        sampled[trainer.state.global_step] = weights(trainer), steps
        return run(rows, training, **kwargs)

    monkeypatch.setattr(trainer.parts.rollouts, "run", noting)
    trainer.train()
    (message,) = collapse_warnings(caplog)
    assert "`eval_reward` is 0.2, but the best was 0.7" in message and "RESTORED to step 2" in message
    assert moved(callback.weights[2], callback.weights[3])
    assert not moved(callback.weights[2], sampled[3][0]) and sampled[2][1] == sampled[3][1] == {2.0}
    assert [log["collapse/restored"] for log in trainer.state.log_history if "collapse/restored" in log] == [1.0]


@pytest.mark.parametrize(("max_steps", "callbacks"), [(3, []), (8, [StopAt(3)])], ids=["last step", "callback"])
def test_a_fall_in_the_last_evaluation_ends_the_run_with_the_best(
    model_folder, tmp_path, caplog, max_steps, callbacks
):
    """Also if a callback ends the run, for example at a token budget: no evaluation and no episodes follow."""
    trainer, callback = make(model_folder, tmp_path, {1: 0.5, 2: 0.7, 3: 0.2}, callbacks, max_steps=max_steps)
    trainer.train()
    assert trainer.state.global_step == 3 and moved(callback.weights[2], callback.weights[3])
    assert len(collapse_warnings(caplog)) == 1 and not moved(callback.weights[2], weights(trainer))


def test_warnings_are_logged_once_and_change_no_weights(model_folder, tmp_path, caplog):
    trainer, callback = make(model_folder, tmp_path, {1: 0.7, 2: 0.2, 3: 0.1}, on_collapse="warn")
    trainer.train()
    assert len(collapse_warnings(caplog)) == 1
    assert not moved(callback.weights[4], weights(trainer)) and moved(callback.weights[1], weights(trainer))


@pytest.mark.slow
def test_a_resumed_run_restores_the_same(model_folder, tmp_path):
    """The checkpoint of the step at which the reward drops holds the adapters to restore."""
    rewards, settings = {1: 0.7, 3: 0.2}, {"save_strategy": "steps", "save_steps": 3}
    whole, _ = make(model_folder, tmp_path / "whole", rewards, **settings)
    whole.train()
    cut, _ = make(model_folder, tmp_path / "cut", rewards, [StopAt(3)], **settings)
    cut.train()
    resumed, _ = make(model_folder, tmp_path / "cut", **settings)
    resumed.train(resume_from_checkpoint=True)
    assert not moved(weights(whole), weights(resumed))
    state = resumed.parts.collapse.state_dict()
    assert state == json.loads(json.dumps(state)) | {"best_evaluation": state["best_evaluation"]}
    assert any("collapse/restored" in log for log in resumed.state.log_history)


@pytest.mark.parametrize(
    ("rewards", "error", "count"),
    [
        ([1.0, 0.89], 0.0, 1),  # a tenth of the best
        ([1.0, 0.91], 0.0, 0),
        ([-1.0, -1.11], 0.0, 1),
        ([-1.0, -1.09], 0.0, 0),
        ([1.0, 0.28], 0.1, 1),  # five standard errors of the difference: 5 * sqrt(2) * 0.1 = 0.707
        ([1.0, 0.30], 0.1, 0),
        # 64 episodes in each evaluation: 40 of a team that does not change, and a team that drops to a tenth
        ([*np.random.default_rng(0).binomial(64, 0.5, 40) / 64], 0.0625, 0),
        ([0.5, 0.52, 0.05], 0.0625, 1),
    ],
    ids=range(8),
)
def test_a_drop_counts_from_a_tenth_and_five_standard_errors(model_folder, tmp_path, caplog, rewards, error, count):
    trainer, _ = make(model_folder, tmp_path, on_collapse="warn")
    watch, state = trainer.parts.collapse, trainer.state
    state.max_steps, trainer.parts.reporter.evaluation_error = 100, error
    watch.on_train_begin(None, state, None)
    watch.on_evaluate(trainer.args, state, None, {"eval_reward": 5.0})  # of the untrained team, before step 1
    for state.global_step, reward in enumerate(rewards, start=1):
        watch.on_evaluate(trainer.args, state, None, {"eval_reward": reward})
    assert len(collapse_warnings(caplog)) == count


def test_nothing_compares_evaluations_with_on_collapse_ignore(model_folder, tmp_path):
    trainer, _ = make(model_folder, tmp_path, on_collapse="ignore")
    assert trainer.parts.collapse is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"on_collapse": "undo"}, "`on_collapse` must be one of 'warn', 'restore', 'ignore'"),
        ({"on_collapse": "restore"}, "restores the adapters of the best evaluation, but this run has none"),
        ({**RESTORED, "sync_ref_model": True, "beta": 0.1}, "but not the references that follow them"),
        ({**RESTORED, "use_vllm": True, "max_staleness": 1}, "that `on_collapse='restore'` may discard"),
    ],
    ids=str,
)
def test_invalid_settings_of_on_collapse(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **settings)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"peft_config": None}, "`on_collapse='restore'` needs a frozen base"),
        (
            {"eval_dataset": {"easy": tiny_dataset(4), "hard": tiny_dataset(4)}},
            "`eval_reward`, which is not logged with several evaluation sets",
        ),
    ],
)
def test_restoring_needs_adapters_and_a_single_evaluation_set(model_folder, tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        team_trainer(model_folder, tmp_path, settings=RESTORED, **arguments)


def test_different_evaluation_sets_are_not_compared(model_folder, tmp_path, caplog):
    """Two sets of different difficulty, and a third set that a callback evaluates."""

    def by_row(completions, value, **kwargs):
        return [number + 0.001 * len({*str(text)}) for text, number in zip(completions, value, strict=True)]

    def rows(value):
        return Dataset.from_list([{"prompt": f"row {number}", "value": value} for number in range(4)])

    class Elsewhere(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            trainer.evaluate(rows(0.9) if state.global_step % 2 else rows(0.1))
            trainer.evaluate(sampling={"temperature": 0.0})

    team = {"train_dataset": rows(0.5), "eval_dataset": {"easy": rows(0.9), "hard": rows(0.1)}}
    team |= {"reward_funcs": by_row, "callbacks": [Elsewhere()], "settings": {**EVALUATED, "num_generations_eval": 2}}
    trainer = team_trainer(model_folder, tmp_path, **team)
    trainer.train()
    assert not collapse_warnings(caplog)
    assert trainer.parts.collapse.state_dict()["best_evaluation"] is None
    sets = [log for log in trainer.state.log_history if "eval_hard_reward" in log]
    assert len(sets) >= 2 and not any("eval_reward" in log or "eval_loss" in log for log in sets)


def test_a_step_from_before_adapters_went_back_is_not_saved(model_folder, tmp_path, monkeypatch):
    """The recorded step belongs to other weights."""
    trainer, _ = make(model_folder, tmp_path, max_steps=2, save_strategy="steps", save_steps=100)
    checkpoints, saved = trainer.parts.checkpoints, []
    monkeypatch.setattr(TrlState, "capture_log_window", lambda self: None)  # exists only during training
    checkpoints.folder.start()
    checkpoints.best.capture()
    checkpoints.record_step()
    checkpoints.best.restore(trainer.policies.trained[0])
    assert not checkpoints.save_recorded_step(lambda: saved.append(True)) and not saved
    checkpoints.record_step()
    assert checkpoints.save_recorded_step(lambda: saved.append(True)) and saved


def test_gradients_of_collapsed_policies_are_not_applied_to_restored_ones(model_folder, tmp_path):
    """If a generation batch begins within an optimizer step, the adapters are restored after the step."""
    trainer, _ = make(model_folder, tmp_path)
    watch, best = trainer.parts.collapse, trainer.parts.checkpoints.best
    best.capture()
    watch.load_state_dict(watch.state_dict() | {"found": "it fell"})
    for parameter in trainer.policies.all_parameters():
        parameter.grad = parameter.detach().clone()
    watch.undo()
    assert not best.num_restored
    trainer.model.zero_grad()
    watch.undo()
    watch.undo()
    assert best.num_restored == len(trainer.policies.trained)
