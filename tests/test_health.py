"""Runs that learn nothing without an error, and numbers that are not finite."""

import math
import re
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

from marft_trl import AgentSpec, MARFTConfig
from marft_trl.algorithms.functional import moments, standardized
from marft_trl.algorithms.rows import Row
from marft_trl.config.team_setup import RunContext, TeamSetup
from marft_trl.episodes.live import LiveEpisode
from marft_trl.reporting.health import PATIENCE, Health
from marft_trl.rollout.generator import SampledTurn, check_sampled
from marft_trl.system.run_metrics import Metrics
from marft_trl.trainer.batch_maker import check_finite
from marft_trl.workflows import Workflow

import pytest
import torch
from torch import nn
from transformers import TrainerCallback

from .helpers import by_hand, logged_steps, moved, moved_by_training, team_trainer, weights


NAMES = ["planner", "solver"]


class Watched:
    """A [`Health`] without a trainer: `planner` is trained, `solver` is not."""

    def __init__(self, tmp_path, **settings):
        self.layer = nn.Linear(3, 3)
        store = {"train": defaultdict(list), "eval": defaultdict(list)}
        self.metrics = Metrics(store, SimpleNamespace(model=self.layer))
        policies = SimpleNamespace(trained=["planner"], is_lora=lambda adapter: True)
        policies.is_trained = policies.trained.__contains__
        policies.get_agents = lambda adapter: [adapter] if adapter in NAMES else []
        args = MARFTConfig(str(tmp_path), use_cpu=True, **settings)
        parts = {"planner": dict(self.layer.named_parameters())}
        team = TeamSetup([AgentSpec(name) for name in NAMES], None, policies, None, None, {}, {}, None)
        self.health = Health(
            team, RunContext(args, None, None, self.metrics, None), lambda: parts, dict.fromkeys(NAMES, 400)
        )
        self.state = SimpleNamespace(global_step=0)
        self.health.on_train_begin(None, self.state, None)

    def step(self, move=1e-3, **metrics):
        with torch.no_grad():
            self.layer.weight += move
        for name, value in metrics.items():
            self.metrics.add(name.replace("__", "/"), value)
        self.health.on_optimizer_step(None, self.state, None)
        self.state.global_step += 1
        self.health.on_step_end(None, self.state, None)

    def steps(self, count, **metrics):
        for _ in range(count):
            self.step(**metrics)


CLIPPED = "agents__solver__completions__"
CRITIC = {"critic__value_loss": 2.0, "critic__value_mean": 1.0, "critic__target_mean": 1.0}
# Metric, unhealthy value, healthy value, other metrics, number of steps, warning
SYMPTOMS = {
    "no signal": ("frac_reward_zero_std", 1.0, 0.9, {}, PATIENCE, "THE REWARDS GIVE NO SIGNAL"),
    "truncated": (
        *(f"{CLIPPED}mean_length", 2.0, 1.0, {f"{CLIPPED}clipped_ratio": 1.0}),
        *(PATIENCE, "EVERY TURN OF 'solver' IS TRUNCATED.*`max_completion_length`"),
    ),
    "still": (
        *("move", 0.0, 1e-3, {"agents__planner__grad_norm": 0.1}),
        *(PATIENCE, "agents 'planner'.* HAVE NOT CHANGED.*`learning_rate` is 0 or too small"),
    ),
    "grown": ("move", 1e3, None, {}, 1, "agents 'planner'.* HAVE GROWN .*-FOLD.*`learning_rate=1e-05`"),
    "collapsed": ("agents__planner__entropy", 0.001, 0.5, {}, PATIENCE, "'planner' HAS COLLAPSED.*`entropy_coef`"),
    "noise": ("agents__planner__entropy", math.log(400) - 0.01, 3.0, {}, PATIENCE, "'planner' IS NEARLY RANDOM"),
    "kl": ("agents__planner__kl", 11.0, 1.0, {}, 3, "FAR FROM ITS REFERENCE.*`beta`"),
    "kl is NaN": ("agents__planner__kl", math.nan, 1.0, {}, 3, "FAR FROM ITS REFERENCE"),
    "clipped": (
        *("agents__planner__clip_ratio__region_mean", 0.95, 0.1, {}),
        *(PATIENCE, "ALL TOKENS OF 'planner' ARE CLIPPED.*`num_iterations`"),
    ),
    "values": ("critic__value_loss", 2e6, 2.0, CRITIC, 3, "THE CRITIC HAVE EXPLODED.*`critic_learning_rate`"),
    "large values": ("critic__value_mean", -500.0, -5.0, CRITIC, 3, "VALUES OF THE CRITIC HAVE EXPLODED"),
}


