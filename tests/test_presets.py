"""Presets and the settings of learning: which setting wins, what is printed, and what is refused."""

import dataclasses

from marft_trl import MARFTConfig
from marft_trl.config.presets import PRESETS

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trl import TrlParser


PPO = {"advantage": "gae", "critic": "shared", "num_generations": 1}
OBJECTIVES, SEQUENTIAL = {"multi_objective_aggregation": "normalize_then_sum"}, {"update_order": "sequential"}
LONE = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}


def config(**settings) -> MARFTConfig:
    return MARFTConfig("x", use_cpu=True, **settings)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_sets_the_listed_settings(name):
    field_names = {field.name for field in dataclasses.fields(MARFTConfig)}
    args = config(preset=name)
    assert set(PRESETS[name].settings) <= field_names
    for key, value in PRESETS[name].settings.items():
        assert getattr(args, key) == value, key
    assert f"preset '{name}': {PRESETS[name].source}" in str(args)
    assert repr(args) == str(args) and str(config()).startswith("MARFTConfig(")  # as ever without one


def test_explicit_settings_override_a_preset_even_with_the_default():
    args = config(preset="marft-a", epsilon=0.1, gamma=1.0, critic="shared")
    assert (args.epsilon, args.gamma, args.critic, args.gae_lambda) == (0.1, 1.0, "shared", 0.95)
    printed = str(args)
    assert "set explicitly: critic='shared', gamma=1.0, epsilon=0.1" in printed
    assert "gamma=1.0" not in printed.split("set explicitly")[0]


def test_a_preset_on_a_command_line():
    parser = TrlParser((MARFTConfig,))
    line = ["--output_dir", "x", "--use_cpu", "true", "--preset", "marft-t", "--gamma", "0.9"]
    (args,) = parser.parse_args_and_config(line)
    assert (args.gamma, args.advantage, args.critic, args.num_generations) == (0.9, "gae", "frozen", 1)
    (args,) = parser.parse_args_and_config([*line[:4], "--preset", "mappo", "--num_generations", "1"])
    assert args.critic_sees == "history" and args.normalize_values


