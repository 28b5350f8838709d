"""A run that falls from its best: said, and undone for the agent that has fallen."""

import copy
import json
import logging
from types import SimpleNamespace

from marft_trl import AgentSpec
from marft_trl.config.team_setup import RunContext
from marft_trl.runs import collapse
from marft_trl.runs.collapse import Falls
from marft_trl.seams.trl import TrlState
from marft_trl.system.run_metrics import Metrics
from marft_trl.tiny import exact_answer, tiny_agents, tiny_dataset, tiny_team_model

import numpy as np
import pytest
import torch
from datasets import Dataset
from safetensors import safe_open
from transformers import TrainerCallback

from .helpers import StopAt, config, moved, team_trainer, weights


@pytest.fixture(autouse=True)
def _as_in_the_package(monkeypatch):
    """`make` sets other windows and drops: here they are put back."""
    monkeypatch.setattr(collapse, "WINDOW", collapse.WINDOW)
    monkeypatch.setattr(collapse, "DROP", collapse.DROP)


@pytest.fixture(scope="module")
def taught_model():
    return tiny_team_model()


class Spoil(TrainerCallback):
    """Destroys adapters after a step."""

    def __init__(self, step, *names):
        self.step, self.names, self.trainer, self.before = step, names, None, {}

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.before = weights(self.trainer)
            for name in self.names:
                for key, parameter in self.trainer.policies.parameters(name).items():
                    if "lora_B" in key:
                        parameter.data.normal_(std=1.0)


def make(
    model, folder, spoil=None, agents=None, callbacks=(), eval_dataset=None, reward_funcs=exact_answer, window=2,
    drop=0.4, **settings
):  # fmt: skip
    collapse.WINDOW, collapse.DROP = window, drop
    defaults = {"max_steps": 8, "learning_rate": 1e-5, "seed": 1}
    defaults |= {"per_device_train_batch_size": 64, "lr_scheduler_type": "constant", "on_collapse": "restore"}
    trainer = team_trainer(
        model, folder, agents=agents or tiny_agents(), reward_funcs=reward_funcs, settings=defaults | settings,
        train_dataset=tiny_dataset(256), eval_dataset=eval_dataset,
        callbacks=[*([spoil] if spoil else []), *callbacks],
    )  # fmt: skip
    if spoil is not None:
        spoil.trainer = trainer
    return trainer


