"""One agent, one turn: exactly `GRPOTrainer`."""

from marft_trl import AgentSpec, MARFTConfig, MARFTTrainer
from marft_trl.tiny import tiny_dataset

import pytest
import torch
from peft import get_peft_model
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

from .helpers import SETTINGS, logged_steps, lora, pairs, shake, varied_reward


FIGURES = ("loss", "grad_norm", "reward", "reward_std", "entropy", "kl", "clip_ratio/region_mean", "num_tokens")
FIGURES += ("completions/mean_length", "completions/clipped_ratio", "frac_reward_zero_std", "learning_rate")
FIGURES += ("entropy_coef",)
# Ours are over all episodes of an evaluation where TRL's are means over batches: `reward_std` and some lengths differ
EVAL_FIGURES = ("loss", "entropy", "kl", "reward", "frac_reward_zero_std", "num_tokens", "policy_loss")
EVAL_FIGURES += tuple(f"clip_ratio/{name}" for name in ("low_mean", "high_mean", "region_mean", "low_min", "high_max"))
EVAL_FIGURES += ("completions/mean_length", "completions/clipped_ratio")
SYNCHRONIZED = {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.5}


def make_trainer(trainer_class, model, tmp_path, settings, **arguments):
    team, config_class = {}, GRPOConfig
    if trainer_class is MARFTTrainer:
        team, config_class = {"agents": [AgentSpec("solo")]}, MARFTConfig
        settings = {"share_prefixes": False, **settings}
    args = config_class(str(tmp_path), **{**SETTINGS, **settings})
    return trainer_class(model=model, args=args, **{"reward_funcs": varied_reward, **team, **arguments})


def run(trainer_class, model, tmp_path, peft_config, conversational=True, **settings):
    settings = {"max_steps": 1 + settings.get("num_iterations", 1), **settings}
    dataset = tiny_dataset(64)
    if conversational:
        dataset = dataset.map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]})
    trainer = make_trainer(trainer_class, model, tmp_path, settings, train_dataset=dataset, peft_config=peft_config)
    trainer.train()
    logs = [{k: log.get(k) for k in FIGURES} for log in logged_steps(trainer)]
    weights = {n.replace(".default.", ".solo."): p.detach() for n, p in trainer.model.named_parameters()}
    return logs, weights


def assert_equals_grpo(model_folder, tmp_path, tolerance, peft=True, **settings):
    config = lora() if peft else None
    their_logs, their_weights = run(GRPOTrainer, model_folder, tmp_path, config, **settings)
    our_logs, our_weights = run(MARFTTrainer, model_folder, tmp_path, config, **settings)
    assert len(their_logs) == len(our_logs) >= 2
    assert any(log["grad_norm"] > 0 for log in their_logs)
    for their_log, our_log in zip(their_logs, our_logs, strict=True):
        for name, value in their_log.items():
            assert our_log[name] == (value if value is None else pytest.approx(value, abs=tolerance)), name
    assert their_weights.keys() == our_weights.keys()
    for name, value in their_weights.items():
        torch.testing.assert_close(our_weights[name], value, rtol=0, atol=tolerance, msg=name)


