"""Rows whose gradient is exactly 0 skip the pass, and the update equals that of a full pass."""

from marft_trl import AgentSpec
from marft_trl.algorithms.baselines import BASELINES, TurnReturns
from marft_trl.tiny import tiny_agents

import pytest
import torch

from .helpers import logged_steps, moved, team_trainer, varied_reward, weights


ROWS, STEPS = 24, 2
# What all episodes of a group without a signal earn: no mean of numbers of float32 is exactly this
SAME = 0.3


def reward_of_half(prompts, completions, **kwargs):
    """Questions about Ann, Ben and Cat earn a reward that differs between completions; the others do not."""
    scores = varied_reward(completions)
    return [
        score if any(name in str(prompt) for name in ("Ann", "Ben", "Cat")) else SAME
        for prompt, score in zip(prompts, scores, strict=True)
    ]


def run(model, folder, reward=reward_of_half, agents=None, **settings):
    """Trains a team; counts the rows that went through the model in training."""
    settings = {"per_device_train_batch_size": ROWS, "max_steps": STEPS, "gradient_checkpointing": False, **settings}
    trainer = team_trainer(model, folder, settings=settings, reward_funcs=reward, agents=agents or tiny_agents())
    counted = {"rows": 0}
    original = trainer.parts.log_probs.for_trl

    def counting(model, input_ids, *args, **kwargs):
        counted["rows"] += len(input_ids) if torch.is_grad_enabled() else 0
        return original(model, input_ids, *args, **kwargs)

    trainer.parts.log_probs.for_trl = counting
    trainer.train()
    return weights(trainer), logged_steps(trainer), counted["rows"]


def run_both(model, folder, *arguments, **settings):
    """Train without the rows that have no signal, and with all rows: weights and logs of both."""
    short, logs, rows = run(model, folder, *arguments, **settings)
    full, all_logs, all_rows = run(model, folder, *arguments, skip_rows_without_signal=False, **settings)
    assert 0 < rows < 0.8 * all_rows
    return short, logs, full, all_logs


def distance(first, second):
    """Norm of the difference of trained weights, relative to their norm."""
    names = [name for name in first if "lora" in name]
    a, b = (torch.cat([state[name].flatten() for name in names]).double() for state in (first, second))
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.parametrize(
    "settings",
    [
        {"loss_type": "dapo"},
        {"level": "action", "num_iterations": 2, "target_kl": 1e9},
        *(
            pytest.param(settings, marks=pytest.mark.slow)
            for settings in (
                *({"loss_type": name} for name in ("grpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo")),
                {"loss_type": "bnpo", "gradient_accumulation_steps": 2, "per_device_train_batch_size": 12},
                {"update_order": "sequential"},
            )
        ),
    ],
    ids=str,
)
def test_updates_are_those_of_the_full_pass(model_folder, tmp_path, settings):
    short, logs, full, all_logs = run_both(model_folder, tmp_path, **{"learning_rate": 1e-4, **settings})
    assert distance(short, full) < 1e-7
    for short_log, full_log in zip(logs, all_logs, strict=True):
        names = [f"agents/{agent.name}/{figure}" for agent in tiny_agents() for figure in ("grad_norm", "approx_kl")]
        names += ["loss", "grad_norm", "reward", "frac_reward_zero_std", "clip_ratio/region_mean", "cispo_clip_ratio"]
        for name in names:
            expected = full_log.get(name)
            close = {"rel": 1e-2, "abs": 1e-11} if name.endswith("approx_kl") else {"abs": 1e-5}
            assert short_log.get(name) == (expected if expected is None else pytest.approx(expected, **close)), name
        assert 0 < short_log["frac_rows_without_signal"] < 1 and full_log["frac_rows_without_signal"] == 0


def test_clip_ratios_of_turns_are_shares_of_all_turns_also_of_those_that_take_no_pass(model_folder, tmp_path):
    settings = {"importance_sampling_level": "sequence", "num_iterations": 2, "learning_rate": 0.05, "epsilon": 0.01}
    _, logs, _, all_logs = run_both(model_folder, tmp_path, **settings)
    for name in ("clip_ratio/region_mean", "clip_ratio/low_mean", "clip_ratio/high_mean"):
        assert logs[-1][name] == pytest.approx(all_logs[-1][name], abs=1e-6) and all_logs[-1][name] > 0, name