@pytest.mark.parametrize("name", SYMPTOMS)
def test_a_dead_run_logs_one_warning(tmp_path, caplog, name):
    metric, worst, good, others, patience, message = SYMPTOMS[name]
    watched, ill = Watched(tmp_path), others | {metric: worst}
    if good is not None:
        watched.steps(patience - 1, **ill)
        watched.step(**others | {metric: good})  # a healthy step resets the count
        watched.steps(patience - 1, **ill)
        assert not caplog.records
    watched.step(**ill)
    (record,) = caplog.records
    assert re.search(message, record.message), record.message
    watched.steps(2 * patience, **ill)
    assert len(caplog.records) == 1


def test_an_agent_without_turns_is_named_after_the_first_batch_and_loudly_later(tmp_path, caplog):
    watched = Watched(tmp_path)
    watched.steps(PATIENCE - 1, agents__solver__turns=0.0)
    assert [record.message[:36] for record in caplog.records] == ["Agent 'solver' had no turn in the fi"]
    watched.steps(2 * PATIENCE, agents__solver__turns=0.0)
    assert len(caplog.records) == 2 and "THE AGENT 'solver' HAS NO TURNS" in caplog.records[1].message
    caplog.clear()
    later = Watched(tmp_path)
    later.step(agents__solver__turns=1.0)
    later.steps(PATIENCE - 1, agents__solver__turns=0.0)
    assert not caplog.records


def test_a_resumed_run_keeps_counting_and_repeats_no_warning(tmp_path, caplog):
    ill = {"frac_reward_zero_std": 1.0}
    first, again, third = (Watched(tmp_path) for _ in range(3))
    first.steps(PATIENCE - 1, **ill)
    again.health.load_state_dict(first.health.state_dict())
    again.step(**ill)
    assert len(caplog.records) == 1
    third.health.load_state_dict(again.health.state_dict())
    third.steps(2 * PATIENCE, **ill)
    assert len(caplog.records) == 1


def test_a_step_without_metrics_counts_for_nothing(tmp_path, caplog):
    """With several steps per generation batch, a batch is measured once."""
    watched = Watched(tmp_path)
    for step in range(3 * PATIENCE):
        watched.step(**({"frac_reward_zero_std": 1.0} if step % 4 == 0 else {}))
    assert not caplog.records
    watched.steps(PATIENCE, frac_reward_zero_std=1.0)
    assert len(caplog.records) == 1


def test_half_precision_of_trained_weights_logs_a_warning(tmp_path, caplog):
    watched = Watched(tmp_path)
    watched.layer.bfloat16()
    watched.health.on_train_begin(None, watched.state, None)
    assert "are torch.bfloat16, so updates below this precision are lost" in caplog.text


def dead_run(model, tmp_path, steps=PATIENCE + 1, **arguments):
    options = {
        "max_steps": steps,
        "per_device_train_batch_size": 4,
        "num_generations": 2,
        **arguments.pop("settings", {}),
    }
    trainer = team_trainer(model, tmp_path, settings=options, **arguments)
    return moved_by_training(trainer), trainer


@pytest.mark.slow
def test_a_constant_reward_logs_a_warning(small_model, tmp_path, caplog):
    changed, trainer = dead_run(small_model, tmp_path, reward_funcs=lambda completions, **_: [1.0] * len(completions))
    assert not changed and trainer.state.log_history[0]["frac_reward_zero_std"] == 1.0
    assert caplog.text.count("THE REWARDS GIVE NO SIGNAL") == 1
    assert "adapter 'actor' (agents 'actor') HAVE NOT CHANGED" in caplog.text