@pytest.mark.parametrize(
    ("settings", "are_spread"),
    [
        ({"gradient_accumulation_steps": 1}, True),
        ({"gradient_accumulation_steps": 2}, False),
        ({"steps_per_generation": 4, "gradient_accumulation_steps": 2}, True),
        ({"steps_per_generation": 4, "gradient_accumulation_steps": 2, "top_entropy_quantile": 0.5}, False),  # apart
    ],
)
def test_steps_have_the_episodes_of_trls_steps_where_prefixes_are_shared(
    model_folder, tmp_path, monkeypatch, settings, are_spread
):
    """TRL spreads a batch of several optimizer steps over them by a permutation. Within one, groups stay together."""
    args = MARFTConfig(str(tmp_path), **{**SETTINGS, "steps_per_generation": 2, **settings})
    arguments = {"reward_funcs": varied_reward, "train_dataset": tiny_dataset(64), "peft_config": lora()}
    trainer = MARFTTrainer(model=model_folder, args=args, agents=[AgentSpec("solo"), AgentSpec("duo")], **arguments)
    count = 8 * args.steps_per_generation
    order = [(7 * place) % count for place in range(count)]
    monkeypatch.setattr(torch, "randperm", lambda count, **kwargs: torch.tensor(order))
    trainer.model.train()
    slices = trainer.parts.batch_maker.for_training([trainer.train_dataset[row // 4] for row in range(count)])
    slice_episodes = [list(dict.fromkeys(row.episode for row in slice_.rows)) for slice_ in slices]
    assert (slice_episodes == [order[start : start + 8] for start in range(0, count, 8)]) == are_spread
    if not are_spread:
        assert all(len({episode // 4 for episode in episodes}) <= 3 for episodes in slice_episodes)


@pytest.mark.parametrize(
    ("loss_type", "beta", "num_iterations", "peft"), pairs(["dapo", "grpo"], [0.0, 0.1], [1, 2], [True, False])
)
def test_weights_are_bitwise_grpos(model_folder, tmp_path, loss_type, beta, num_iterations, peft):
    settings = {"loss_type": loss_type, "beta": beta, "num_iterations": num_iterations}
    assert_equals_grpo(model_folder, tmp_path, tolerance=0.0, peft=peft, **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"loss_type": "grpo", "entropy_coef": 0.01, "conversational": False},
        pytest.param({"loss_type": "dr_grpo", "scale_rewards": "batch"}, marks=pytest.mark.slow),
        {"loss_type": "cispo", "epsilon_high": 5.0, "multi_objective_aggregation": "normalize_then_sum"},
        {"loss_type": "sapo", "top_p": 0.9, "top_k": 20, "temperature": 0.7, "repetition_penalty": 1.1},
        {"loss_type": "luspo", "importance_sampling_level": "sequence", "gradient_checkpointing": False},
        pytest.param(
            {"loss_type": "vespo", "scale_rewards": "none", "mask_truncated_completions": True}, marks=pytest.mark.slow
        ),
        {"generation_kwargs": {"num_beams": 2}},
        pytest.param({"delta": 1.5, "epsilon_high": 0.3, "num_iterations": 2}, marks=pytest.mark.slow),
        {"off_policy_mask_threshold": 0.5, "num_iterations": 2},
        {"use_adaptive_entropy": True, "entropy_target": 0.3, "entropy_coef": 0.02},
        pytest.param({"top_entropy_quantile": 0.3, "entropy_coef": 0.01, "num_iterations": 2}, marks=pytest.mark.slow),
        {"peft": False, "max_steps": 3, "beta": 0.1, **SYNCHRONIZED},
    ],
    ids=str,
)
def test_other_settings_are_bitwise_grpos(model_folder, tmp_path, settings):
    assert_equals_grpo(model_folder, tmp_path, tolerance=0.0, **settings)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"gradient_accumulation_steps": 2}, marks=pytest.mark.slow),
        {"gradient_accumulation_steps": 2, "loss_type": "grpo", "beta": 0.1},
        {"gradient_accumulation_steps": 2, "loss_type": "bnpo", "entropy_coef": 0.01},
        {"steps_per_generation": 2, "max_steps": 3},
    ],
    ids=str,
)
def test_slices_are_padded_to_their_own_width(model_folder, tmp_path, settings):
    # TRL pads a slice to the width of its generation batch, we to its own: equal up to rounding. SGD, because Adam
    # would normalize gradients that are zero except for rounding.
    assert_equals_grpo(model_folder, tmp_path, tolerance=1e-6, optim="sgd", learning_rate=0.1, **settings)


def test_the_reference_of_a_trained_adapter_is_the_adapter_before_training(model_folder, tmp_path):
    def pretrained():
        torch.manual_seed(1)
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(model_folder), lora())
        shake(model, std=0.02)
        model.config._name_or_path = model_folder
        return model

    their_logs, their_weights = run(GRPOTrainer, pretrained(), tmp_path, None, beta=0.1)
    our_logs, our_weights = run(MARFTTrainer, pretrained(), tmp_path, None, beta=0.1)
    assert their_logs[0]["kl"] == our_logs[0]["kl"] == 0.0
    for name in our_weights:
        torch.testing.assert_close(our_weights[name], their_weights[name], rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    "settings",
    [
        {"beta": 0.1, "steps_per_generation": 2},
        pytest.param({"loss_type": "grpo", "entropy_coef": 0.01}, marks=pytest.mark.slow),
        pytest.param({"num_generations_eval": 2, "loss_type": "dr_grpo"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_evaluations_are_grpos(model_folder, tmp_path, settings):
    """The loss of an evaluation and its other figures, for one set and for several, before and in training."""

    def figures(trainer_class, eval_dataset):
        eval_settings = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8, **settings}
        arguments = {"train_dataset": tiny_dataset(64), "eval_dataset": eval_dataset, "peft_config": lora()}
        trainer = make_trainer(trainer_class, model_folder, tmp_path, eval_settings, **arguments)
        before = trainer.evaluate()
        trainer.train()
        return [before, *(log for log in trainer.state.log_history if any("eval" in key for key in log))]

    for sets in (tiny_dataset(4, seed=1), {"one": tiny_dataset(4, seed=1), "two": tiny_dataset(2, seed=3)}):
        their_logs, our_logs = figures(GRPOTrainer, sets), figures(MARFTTrainer, sets)
        assert len(their_logs) == len(our_logs) >= 3
        for their_log, our_log in zip(their_logs, our_logs, strict=True):
            compared = [key for key in their_log if any(key.endswith(f"_{name}") for name in EVAL_FIGURES)]
            assert len(compared) >= 11 and any(key.endswith("_loss") for key in compared)
            # TRL leaves the name of the set out of most names, so the last set overwrites the others
            named = [name for name in ("one", "two") if f"eval_{name}_loss" in their_log]
            for key in compared:
                if named and not key.startswith(f"eval_{named[-1]}_") and key not in our_log:
                    assert "eval_loss" not in our_log and not key.startswith("eval_one_")
                    our_log[key] = our_log[key.replace("eval_", f"eval_{named[-1]}_")]
                assert our_log[key] == pytest.approx(their_log[key], abs=1e-6, nan_ok=True), key