def logged(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


@pytest.mark.parametrize("fallen", ["reasoner", pytest.param("actor", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_only_the_fallen_agent_is_restored(taught_model, tmp_path, caplog, fallen):
    spoil = Spoil(4, fallen)
    trainer = make(taught_model, tmp_path, spoil)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    rewards = logged(trainer, "reward")
    assert min(rewards[:4]) > 0.3 and max(rewards[5:]) > 0.3  # the batch of the restored team is the one trained on
    assert logged(trainer, "collapse/restored") == [1.0]
    other = "actor" if fallen == "reasoner" else "reasoner"
    (message,) = [text for text in caplog.messages if "RESTORED" in text]
    assert f"RESTORED to their best, with the state of their optimizer: {fallen!r} (agents {fallen!r})." in message
    ends = weights(trainer)
    for name, before in spoil.before.items():
        if "lora" in name:  # four more steps at 1e-5 from what it was, not from what it was spoiled to
            assert (ends[name] - before).abs().max() < 1e-3, name
    assert any(f".{other}." in name for name in moved(spoil.before, ends))


@pytest.mark.slow
def test_all_are_restored_where_one_alone_does_not_help(taught_model, tmp_path):
    spoil = Spoil(4, "reasoner", "actor")
    trainer = make(taught_model, tmp_path, spoil)
    trainer.train()
    assert logged(trainer, "collapse/restored") == [2.0] and max(logged(trainer, "reward")[5:]) > 0.3


@pytest.mark.slow
def test_the_optimizer_goes_back_too(taught_model, tmp_path):
    """What is restored is what was copied before the update of the best batch: weights and moments."""
    taken, restored, best = {}, {}, {}
    trainer = make(taught_model, tmp_path, spoil := Spoil(4, "actor"), learning_rate=1e-3)
    keeper = trainer.parts.checkpoints.best
    take, restore = keeper.take, keeper.restore

    def snapshot():
        return {
            name: [
                (p.detach().clone(), {k: v.clone() for k, v in trainer.optimizer.state.get(p, {}).items()})
                for p in its.values()
            ]
            for name in trainer.policies.trained
            for its in [trainer.policies.parameters(name)]
        }

    def taking():
        take()
        taken.clear()
        taken.update(snapshot())

    def restoring(adapter):
        other = {name: its for name, its in snapshot().items() if name != adapter}
        restore(adapter)
        if trainer.state.global_step == trainer.state.max_steps:  # the run ends with its best adapters
            return
        restored[adapter], best[adapter] = snapshot(), taken[adapter]
        for name, its in other.items():  # the others stay as they are
            assert all(torch.equal(a[0], b[0]) for a, b in zip(its, restored[adapter][name], strict=True))

    keeper.take, keeper.restore = taking, restoring
    trainer.train()
    assert spoil.before and set(restored) == {"actor"}
    for (weight, moments), (found, its) in zip(best["actor"], restored["actor"]["actor"], strict=True):
        assert torch.equal(weight, found) and moments.keys() == its.keys() and moments
        assert all(torch.equal(moments[key], its[key]) for key in moments)


@pytest.mark.slow
def test_a_shared_adapter_is_restored(taught_model, tmp_path):
    agents = [
        AgentSpec(one.name, one.system_prompt, max_completion_length=one.max_completion_length, adapter="team")
        for one in tiny_agents()
    ]
    trainer = make(taught_model, tmp_path, Spoil(4, "team"), agents)
    trainer.train()
    assert logged(trainer, "collapse/restored") == [1.0] and max(logged(trainer, "reward")[5:]) > 0.3


@pytest.mark.slow
def test_a_fall_in_the_last_steps_is_not_left_behind(taught_model, tmp_path, monkeypatch):
    monkeypatch.setattr(collapse.Restoring, "errors", 1.0)  # one batch is enough
    trainer = make(
        taught_model, tmp_path, spoil := Spoil(6, "actor"), max_steps=7, save_strategy="steps", save_steps=7
    )
    trainer.train()
    assert logged(trainer, "collapse/restored")
    ends = weights(trainer)
    assert all((ends[name] - before).abs().max() < 1e-3 for name, before in spoil.before.items() if "lora" in name)
    with safe_open(tmp_path / "checkpoint-7" / "actor" / "adapter_model.safetensors", "pt") as saved:
        largest = max(saved.get_tensor(key).abs().max().item() for key in saved.keys() if "lora_B" in key)  # noqa: SIM118
    assert largest < 0.1


@pytest.mark.parametrize("gain", [-0.1, 0.1])
@pytest.mark.slow
def test_a_run_that_was_restored_ends_with_its_best_adapters(taught_model, tmp_path, caplog, monkeypatch, gain):
    """Unless the last ones earn as much: a last trial tells."""
    trainer = make(taught_model, tmp_path, Spoil(4, "actor"), learning_rate=1e-3)
    watch = trainer.parts.collapse
    tried = watch._try

    def trying(rows):
        is_last = trainer.state.global_step == trainer.state.max_steps
        return collapse._Trial([], gain, gain, "Tried.") if is_last else tried(rows)

    monkeypatch.setattr(watch, "_try", trying)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert logged(trainer, "collapse/restored") == [1.0]
    best = trainer.parts.checkpoints.best
    is_best = all(
        torch.equal(a, b)
        for name in trainer.policies.trained
        for a, b in zip(best.weights(name), trainer.policies.parameters(name).values(), strict=True)
    )
    assert is_best == (gain > 0) == any("so it ends with" in text for text in caplog.messages)


@pytest.mark.slow
def test_evaluations_say_which_adapters_are_the_best(taught_model, tmp_path):
    """Rewards of batches differ by luck; the copies are those of the best evaluation, and the run ends with them."""

    class Evaluate(TrainerCallback):
        trainer, found = None, ()

        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step in (1, 3, 8):  # the last one: no batch follows
                value = {1: 0.5, 3: 0.7, 8: 0.6}[state.global_step]
                kept = weights(self.trainer)
                self.trainer.callback_handler.on_evaluate(args, state, control, {"eval_reward": value})
                self.found = kept if state.global_step == 3 else self.found

    watch = Evaluate()
    trainer = make(taught_model, tmp_path, Spoil(4, "actor"), callbacks=[watch], learning_rate=1e-3)
    watch.trainer = trainer
    trainer.train()
    assert logged(trainer, "collapse/restored")
    assert trainer.parts.collapse.state_dict()["best_evaluation"][0] == 0.7
    assert not moved(watch.found, weights(trainer))


@pytest.mark.parametrize(("on", "count"), [("warn", 1), ("ignore", 0)])
@pytest.mark.slow
def test_it_is_said_once(taught_model, tmp_path, caplog, on, count):
    trainer = make(taught_model, tmp_path, Spoil(3, "actor"), max_steps=10, on_collapse=on)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert sum("or the team has fallen" in text for text in caplog.messages) == count
    assert not logged(trainer, "collapse/restored")
    assert bool(logged(trainer, "collapse/below_best")) == (on == "warn")


@pytest.mark.slow
def test_a_run_that_does_not_fall_is_left_alone(taught_model, tmp_path):
    ends = []
    for on in ("restore", "ignore"):
        trainer = make(taught_model, tmp_path / on, on_collapse=on, max_steps=4)
        trainer.train()
        ends.append(weights(trainer))
    assert not moved(*ends)


@pytest.mark.slow
def test_a_resumed_run_restores_the_same(taught_model, tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 1, "num_train_epochs": 100, "learning_rate": 1e-3}
    settings["drop"] = 0.7  # both batches of the window have to be bad
    # Whatever the weights were spoiled to before the interruption is in the checkpoint
    whole = make(taught_model, tmp_path / "whole", Spoil(4, "actor"), **settings)
    whole.train()
    assert logged(whole, "collapse/restored")
    cut = make(taught_model, tmp_path / "cut", Spoil(4, "actor"), callbacks=[StopAt(5)], **settings)
    cut.train()
    assert not logged(cut, "collapse/restored")
    resumed = make(taught_model, tmp_path / "cut", **settings)
    resumed.train(resume_from_checkpoint=True)
    assert logged(resumed, "collapse/restored") and not moved(weights(whole), weights(resumed))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"on_collapse": "undo"}, "`on_collapse` must be one of 'warn', 'restore', 'ignore'"),
        ({"on_collapse": "restore", "sync_ref_model": True, "beta": 0.1}, "but not the references that follow them"),
        ({"use_vllm": True, "max_staleness": 1, "on_collapse": "restore"}, "that `on_collapse='restore'` takes back"),
    ],
    ids=str,
)
def test_what_does_not_go(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **settings)


