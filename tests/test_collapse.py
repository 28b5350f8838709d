"""Evaluations that fall from their best: one warning, or back to the best adapters."""

import json
import logging

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
    """Evaluates with given rewards in place of sampled ones, and keeps the weights of each step."""

    def __init__(self, rewards):
        self.rewards, self.weights, self.trainer = rewards, {}, None

    def on_step_end(self, args, state, control, **kwargs):
        self.weights[state.global_step] = weights(self.trainer)
        if state.global_step in self.rewards:
            metrics = {"eval_reward": self.rewards[state.global_step]}
            self.trainer.callback_handler.on_evaluate(args, state, control, metrics)


def make(model, folder, rewards=None, callbacks=(), agents=None, **settings):
    given = Evaluations(rewards or {})
    # The evaluations of the trainer itself come after training
    settings = {"max_steps": 4, "on_collapse": "restore", **EVALUATED, "eval_steps": 1000, **settings}
    arguments = {"agents": agents or tiny_agents(), "eval_dataset": tiny_dataset(8), "callbacks": [given, *callbacks]}
    given.trainer = team_trainer(model, folder, settings=settings, **arguments)
    return given.trainer, given


def collapse_warnings(caplog):
    return [text for text in caplog.messages if "THE TEAM HAS COLLAPSED" in text]


def test_all_adapters_and_moments_go_back_to_the_best_evaluation(model_folder, tmp_path, caplog, monkeypatch):
    """Before the next episodes are sampled, so that nothing is trained on episodes of other weights."""
    sampled = {}
    trainer, given = make(model_folder, tmp_path, {1: 0.5, 2: 0.7, 3: 0.2})
    run = trainer.parts.rollouts.run

    def noting(rows, training, **kwargs):
        steps = {float(state["step"]) for state in trainer.optimizer.state.values()}
        sampled[trainer.state.global_step] = weights(trainer), steps
        return run(rows, training, **kwargs)

    monkeypatch.setattr(trainer.parts.rollouts, "run", noting)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    (message,) = collapse_warnings(caplog)
    assert "`eval_reward` is 0.2, but the best was 0.7" in message and "RESTORED to step 2" in message
    assert moved(given.weights[2], given.weights[3])
    assert not moved(given.weights[2], sampled[3][0]) and sampled[2][1] == sampled[3][1] == {2.0}
    assert [entry["collapse/restored"] for entry in trainer.state.log_history if "collapse/restored" in entry] == [1.0]


@pytest.mark.parametrize(("max_steps", "callbacks"), [(3, []), (8, [StopAt(3)])], ids=["last step", "callback"])
def test_a_fall_in_the_last_evaluation_ends_the_run_with_the_best(
    model_folder, tmp_path, caplog, max_steps, callbacks
):
    """Also where a callback ends the run, of a budget of tokens for example: no evaluation and no episodes follow."""
    trainer, given = make(model_folder, tmp_path, {1: 0.5, 2: 0.7, 3: 0.2}, callbacks, max_steps=max_steps)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert trainer.state.global_step == 3 and moved(given.weights[2], given.weights[3])
    assert len(collapse_warnings(caplog)) == 1 and not moved(given.weights[2], weights(trainer))


def test_one_warning_and_weights_as_without(model_folder, tmp_path, caplog):
    trainer, given = make(model_folder, tmp_path, {1: 0.7, 2: 0.2, 3: 0.1}, on_collapse="warn")
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert len(collapse_warnings(caplog)) == 1
    assert not moved(given.weights[4], weights(trainer)) and moved(given.weights[1], weights(trainer))


def test_a_resumed_run_restores_the_same(model_folder, tmp_path):
    """The checkpoint is of the step of the fall: what is restored next is in it."""
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
    assert any("collapse/restored" in entry for entry in resumed.state.log_history)


@pytest.mark.parametrize(
    ("rewards", "error", "count"),
    [
        ([1.0, 0.89], 0.0, 1),  # a tenth of the best
        ([1.0, 0.91], 0.0, 0),
        ([-1.0, -1.11], 0.0, 1),
        ([-1.0, -1.09], 0.0, 0),
        ([1.0, 0.28], 0.1, 1),  # five standard errors of the difference: 5 * sqrt(2) * 0.1 = 0.707
        ([1.0, 0.30], 0.1, 0),
    ],
)
def test_a_drop_counts_from_a_tenth_and_five_standard_errors(model_folder, tmp_path, caplog, rewards, error, count):
    trainer, _ = make(model_folder, tmp_path, on_collapse="warn")
    watch, state = trainer.parts.collapse, trainer.state
    state.max_steps, trainer.parts.reporter.evaluation_error = 100, error
    watch.on_train_begin(None, state, None)
    with caplog.at_level(logging.WARNING):
        watch.on_evaluate(trainer.args, state, None, {"eval_reward": 5.0})  # of the untrained team, before step 1
        for state.global_step, reward in enumerate(rewards, start=1):
            watch.on_evaluate(trainer.args, state, None, {"eval_reward": reward})
    assert len(collapse_warnings(caplog)) == count