def test_turns_that_are_all_truncated_and_masked_log_a_warning(small_model, tmp_path, caplog):
    settings = {"mask_truncated_completions": True, "beta": 0.1, "max_steps": PATIENCE + 1}
    trainer = team_trainer(small_model, tmp_path, settings={"per_device_train_batch_size": 4, **settings})
    trainer.parts.runner.generator.generate = by_hand(lambda agents, *_, **__: [SampledTurn([5, 6])] * len(agents))
    assert not moved_by_training(trainer)
    for name in ("reasoner", "actor"):
        assert f"EVERY TURN OF '{name}' IS TRUNCATED" in caplog.text
    assert "Truncated turns are masked (`mask_truncated_completions`)" in caplog.text
    logs = logged_steps(trainer)
    assert all(log["loss"] == 0.0 and log["grad_norm"] == 0.0 for log in logs)
    assert not any(value != value for log in logs for value in log.values())  # no NaN


class Alone(Workflow):
    async def run(self, episode: LiveEpisode) -> None:
        await episode.turn("actor")


def test_an_agent_that_is_never_called_logs_a_warning(small_model, tmp_path, caplog):
    changed, _ = dead_run(small_model, tmp_path, workflow=Alone())
    assert changed and not any(".reasoner." in name for name in changed)
    assert caplog.text.count("Agent 'reasoner' had no turn in the first generation batch") == 1
    assert caplog.text.count("THE AGENT 'reasoner' HAS NO TURNS") == 1
    assert "'actor' HAS NO TURNS" not in caplog.text
    assert "Check `episode.turn('reasoner')`" in caplog.text
    assert "HAVE NOT CHANGED" not in caplog.text  # its turn to learn has not come


def test_a_learning_rate_far_too_high_logs_a_warning_in_the_first_step(small_model, tmp_path, caplog):
    dead_run(small_model, tmp_path, steps=1, settings={"learning_rate": 1e3, "lr_scheduler_type": "constant"})
    for name in ("reasoner", "actor"):
        assert f"agents '{name}') HAVE GROWN" in caplog.text
    assert "`learning_rate=1000` is probably far too high" in caplog.text


def test_rewards_of_any_size_are_learned_from(small_model, tmp_path):
    """Larger rewards are refused, so no run ends normally without having moved."""
    arguments = {"reward_funcs": lambda completions, **_: [1e15 * (index % 2) for index in range(len(completions))]}
    changed, trainer = dead_run(small_model, tmp_path, steps=1, **arguments)
    assert changed and all(p.isfinite().all() for p in trainer.model.parameters())


class Do(TrainerCallback):
    def __init__(self, step, **calls):
        self.step = step
        for name, call in calls.items():
            setattr(self, name, lambda args, state, control, call=call, **kwargs: self.when(state, call))

    def when(self, state, call):
        if state.global_step == self.step:
            call()


SAVE = {"save_strategy": "steps", "save_steps": 1, "max_steps": 3, "per_device_train_batch_size": 4}


def test_weights_that_are_not_finite_after_a_step_end_the_run(small_model, tmp_path):
    trainer = team_trainer(small_model, tmp_path, settings=SAVE)
    parameter = next(iter(trainer.policies.parameters("actor").values()))

    def spoil():
        with torch.no_grad():
            parameter.view(-1)[0] = torch.inf

    trainer.callback_handler.callbacks.insert(0, Do(1, on_optimizer_step=spoil))
    with pytest.raises(FloatingPointError, match=r"adapter 'actor' \(agents 'actor'\) are not finite after step 2"):
        trainer.train()
    assert (tmp_path / "checkpoint-1").exists() and not (tmp_path / "checkpoint-2").exists()


def test_a_loss_that_is_not_finite_skips_the_update_and_is_counted(small_model, tmp_path):
    trainer = team_trainer(small_model, tmp_path, settings={**SAVE, "save_strategy": "no"})
    backward = trainer.accelerator.backward
    trainer.accelerator.backward = lambda loss: backward(loss * torch.nan if trainer.state.global_step == 1 else loss)
    trainer.train()
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())
    names = [f"agents/{name}/skipped_updates" for name in ("reasoner", "actor")]
    logs = logged_steps(trainer)
    assert [max(log[name] for name in names) for log in logs] == [0.0, 1.0, 0.0]