def test_a_base_that_is_trained_cannot_be_restored(model_folder, tmp_path):
    with pytest.raises(ValueError, match="`on_collapse='restore'` needs a base that stays as it is"):
        team_trainer(model_folder, tmp_path, peft_config=None, settings={"on_collapse": "restore"})


# ---- What is no collapse ----


def watching(trainer):
    """Feeds batches of rewards to what watches a run; `restored` counts what is undone."""
    watch, rows = trainer.parts.collapse, [trainer.train_dataset[0]]
    rollout = SimpleNamespace(drawn=None)

    def feed(rewards):
        found = []
        for reward in rewards:
            rollout.rewards = torch.as_tensor(reward, dtype=torch.float32).reshape(-1)
            found.append(watch.is_undone(rollout, rows))
        return found

    return feed


def test_a_fall_of_batches_is_said_calmly_and_once_it_lasts(model_folder, tmp_path, caplog):
    """Their rows may have become harder; an evaluation of the same questions tells."""
    trainer = make(model_folder, tmp_path, on_collapse="warn", window=8, drop=0.1)
    feed, draws = watching(trainer), np.random.default_rng(0)
    with caplog.at_level(logging.WARNING):
        feed(draws.random((50, 32)) < 0.5)
        feed(draws.random((16, 32)) < 0.05)
        assert not caplog.messages
        feed(draws.random((14, 32)) < 0.05)  # with windows of 16, not before 23
    (said,) = caplog.messages
    assert "The mean reward of the last 8 generation batches is 0.0" in said and "COLLAPSED" not in said
    assert "Either the rows have become harder, or the team has fallen" in said and "`eval_strategy`" in said


def sparse(chance):
    return lambda draws, batch: draws.random((32, 1)) < chance


def prompts(solved):
    """Of four prompts with eight episodes each, most have the same outcome."""

    def draw(draws, batch):
        chances = np.where(draws.random(4) < 0.9, solved, draws.random(4))
        return draws.random((4, 8)) < chances[:, None]

    return draw