@pytest.mark.parametrize("name", ["group", "agent", "turn", "c3", "leave_one_out", "batch"])
@pytest.mark.parametrize("value", [0.3, -1.1, 1e6 / 3])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_equal_returns_have_an_advantage_of_exactly_0(name, value, scale):
    """A mean of equal numbers differs from them by rounding, and Adam makes a full step of whatever is left."""
    episodes = torch.arange(14).repeat_interleave(3)  # of which the first seven earn the same
    returns = torch.full((42,), value)
    returns[0] = returns[2] = torch.nan
    returns[1] *= 1 + 1e-7  # a sum in another order
    others = torch.randn(42, generator=torch.Generator().manual_seed(0))
    returns = torch.where(episodes < 7, returns, others if name != "batch" else returns)
    samples = TurnReturns(episodes, torch.tensor([0, 1, 1] * 14), torch.tensor([0, 0, 0] * 14), returns, 7, 2)
    advantages = BASELINES[name].function(samples, scale)
    assert (advantages[:21] == 0).all() and (name == "batch" or (advantages[21:] != 0).all())


@pytest.mark.parametrize("settings", [{}, {"multi_objective_aggregation": "normalize_then_sum"}], ids=str)
def test_a_batch_of_equal_rewards_moves_nothing(model_folder, tmp_path, settings):
    def same(completions, **kwargs):
        return [0.3] * len(completions)

    def other(prompts, **kwargs):
        return [0.1 * len(str(prompt)) for prompt in prompts]

    after, logs, rows = run(model_folder, tmp_path, [same, other], learning_rate=1e-2, **settings)
    assert rows == 0 and not any(after[name].any() for name in after if "lora_B" in name)  # as they began
    assert all(log["frac_rows_without_signal"] == log["frac_reward_zero_std"] == 1 for log in logs)


@pytest.mark.slow
def test_updates_are_the_same_to_the_bit_where_whole_micro_batches_vanish(model_folder, tmp_path):
    short, _, full, _ = run_both(model_folder, tmp_path, max_tokens_per_micro_batch=1)  # every row is a micro-batch
    assert not moved(full, short)


@pytest.mark.slow
def test_an_adapter_without_a_gradient_still_moves_by_momentum(model_folder, tmp_path):
    """As after a pass over rows without advantage: the optimizer gets a gradient of 0, not none."""

    def fading(completions, trainer_state, **kwargs):
        """Only the first batch has a signal."""
        return varied_reward(completions) if trainer_state.global_step == 0 else [0.0] * len(completions)

    ends = []
    for skip in (True, False):
        settings = {"skip_rows_without_signal": skip, "max_tokens_per_micro_batch": 1}
        first, *_ = run(model_folder, tmp_path, fading, max_steps=1, lr_scheduler_type="constant", **settings)
        last, logs, _ = run(model_folder, tmp_path, fading, max_steps=3, lr_scheduler_type="constant", **settings)
        assert distance(last, first) > 1e-4
        assert [log["grad_norm"] > 0 for log in logs] == [True, False, False]
        assert [log["frac_rows_without_signal"] == 1 for log in logs] == [False, skip, skip]
        ends.append(last)
    assert not moved(*ends)


@pytest.mark.parametrize(
    "settings",
    [
        {"beta": 0.1},
        {"entropy_coef": 0.01},
        {"top_entropy_quantile": 0.5},
        {"share_prefixes": False},
        {"skip_rows_without_signal": False},
    ],
    ids=str,
)
def test_rows_with_another_gradient_are_trained_on(model_folder, tmp_path, settings):
    _, logs, rows = run(model_folder, tmp_path, max_steps=1, **settings)
    assert rows == ROWS * 2
    assert all(log["frac_rows_without_signal"] == 0 for log in logs)


def test_turns_that_do_not_count_take_no_pass(model_folder, tmp_path):
    """Whatever else is in the loss, their tokens are masked."""
    agents = [AgentSpec("reasoner", max_completion_length=1), AgentSpec("actor", max_completion_length=6)]
    settings = {"mask_truncated_completions": True, "beta": 0.1}
    _, logs, rows = run(model_folder, tmp_path, varied_reward, agents, **settings)
    assert rows < STEPS * ROWS * 2
    assert all(log["agents/reasoner/frac_rows_without_signal"] > 0.9 for log in logs)


def test_frozen_agents_are_not_counted(model_folder, tmp_path):
    agents = [AgentSpec("reasoner", trainable=False), AgentSpec("actor", max_completion_length=6)]
    _, logs, _ = run(model_folder, tmp_path, agents=agents)
    assert all("agents/reasoner/frac_rows_without_signal" not in log for log in logs)
    assert all(0 < log["agents/actor/frac_rows_without_signal"] < 1 for log in logs)