def test_luck_is_no_collapse(model_folder, tmp_path, caplog):
    """Evaluations of 64 episodes of a team that does not change, and of one that drops to a tenth."""
    draws = np.random.default_rng(0)
    for values, count in ((draws.binomial(64, 0.5, 40) / 64, 0), ([0.5, 0.52, 0.05], 1)):
        trainer, _ = make(model_folder, tmp_path / str(count), on_collapse="warn")
        watch, state = trainer.parts.collapse, trainer.state
        state.global_step, state.max_steps = 1, 100
        trainer.parts.reporter.evaluation_error = 0.0625
        watch.on_train_begin(None, state, None)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            for value in values:
                watch.on_evaluate(trainer.args, state, None, {"eval_reward": value})
        assert len(collapse_warnings(caplog)) == count
    trainer, _ = make(model_folder, tmp_path / "ignored", on_collapse="ignore")
    assert trainer.parts.collapse is None  # nothing compares evaluations


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
def test_what_does_not_go(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **settings)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"peft_config": None}, "`on_collapse='restore'` needs a frozen base"),
        (
            {"eval_dataset": {"easy": tiny_dataset(4), "hard": tiny_dataset(4)}},
            "`eval_reward`, which is not logged with several evaluation sets",
        ),
    ],
)
def test_what_cannot_be_restored_or_compared(model_folder, tmp_path, given, message):
    with pytest.raises(ValueError, match=message):
        team_trainer(model_folder, tmp_path, settings=RESTORED, **given)


def test_evaluation_sets_are_no_series(model_folder, tmp_path, caplog):
    """Of two sets, one of which is harder, and of another one that a callback evaluates."""

    def by_row(completions, value, **kwargs):
        return [number + 0.001 * len({*str(text)}) for text, number in zip(completions, value, strict=True)]

    def rows(value):
        return Dataset.from_list([{"prompt": f"row {number}", "value": value} for number in range(4)])

    class Elsewhere(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            trainer.evaluate(rows(0.9) if state.global_step % 2 else rows(0.1))
            trainer.evaluate(sampling={"temperature": 0.0})

    given = {"train_dataset": rows(0.5), "eval_dataset": {"easy": rows(0.9), "hard": rows(0.1)}}
    given |= {"reward_funcs": by_row, "callbacks": [Elsewhere()], "settings": {**EVALUATED, "num_generations_eval": 2}}
    with caplog.at_level(logging.WARNING):
        trainer = team_trainer(model_folder, tmp_path, **given)
        trainer.train()
    assert not collapse_warnings(caplog)
    assert trainer.parts.collapse.state_dict()["best_evaluation"] is None
    sets = [entry for entry in trainer.state.log_history if "eval_hard_reward" in entry]
    assert len(sets) >= 2 and not any("eval_reward" in entry or "eval_loss" in entry for entry in sets)


def test_a_step_from_before_adapters_went_back_is_not_saved(model_folder, tmp_path, monkeypatch):
    """What was remembered of the step belongs to other weights."""
    trainer, _ = make(model_folder, tmp_path, max_steps=2, save_strategy="steps", save_steps=100)
    checkpoints, saved = trainer.parts.checkpoints, []
    monkeypatch.setattr(TrlState, "capture_log_window", lambda self: None)  # there is one while training runs
    checkpoints.folder.start()
    checkpoints.best.capture()
    checkpoints.record_step()
    checkpoints.best.restore(trainer.policies.trained[0])
    assert not checkpoints.save_recorded_step(lambda: saved.append(True)) and not saved
    checkpoints.record_step()
    assert checkpoints.save_recorded_step(lambda: saved.append(True)) and saved


def test_gradients_of_collapsed_policies_are_not_applied_to_restored_ones(model_folder, tmp_path):
    """Where a generation batch begins within an optimizer step, the adapters go back after it."""
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