# Runs whose team stays as it is: `draw(draws, batch)` gives the rewards of a batch, a line for each prompt
STILL = {
    "one in 500": sparse(0.002),
    "one in 200": sparse(0.005),
    "one in 100": sparse(0.01),
    "mostly impossible": prompts(0.0),
    "nearly solved": prompts(1.0),
    "heavy tails": lambda draws, batch: draws.pareto(1.2, (4, 8)),
    "heavy tails of prompts": lambda draws, batch: np.exp(2 * draws.normal(size=(4, 1))) * draws.random((4, 8)),
    "two tasks in turns": lambda draws, batch: draws.random((4, 8)) < (0.8 if batch // 8 % 2 else 0.2),
    "half": lambda draws, batch: draws.random((4, 8)) < 0.5,
    "dense": lambda draws, batch: draws.normal(0.5, 0.1, (4, 8)),
    "rare failures": lambda draws, batch: np.where(draws.random((32, 1)) < 0.003, -10.0, 0.0),
    "batches of many difficulties": lambda draws, batch: draws.random((32, 1)) < 0.5 + 0.2 * draws.normal(),
    "one prompt": lambda draws, batch: draws.random((1, 8)) < draws.random(),
}
FALLS = {
    "to a tenth": lambda draws, batch: draws.random((4, 8)) < (0.5 if batch < 60 else 0.05),
    "of dense rewards": lambda draws, batch: draws.normal(0.5 if batch < 60 else 0.2, 0.1, (4, 8)),
    "of negative rewards": lambda draws, batch: draws.normal(-0.5 if batch < 60 else -1.5, 0.3, (4, 8)),
}


def share_that_falls(draw, runs, batches):
    """Of simulated runs, with five standard errors."""
    count = 0
    for number in range(runs):
        draws, falls = np.random.default_rng(number), Falls(8, 0.1, 5.0)
        for batch in range(batches):
            rewards = draw(draws, batch)
            falls.see(torch.tensor(rewards).reshape(-1), rewards.shape[1])
            if falls.has_lasted:
                count += 1
                break
    return count / runs


@pytest.mark.parametrize("name", STILL)
def test_the_luck_of_batches_is_no_fall(name):
    """`benchmarks/collapse_luck.py` has 100 runs of 400 batches of each."""
    many = name in ("heavy tails", "heavy tails of prompts")  # whose best windows are lucky ones
    assert share_that_falls(STILL[name], runs=30 if many else 10, batches=400 if many else 150) == 0


@pytest.mark.parametrize("name", FALLS)
def test_a_true_fall_is_found(name):
    assert share_that_falls(FALLS[name], runs=10, batches=120) == 1


def test_the_error_of_a_window_by_hand():
    falls = Falls(2, 0.1, 5.0)
    falls.see(torch.tensor([1.0, 0.0, 1.0, 1.0]), 2)  # prompts 0.5 and 1: variance 0.125, squared error 0.0625
    falls.see(torch.tensor([1.0, 1.0, 1.0, 1.0]), 2)
    state = falls.state_dict()
    assert state["rewards"] == [0.75, 1.0] and state["variances"] == [0.0625, 0.0]
    assert state["highest"] == 0.875 and state["variance_of_best"] == 0.0625 / 4
    again = Falls(2, 0.1, 5.0)
    again.load_state_dict(state)
    assert again.state_dict() == state
    again.load_state_dict({name: state[name] for name in ("rewards", "highest", "largest", "steps")})  # of version 0.2
    assert again.best == 0.875 and again.mean == 0.875 and not again.has_fallen()


def test_a_remembered_state_is_as_good_as_one_of_a_file(model_folder, tmp_path):
    """After a failure, the state of the last complete step is loaded as it was, not from JSON."""
    watch = make(model_folder, tmp_path).parts.collapse
    watch._best_evaluation, watch._fallen_evaluation, watch._error_of_fallen = (0.9, 0.01), 0.2, 0.03
    state = watch.state_dict()
    for kept in (copy.deepcopy(state), json.loads(json.dumps(state))):
        watch.load_state_dict(kept)
        assert json.dumps(watch.state_dict()) == json.dumps(state)


def test_evaluation_sets_are_no_series(model_folder, tmp_path, caplog):
    """Of two sets, one of which is harder, and of another one that a callback evaluates."""

    def by_row(completions, value, **kwargs):
        return [number + 0.001 * len({*str(text)}) for text, number in zip(completions, value, strict=True)]

    def rows(value):
        return Dataset.from_list([{"prompt": f"row {number}", "value": value} for number in range(4)])

    class Elsewhere(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            trainer.evaluate(rows(0.1) if state.global_step % 2 else rows(0.9))
            trainer.evaluate(sampling={"temperature": 0.0})

    settings = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 4, "num_generations_eval": 2}
    with caplog.at_level(logging.WARNING):
        trainer = team_trainer(
            model_folder, tmp_path, reward_funcs=by_row, train_dataset=rows(0.5), settings=settings,
            eval_dataset={"easy": rows(0.9), "hard": rows(0.1)}, callbacks=[Elsewhere()],
        )  # fmt: skip
        trainer.train()
    assert not any("COLLAPSED" in text for text in caplog.messages)
    assert trainer.parts.collapse.state_dict()["best_evaluation"] is None
    sets = [entry for entry in trainer.state.log_history if "eval_hard_reward" in entry]
    assert len(sets) >= 4 and not any("eval_reward" in entry or "eval_loss" in entry for entry in sets)


def test_nothing_is_restored_where_the_best_adapters_are_no_better(model_folder, tmp_path, caplog):
    trainer = make(model_folder, tmp_path)
    before = weights(trainer)
    with caplog.at_level(logging.WARNING):
        assert not any(watching(trainer)([0.9, 0.9, 0.91, 0.9, 0.0, 0.0, 0.0, 0.0]))
    assert any("Nothing is restored" in text for text in caplog.messages) and not moved(before, weights(trainer))


@pytest.mark.slow
def test_an_evaluation_before_training_is_not_the_best_of_the_run(taught_model, tmp_path):
    trainer = make(taught_model, tmp_path, spoil := Spoil(4, "actor"), eval_dataset=tiny_dataset(8, seed=1))
    trainer.evaluate()
    assert trainer.parts.collapse.state_dict()["best_evaluation"] is None
    trainer.train()
    assert trainer.parts.collapse.state_dict()["best_evaluation"] is None and spoil.before
    assert logged(trainer, "collapse/restored") == [1.0]


@pytest.mark.slow
def test_a_run_that_has_only_warned_takes_copies_when_it_is_to_restore(taught_model, tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 3}
    make(taught_model, tmp_path, on_collapse="warn", max_steps=3, **settings).train()
    trainer = make(taught_model, tmp_path, Spoil(4, "actor"), max_steps=8, **settings)
    trainer.train(resume_from_checkpoint=True)
    assert logged(trainer, "collapse/restored") == [1.0]


@pytest.mark.slow
def test_rewards_may_log_columns_and_numbers_beside_a_trial(taught_model, tmp_path):
    """What they log of episodes that are not trained on is left out."""

    def logging_reward(completions, solution, log_extra=None, log_metric=None, **kwargs):
        log_extra("length", [len(str(one)) for one in completions])
        log_metric("rows", float(len(completions)))
        return exact_answer(completions, solution)

    trainer = make(taught_model, tmp_path, Spoil(4, "actor"), reward_funcs=logging_reward)
    trainer.train()
    assert logged(trainer, "collapse/restored") == [1.0] and set(logged(trainer, "rows")) == {64.0}


@pytest.mark.slow
def test_gradients_of_fallen_weights_are_not_applied_to_restored_ones(taught_model, tmp_path):
    """Batches of two micro-steps, optimizer steps of four: nothing is restored between them."""
    trainer = make(
        taught_model, tmp_path, Spoil(3, "actor"), max_steps=6, per_device_train_batch_size=32,
        gradient_accumulation_steps=4, steps_per_generation=2,
    )  # fmt: skip
    restore, seen = trainer.parts.checkpoints.best.restore, []

    def restoring(adapter):
        seen.append(trainer.policies.have_gradients or trainer.parts.state.micro_step % 4 > 0)
        restore(adapter)

    trainer.parts.checkpoints.best.restore = restoring
    trainer.train()
    assert seen and not any(seen)


# ---- Trials ----


def test_the_gain_of_a_trial():
    nan = float("nan")
    gain = collapse._Gain.of(torch.tensor([1.0, 1.0, 0.0, 1.0, nan]), torch.tensor([0.0, 1.0, 0.0, nan, 1.0]))
    assert gain.mean == pytest.approx(1 / 3) and gain.error == pytest.approx((1 / 3) ** 0.5 / 3**0.5)  # of 1, 0, 0
    assert gain.episodes == 3 and not gain.is_certain(0.1)
    assert collapse._Gain.of(torch.tensor([nan]), torch.tensor([1.0])) == (-float("inf"), 0.0, 0)
    assert not collapse._Gain.of(torch.tensor([1.0]), torch.tensor([0.0])).is_certain(0.01)  # one says nothing


def test_a_trial_is_certain_by_students_quantile():
    """t(0.99, 3) = 4.541 and t(0.99, 30) = 2.457, where a normal one is 2.326."""
    for episodes, quantile in ((4, 4.541), (31, 2.457)):
        assert collapse._Gain(1.01 * quantile, 1.0, episodes).is_certain(0.01)
        assert not collapse._Gain(0.99 * quantile, 1.0, episodes).is_certain(0.01)
    draws = np.random.default_rng(0)
    pairs = (torch.tensor(draws.normal(size=(2, 4))) for _ in range(400))
    assert sum(collapse._Gain.of(*pair).is_certain(0.01) for pair in pairs) <= 12  # 9 % by a normal quantile


@pytest.mark.parametrize(("better", "is_restored"), [(4, False), (16, True)])
def test_a_gain_within_luck_restores_nothing(model_folder, tmp_path, caplog, monkeypatch, better, is_restored):
    """Of 32 paired episodes, 4 more right ones may be luck (3 net of 5 that changed), 16 are not."""
    trainer = make(model_folder, tmp_path)
    watch, rewards = trainer.parts.collapse, torch.zeros(32)
    rewards[:2] = 1.0
    restored = torch.zeros(32)
    restored[1 : 1 + better] = 1.0
    outcomes = iter([rewards, restored, restored, restored])
    monkeypatch.setattr(watch, "_act", lambda rows: next(outcomes))
    with caplog.at_level(logging.WARNING):
        found = watching(trainer)([0.9, 0.9, 0.91, 0.9, 0.0, 0.0])
    assert any(found) == is_restored and any("Nothing is restored" in text for text in caplog.messages) != is_restored
    assert (
        watch.state_dict()["highest"] > 0.9
    )  # it is looked at again: nothing says that the present ones are the best


@pytest.mark.parametrize(
    ("gains", "names"),
    [
        ({"reasoner": 0, "actor": 12, "all": 12}, ["actor"]),
        ({"reasoner": 0, "actor": 12, "all": 30}, ["reasoner", "actor"]),  # one brings back less than half
        ({"reasoner": 1, "actor": 4, "all": 8}, ["reasoner", "actor"]),  # one alone is not certain, all are
        ({"reasoner": 0, "actor": 3, "all": 3}, []),
        ({"reasoner": -9, "actor": 0, "all": -9}, []),
    ],
    ids=str,
)
def test_what_a_trial_restores(model_folder, tmp_path, monkeypatch, gains, names):
    """Of 64 episodes on the same prompts, so many more are right."""

    def rewards(more):
        return torch.tensor([1.0] * (16 + more) + [0.0] * (48 - more))

    trainer = make(model_folder, tmp_path)
    watch = trainer.parts.collapse
    watch._take()
    outcomes = iter([rewards(0), *(rewards(gains[name]) for name in watch._best.adapters), rewards(gains["all"])])
    monkeypatch.setattr(watch, "_act", lambda rows: next(outcomes))
    trial = watch._try([{}])
    assert sorted(trial.names) == sorted(names) and trial.gain == pytest.approx(max(gains.values()) / 64)


def test_the_luck_of_evaluations_is_no_collapse(model_folder, tmp_path, caplog):
    """Evaluations of 64 episodes of a team that does not change, and of one that falls to a third."""
    draws = np.random.default_rng(0)
    for values, count in ((draws.binomial(64, 0.5, 40) / 64, 0), ([0.5, 0.52, 0.05], 1)):
        trainer = make(model_folder, tmp_path / str(count), on_collapse="warn")
        watch = trainer.parts.collapse
        watch._is_training, trainer.state.global_step, trainer.state.max_steps = True, 1, 100
        watch._error_of_evaluation = lambda: 0.0625
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            for value in values:
                watch.on_evaluate(trainer.args, trainer.state, None, {"eval_reward": value})
        assert sum("THE TEAM HAS COLLAPSED: `eval_reward` is 0.05" in text for text in caplog.messages) == count


@pytest.mark.slow
def test_an_evaluation_before_the_first_step_is_not_the_best(taught_model, tmp_path):
    settings = {"eval_on_start": True, "eval_strategy": "steps", "eval_steps": 2, "num_generations_eval": 1}
    seen = []

    class Look(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            seen.append(trainer.parts.collapse.state_dict()["best_evaluation"])

    trainer = make(
        taught_model, tmp_path, callbacks=[Look()], eval_dataset=tiny_dataset(32, seed=1), max_steps=4, **settings
    )
    trainer.train()
    assert len(logged(trainer, "eval_reward")) == 3 and seen[:2] == [None, None] and seen[2] is not None


@pytest.mark.parametrize(("last", "is_back"), [(0.43, True), (0.47, False)])
def test_a_last_evaluation_below_the_best_ends_the_run_with_the_best(model_folder, tmp_path, last, is_back):
    """By a tenth, also where luck could explain it."""
    trainer = make(model_folder, tmp_path, drop=0.1)
    watch = trainer.parts.collapse
    watch._is_training, trainer.state.global_step, trainer.state.max_steps = True, 4, 8
    watch._error_of_evaluation = lambda: 0.05
    watch.on_evaluate(trainer.args, trainer.state, None, {"eval_reward": 0.5})
    before = weights(trainer)
    for parameter in trainer.policies.parameters("actor").values():
        parameter.data.add_(1.0)
    trainer.state.global_step = 8
    watch.on_evaluate(trainer.args, trainer.state, None, {"eval_reward": last})
    assert bool(moved(before, weights(trainer))) != is_back


def test_evaluations_that_were_no_fall_are_the_best_from_then_on(model_folder, tmp_path, monkeypatch):
    trainer = make(model_folder, tmp_path)
    watch = trainer.parts.collapse
    watch._is_training, trainer.state.global_step, trainer.state.max_steps = True, 1, 100
    for value in (0.9, 0.1):
        watch._error_of_evaluation = lambda: 0.03
        watch.on_evaluate(trainer.args, trainer.state, None, {"eval_reward": value})
    watch._error_of_evaluation = lambda: 0.5  # of another set, evaluated since
    monkeypatch.setattr(watch, "_act", lambda rows: torch.zeros(8))
    assert watch.state_dict()["fallen_evaluation"] == 0.1
    assert not any(watching(trainer)([0.5]))
    state = watch.state_dict()
    assert state["best_evaluation"] == (0.1, 0.03) and state["fallen_evaluation"] is None


@pytest.mark.slow
def test_a_resumed_run_can_restore_at_its_end(taught_model, tmp_path):
    """Its last batch was drawn before the interruption: the trial needs its rows."""
    settings = {"save_strategy": "steps", "save_steps": 1, "steps_per_generation": 2, "max_steps": 8}
    settings |= {"window": 4, "learning_rate": 1e-3, "per_device_train_batch_size": 32}

    class Best(TrainerCallback):
        """An evaluation that was better, early in the run, and one that has fallen, after the last batch."""

        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step in (2, 7):
                value = 1.0 if state.global_step == 2 else 0.0
                self.trainer.callback_handler.on_evaluate(args, state, control, {"eval_reward": value})

    ends = []
    for name in ("whole", "cut"):
        callbacks = [best := Best(), *([StopAt(7)] if name == "cut" else [])]
        trainer = make(taught_model, tmp_path / name, Spoil(6, "actor"), callbacks=callbacks, **settings)
        best.trainer = trainer
        trainer.train()
        if name == "cut":
            assert trainer.parts.collapse.state_dict()["fallen_evaluation"] is not None
            trainer = make(taught_model, tmp_path / name, **settings)
            trainer.train(resume_from_checkpoint=True)
        assert logged(trainer, "collapse/restored") == [1.0]
        ends.append(weights(trainer))
    assert not moved(*ends)


@pytest.mark.slow
def test_tokens_of_trials_and_undone_batches_count_and_their_metrics_do_not(taught_model, tmp_path):
    trainer = make(taught_model, tmp_path, Spoil(4, "actor"))
    rolled, inner = [], trainer.parts.runner.run

    def counting(*args, **kwargs):
        episodes = inner(*args, **kwargs)
        rolled.append(sum(len(turn.completion_ids) for episode in episodes for turn in episode.turns))
        return episodes

    trainer.parts.runner.run = counting
    trainer.train()
    # The undone batch, and the team as it was, with each adapter and with both at their best
    assert logged(trainer, "collapse/restored") == [1.0] and len(rolled) == 8 + 5 + 4
    assert trainer.parts.reporter.generated_tokens == sum(rolled)
    assert not trainer.parts.checkpoints.best.adapters or min(logged(trainer, "reward")[5:]) > 0.2


def test_metrics_of_an_undone_batch_are_left_out(model_folder, tmp_path, monkeypatch):
    trainer = make(model_folder, tmp_path)
    undone, found, mark = iter([True]), [], Metrics.mark
    monkeypatch.setattr(trainer.parts.collapse, "is_undone", lambda rollout, rows: next(undone, False))
    monkeypatch.setattr(Metrics, "mark", lambda metrics: found.append(metrics) or mark(metrics))
    rows = [trainer.train_dataset[0]] * 64
    for generated in (2, 3):  # batches so far, the undone one included
        trainer.parts.experience.for_training(rows)
        counts = found[-1].mark()
        assert counts["context/dropped_turns"] == counts["reward"] == generated - 1


class Kept:
    """[`BestAdapters`] of one adapter, without weights."""

    adapters, restored = ["actor"], 0

    def take(self):
        pass

    def restore(self, name):
        self.restored += 1


@pytest.mark.parametrize("was_restored", [True, False])
def test_a_last_evaluation_a_little_below_the_best_counts_after_a_fall_alone(caplog, was_restored):
    """A run that was restored once ends with its best adapters; another one may end where it is."""
    state, best = SimpleNamespace(global_step=4, max_steps=8), Kept()
    watch = collapse.Restoring(RunContext(None, None, None, None, None), lambda: 0.01, None, best, act=None)
    watch._state = SimpleNamespace(optimizer_step=4)
    watch.on_train_begin(None, state, None)
    watch.on_evaluate(None, state, None, {"eval_reward": 0.7})
    watch._has_restored, state.global_step = was_restored, 8
    with caplog.at_level(logging.WARNING):
        watch.on_evaluate(None, state, None, {"eval_reward": 0.68})  # within a tenth of the best
    assert best.restored == int(was_restored) == len(caplog.messages)


def test_a_step_from_before_adapters_went_back_is_not_saved(model_folder, tmp_path, monkeypatch):
    """What was remembered of the step belongs to other weights."""
    trainer = make(model_folder, tmp_path, max_steps=2, save_strategy="steps", save_steps=100)
    checkpoints, saved = trainer.parts.checkpoints, []
    monkeypatch.setattr(TrlState, "window", lambda self: None)  # there is one while training runs
    checkpoints.folder.start()
    checkpoints.best.take()
    checkpoints.remember()
    checkpoints.best.restore("actor")
    assert not checkpoints.save_remembered(lambda: saved.append(True)) and not saved
    checkpoints.remember()
    assert checkpoints.save_remembered(lambda: saved.append(True)) and saved


def test_copies_of_fallen_weights_leave_the_pool(model_folder, tmp_path):
    agents = [AgentSpec("left"), AgentSpec("right", copy_of="left", copy_every=1, copies=8, trainable=False)]
    trainer = make(model_folder, tmp_path, agents=agents, max_steps=3)
    watch, past = trainer.parts.collapse, trainer.parts.checkpoints.copies
    take, watch._take = watch._take, lambda: None  # what is best is said here, and not by the rewards that were drawn

    class Restore(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 1:
                take()
            if state.global_step == 3:
                watch._go_back(["left"])

    trainer.add_callback(Restore())
    trainer.train()
    assert past.steps("right") == [0, 1]


@pytest.mark.slow
def test_an_evaluation_that_has_fallen_is_looked_at(taught_model, tmp_path, caplog):
    """Long before the mean reward of twenty batches says so."""
    settings = {"eval_strategy": "steps", "eval_steps": 2, "window": 20, "num_generations_eval": 1}
    trainer = make(taught_model, tmp_path, Spoil(3, "actor"), eval_dataset=tiny_dataset(64, seed=1), **settings)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert logged(trainer, "collapse/restored") == [1.0]
    assert any("COLLAPSED: `eval_reward` is" in text and "'actor'" in text for text in caplog.messages)
    evaluations = logged(trainer, "eval_reward")
    assert evaluations[1] < 0.5 * evaluations[0] and evaluations[2] > 0.8 * evaluations[0]