def test_unset_settings_follow_the_others():
    for settings in ({}, {"preset": "marft-t"}):
        assert (config(**settings).loss_type, config(**settings, level="action").loss_type) == ("dapo", "grpo")
    assert config(**PPO).credit_kind == "rewards"
    assert config(**PPO, credit="counterfactual").credit_kind == "returns"
    assert config().credit_kind == "returns"
    assert config(advantage="turn", num_generations=1).num_generations == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"preset": "marft"}, r"`preset` must be one of .* Did you mean 'marft-t'"),
        ({"advantage": "gea"}, r"`advantage` must be one of .* Did you mean 'gae'"),
        ({"credit": "equals"}, r"Did you mean 'equal'"),
        ({"update_order": "sequental"}, r"Did you mean 'sequential'"),
        ({"advantage": "gae"}, r"`advantage='gae'` needs a critic, but `critic` is None"),
        ({"critic": "frozen"}, r"`critic='frozen'` predicts values that `advantage='group'`"),
        ({"critic_warmup_steps": 3}, r"`critic_warmup_steps=3` needs a critic"),
        ({"num_generations": 0}, r"`num_generations` must be a finite number above 0; got 0"),
        ({"steps_per_generation": 0}, r"`steps_per_generation` must be a finite number above 0; got 0"),
        ({"num_iterations": 1.5}, r"`num_iterations` must be an integer, got 1.5"),
        ({"value_clip": "0.2"}, r"`value_clip` must be a number, got '0.2'"),
        ({"target_kl": True}, r"`target_kl` must be a number, got True"),
        ({"value_clip": 0}, r"`value_clip` must be a finite number above 0, or None for no clipping; got 0"),
        ({"epsilon": None}, r"`epsilon` must be a number, got None"),
        ({"reward_weights": [1.0, float("nan")]}, r"`reward_weights` must be finite numbers"),
        ({"critic": "none"}, r"`critic` must be one of None, 'shared', .*; got the string 'none'"),
        ({"gamma": 0.9}, r"`gamma=0.9` has no effect with `credit_kind='returns'`. Set `credit_kind='rewards'`"),
        ({"token_gamma": 0.9}, r"`token_gamma=0.9` has no effect with `advantage='group'`"),
        ({**PPO, "level": "action", "token_gamma": 0.9}, r"`token_gamma=0.9` has no effect with `level='action'`"),
        ({**PPO, "credit_kind": "returns", "gae_lambda": 0.9}, r"`gae_lambda=0.9` has no effect with `credit_kind="),
        ({"critic_sees": "history"}, r"`critic_sees='history'` has no effect with `advantage='group'`"),
        ({**PPO, "critic_warmup_steps": 9, "max_steps": 8}, r"no agent would be trained"),
        ({"agent_iteration_interval": 8, "max_steps": 8}, r"leaves no step of `max_steps` \(8\) for the second"),
        ({**PPO, **LONE, "level": "action"}, r"generation batch of one episode .* or set `normalize_advantages="),
        ({**LONE, "advantage": "batch", "num_generations": 1}, r"generation batch of one episode"),
        ({"num_generations": 1, "advantage": "leave_one_out"}, r"`num_generations=1` needs a critic"),
        ({"advantage": "turn", "turn_candidates": 1}, r"`turn_candidates` is 1"),
        ({"level": "action", "loss_type": "dapo"}, r"`loss_type='dapo'` weights a turn by its number of tokens"),
        ({"level": "action", "importance_sampling_level": "sequence"}, r"means `level='action'` with"),
        ({"credit_discount": 0.5}, r"`credit_discount=0.5` has no effect with `credit='equal'`"),
        ({"own_reward_weight": 0.5}, r"`own_reward_weight=0.5` has no effect"),
        ({"credit": "counterfactual", "credit_kind": "rewards"}, r"would credit an agent for its teammates' turns"),
        ({"advantage": "turn", "credit": "counterfactual"}, r"there is nothing for `credit='counterfactual'`"),
        ({**OBJECTIVES, "credit": "per_step"}, r"needs `advantage='group'` or `'agent'` and `credit='equal'`"),
        ({"target_kl": 0.1}, r"`target_kl=0.1` has no effect: with `num_iterations=1`"),
        ({"update_order": "resampled", "agent_iteration_interval": 2}, r"both set which agent is trained in a step"),
        ({"update_order": "sequential", "advantage": "turn"}, r"most rows are candidates"),
        ({**SEQUENTIAL, "gradient_accumulation_steps": 2, "steps_per_generation": 1}, r"whole optimiz"),
        ({"update_order": "sequential", "target_kl": 0.1}, r"`target_kl=0.1` has no effect"),
        ({"action_logprob": "word"}, r"`action_logprob='word'` has no effect with `level='token'`"),
        ({"counterfactual_samples": 8}, r"`counterfactual_samples=8` has no effect with `credit='equal'`"),
        ({"advantage": "leave_one_out", "scale_rewards": "batch"}, r"`scale_rewards='batch'` has no effect"),
        ({"gamma": None}, r"`gamma` must be a number, got None"),
        ({"use_adaptive_entropy": True, "entropy_coef_min": 2.0}, r"`entropy_coef_min` \(2.0\) is above"),
    ],
    ids=str,
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        config(**settings)


SHARES = ("gamma", "gae_lambda", "token_gamma", "token_gae_lambda", "credit_discount", "own_reward_weight")


@given(name=st.sampled_from(SHARES), value=st.floats(allow_nan=True, allow_infinity=True))
def test_discounts_are_shares(name, value):
    needed = {"credit_discount": {"credit": "step_discount"}, "own_reward_weight": {"credit": "per_step"}}
    settings = needed.get(name, {"advantage": "gae", "critic": "shared"})
    if 0 <= value <= 1:
        assert getattr(config(**settings, **{name: value}), name) == value
    else:
        with pytest.raises(ValueError, match=rf"`{name}` must be a finite number in \[0, 1\]"):
            config(**settings, **{name: value})


@pytest.mark.parametrize(
    "name",
    [
        *("critic_learning_rate", "value_clip", "target_kl", "entropy_coef", "beta"),
        *("sapo_temperature_neg", "sapo_temperature_pos", "off_policy_mask_threshold", "top_p", "repetition_penalty"),
        *("weight_decay", "adam_epsilon", "router_aux_loss_coef", "min_p"),
    ],
)
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_coefficients_are_finite_and_not_negative(name, value):
    with pytest.raises(ValueError, match=f"`{name}` must be a finite number"):
        config(**{name: value})