@pytest.mark.parametrize("field", ["old_per_token_logps", "ref_per_token_logps", "old_values", "advantage"])
def test_a_number_that_is_not_finite_is_found_before_a_step(field):
    ids = torch.tensor([5]), torch.tensor([6, 7])
    rows = [Row(name, name, *ids, episode=index) for index, name in enumerate(NAMES)]
    good = replace(rows[1], **{field: torch.tensor([1.0, 2.0])})
    check_finite([rows[0], good], {field: "x"})
    for value in (math.nan, math.inf):
        bad = replace(rows[1], **{field: torch.tensor([1.0, value])})
        message = rf"`{field}` of a turn of 'solver' \(episode 1 .*its batch was not used"
        with pytest.raises(FloatingPointError, match=message):
            check_finite([rows[0], bad], {field: "x"})


def test_log_probabilities_of_an_engine_that_are_not_numbers_end_the_run(small_model, tmp_path):
    settings = {**SAVE, "num_iterations": 2, "save_strategy": "no"}
    trainer = team_trainer(small_model, tmp_path, settings=settings)
    turn = SampledTurn([5, 2], [math.nan, 0.0])
    trainer.parts.runner.generator.generate = by_hand(lambda agents, *_, **__: [turn] * len(agents))
    before = weights(trainer)
    with pytest.raises(FloatingPointError, match="`old_per_token_logps` of a turn of 'reasoner'"):
        trainer.train()
    assert not moved(before, weights(trainer))


@pytest.mark.parametrize(
    ("sampled", "message"),
    [
        ([SampledTurn([5])], "returned 1 completions for 2 observations"),
        ([SampledTurn([5]), SampledTurn([400])], "token id 400 for a turn of 'solver'; the model has 400 tokens"),
        ([SampledTurn([5]), SampledTurn([-1])], "token id -1 for a turn of 'solver'"),
        ([SampledTurn([5, 6], [0.0]), SampledTurn([5])], "1 log-probabilities for the 2 tokens of a turn of 'planner"),
    ],
)
def test_invalid_completions_of_an_engine_raise(sampled, message):
    with pytest.raises(ValueError, match=message):
        check_sampled(sampled, NAMES, 400)


@pytest.mark.parametrize("level", ["token", "action"])
def test_a_policy_ratio_that_explodes_does_no_harm(small_model, tmp_path, level):
    """With log-ratios of 100, the loss is clipped, or the update is skipped and counted."""
    settings = {**SAVE, "num_iterations": 2, "save_strategy": "no", "max_steps": 2, "level": level}
    trainer = team_trainer(small_model, tmp_path, settings=settings)
    generate = trainer.parts.batch_maker.for_training

    def shifted(inputs):
        (slice_,) = generate(inputs)
        rows = [replace(row, old_per_token_logps=row.old_per_token_logps - 100) for row in slice_.rows]
        return [replace(slice_, rows=rows)]

    trainer.parts.batch_maker.for_training = shifted
    trainer.train()
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())
    logs = logged_steps(trainer)
    assert all(math.isfinite(log["loss"]) or log["agents/actor/skipped_updates"] for log in logs)


def test_constant_returns_stay_finite():
    constant = torch.full((4,), 3.0)
    assert standardized(constant, moments(constant)).tolist() == [0.0] * 4


def test_a_dead_team_of_one_agent_logs_a_warning(small_model, tmp_path, caplog):
    settings = {"learning_rate": 0.0, "per_device_train_batch_size": 4, "max_steps": PATIENCE + 1}
    team_trainer(small_model, tmp_path, agents=[AgentSpec("solo")], settings=settings).train()
    assert "(agents 'solo') HAVE NOT CHANGED" in caplog.text and "`learning_rate` is 0 or too small" in caplog.text


def test_weights_that_move_a_little_log_no_warning(tmp_path, caplog):
    watched = Watched(tmp_path)
    for step in range(3 * PATIENCE):  # there and back, so that the norm is often the same
        watched.step(move=1e-3 * (-1) ** step, agents__planner__grad_norm=0.1)
    assert not caplog.records
