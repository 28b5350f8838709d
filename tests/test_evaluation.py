"""Evaluation measures the team on every question once, whatever the batches."""

from marft_trl.reporting import team_exact_match
from marft_trl.reporting.evaluation import check_eval_metrics
from marft_trl.tiny import exact_answer, tiny_dataset

import evaluate
import numpy as np
import pandas as pd
import pytest
import torch
from datasets import DatasetDict, IterableDataset
from hypothesis import given
from hypothesis import strategies as st

from .helpers import logged_steps, moved, only_slice, team_trainer, weights


METRIC = team_exact_match()
PPO = {"advantage": "gae", "critic": "shared", "num_generations": 1}
BEST = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
BEST |= {"load_best_model_at_end": True}


def evaluated(model_folder, folder, count=4, settings=None, **arguments):
    """A trainer that evaluates on `count` questions, four at a time and each once."""
    settings = {"num_generations_eval": 1, "per_device_eval_batch_size": 4, **(settings or {})}
    return team_trainer(
        model_folder, folder, settings=settings, **{"eval_dataset": tiny_dataset(count, seed=1), **arguments}
    )


def test_exact_match_by_hand_and_by_resampling_whole_questions():
    assert isinstance(METRIC, evaluate.EvaluationModule)
    result = METRIC.compute(predictions=["1", " 2\n", "3", "x"], references=["1", "2", "4", "5"])
    assert result["exact_match"] == 0.5
    assert 0 <= result["exact_match_low"] < 0.5 < result["exact_match_high"] <= 1
    many = {"predictions": ["1"] * 50 + ["0"] * 50, "references": ["1"] * 100}
    alone = METRIC.compute(**many)
    # 50 questions asked twice: half as many independent questions, a wider interval
    grouped = METRIC.compute(**many, groups=[i // 2 for i in range(100)])
    assert alone["exact_match"] == grouped["exact_match"] == 0.5
    width, grouped_width = (result["exact_match_high"] - result["exact_match_low"] for result in (alone, grouped))
    assert width == pytest.approx(2 * 1.96 * 0.05, abs=0.02)
    assert grouped_width / width == pytest.approx(np.sqrt(2), abs=0.15)


@pytest.mark.slow
@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("ab")), min_size=1, max_size=20))
def test_the_interval_holds_the_share(pairs):
    predictions, references = zip(*pairs, strict=True)
    result = METRIC.compute(predictions=predictions, references=references)
    share = sum(p == r for p, r in pairs) / len(pairs)
    assert result["exact_match"] == pytest.approx(share)
    assert result["exact_match_low"] <= share + 1e-9 and share - 1e-9 <= result["exact_match_high"]


def test_every_question_counts_once(model_folder, tmp_path):
    prompts = []

    def spy(answers, prompt, solution, turns, **columns):
        prompts.extend(prompt)
        assert all(answer == episode_turns[-1].text for answer, episode_turns in zip(answers, turns, strict=True))
        return {"answers": len(answers), "right": np.mean(exact_answer(answers, solution))}

    arguments = {"reward_funcs": exact_answer, "eval_metrics": [spy, METRIC], "settings": {"num_generations_eval": 2}}
    trainer = evaluated(model_folder, tmp_path, count=9, **arguments)
    figures = trainer.evaluate()
    assert sorted(prompts) == sorted(2 * list(trainer.eval_dataset["prompt"])) and figures["eval_answers"] == 18
    assert figures["eval_reward"] == pytest.approx(figures["eval_exact_match"]) == pytest.approx(figures["eval_right"])
    assert figures["eval_agents/reasoner/turns"] == 1 and np.isfinite(figures["eval_loss"])
    assert figures["eval_agents/actor/completions/mean_length"] <= 6
    assert trainer.state.log_history[-1]["eval_reward"] == figures["eval_reward"]


@pytest.mark.slow
def test_several_and_streamed_evaluation_sets(model_folder, tmp_path):
    stream = IterableDataset.from_generator(lambda: iter(tiny_dataset(5, seed=3).to_list()))
    sets = {"held_out": tiny_dataset(4, seed=1), "stream": stream}
    figures = evaluated(model_folder, tmp_path, eval_dataset=sets).evaluate()
    assert "eval_held_out_reward" in figures and "eval_stream_agents/actor/reward" in figures
    as_dict = DatasetDict({"one": tiny_dataset(4, seed=1)})
    assert "eval_one_reward" in evaluated(model_folder, tmp_path, eval_dataset=as_dict).evaluate()


@pytest.mark.slow
def test_the_best_metric_is_that_of_a_set(model_folder, tmp_path):
    sets = {"easy": tiny_dataset(4, seed=1), "hard": tiny_dataset(4, seed=3)}

    def make(metric):
        settings = {**BEST, "greater_is_better": True, "max_steps": 1, "metric_for_best_model": metric}
        return evaluated(model_folder, tmp_path / str(metric), eval_dataset=sets, settings=settings)

    for metric in ("reward", "eval_reward", None):
        with pytest.raises(ValueError, match="'easy_(reward|loss)'"):
            make(metric)
    trainer = make("hard_reward")
    trainer.train()
    best = [entry["eval_hard_reward"] for entry in trainer.state.log_history if "eval_hard_reward" in entry]
    assert trainer.state.best_metric == max(best)


@pytest.mark.slow
def test_metrics_that_rewards_log_in_evaluation_are_reported_there(model_folder, tmp_path):
    def reward(completions, log_metric, log_extra, **kwargs):
        log_metric("length", float(len(completions)))
        log_extra("shout", [c.upper() for c in completions])
        return [float(i) for i in range(len(completions))]

    trainer = evaluated(model_folder, tmp_path, reward_funcs=reward, settings={"max_steps": 1})
    assert trainer.evaluate()["eval_length"] == 4.0
    trainer.train()
    assert logged_steps(trainer)[0]["length"] == 8.0

    def careless(completions, log_extra, **kwargs):
        log_extra("note", ["one"])
        return [0.0] * len(completions)

    with pytest.raises(ValueError, match="`log_extra.'note', ....` got 1 values for 8 completions"):
        team_trainer(model_folder, tmp_path, reward_funcs=careless).train()


def test_a_missing_reference_column_is_named(model_folder, tmp_path):
    with pytest.raises(ValueError, match=r"`eval_dataset` has no column 'answer'; it has \['prompt', 'solution'\]"):
        evaluated(model_folder, tmp_path, eval_metrics=METRIC, settings={"eval_reference_column": "answer"})


def test_the_table_has_every_evaluated_turn_once(model_folder, tmp_path):
    settings = {"per_device_eval_batch_size": 2, "log_completions": True, "max_steps": 1}
    settings |= {"eval_strategy": "steps", "eval_steps": 1}
    trainer = evaluated(model_folder, tmp_path, count=5, settings=settings)
    trainer.evaluate()
    trainer.evaluate()
    table = pd.read_parquet(tmp_path / "completions" / "completions_00000.parquet")
    assert list(zip(table["episode"], table["turn"], strict=True)) == [(e, t) for e in range(5) for t in range(2)]
    assert set(table["mode"]) == {"eval"}
    trainer.train()
    # The log at the end of training has no new turns
    assert set(pd.read_parquet(tmp_path / "completions" / "completions_00001.parquet")["mode"]) == {"train", "eval"}


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"target_kl": 1e-3, "num_iterations": 2}, marks=pytest.mark.slow),
        pytest.param(
            {"use_adaptive_entropy": True, "entropy_target": 0.3, "entropy_coef": 0.02}, marks=pytest.mark.slow
        ),
        {**PPO, "critic_learning_rate": 1e-2, "logging_steps": 2},  # evaluates between two logs
        pytest.param({"advantage": "turn", "turn_candidates": 2, "num_generations": 1}, marks=pytest.mark.slow),
        pytest.param({"credit": "counterfactual"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_evaluating_changes_no_update(model_folder, tmp_path, settings):
    """Its losses leave no trace in an update, and the random state is restored after sampling."""
    figures = []

    def train(evaluates):
        when = {"eval_strategy": "steps", "eval_steps": 1} if evaluates else {}
        trainer = evaluated(model_folder, tmp_path, settings={**settings, **when})
        evaluate = trainer.evaluate

        def without_trace(*args, **kwargs):
            with torch.random.fork_rng():
                figures.append(evaluate(*args, **kwargs))
            return figures[-1]

        trainer.evaluate = without_trace
        trainer.train()
        logs = logged_steps(trainer)
        return weights(trainer), [{k: v for k, v in entry.items() if k != "step_time"} for entry in logs]

    (plain_weights, plain_logs), (evaluated_weights, logs) = train(False), train(True)
    assert len(figures) == 2 and all("eval_loss" in log and log["eval_entropy"] > 0 for log in figures)
    assert not moved(plain_weights, evaluated_weights)
    assert len(logs) == 2 // settings.get("logging_steps", 1) and logs == plain_logs


@pytest.mark.slow
def test_the_loss_of_an_evaluation_is_that_of_training_on_the_same_episodes(model_folder, tmp_path):
    """With several agents, micro-batches and a critic."""
    settings = {**PPO, "per_device_train_batch_size": 8, "level": "action", "normalize_advantages": "none"}
    trainer = team_trainer(model_folder, tmp_path, settings=settings)
    rows = [dict(row) for row in tiny_dataset(8)]
    trainer.model.eval()
    rollout = trainer.parts.rollouts.run(rows, training=False)
    trainer.parts.rollouts.run = lambda rows, training, mode=None: rollout
    loss, _, _ = trainer.prediction_step(trainer.model, rows, True)
    trainer.args.max_tokens_per_micro_batch = trainer.parts.batcher.max_tokens = 150
    again, _, _ = trainer.prediction_step(trainer.model, rows, True)
    assert again.item() == pytest.approx(loss.item(), rel=1e-5)
    training_loss = trainer.compute_loss(trainer.model, only_slice(trainer, rows))
    assert training_loss.item() == pytest.approx(loss.item(), rel=1e-4)


@pytest.mark.slow
def test_the_best_model_has_the_lowest_evaluation_loss_by_default(model_folder, tmp_path):
    trainer = evaluated(model_folder, tmp_path, settings={**BEST, "num_generations_eval": 2, "beta": 0.1})
    trainer.train()
    losses = {e["step"]: e["eval_loss"] for e in trainer.state.log_history if "eval_loss" in e}
    best = min(losses, key=losses.get)
    assert len(losses) == 2 and trainer.state.best_model_checkpoint.endswith(f"checkpoint-{best}")


def test_a_stream_without_column_names_may_have_references():
    stream = IterableDataset.from_generator(lambda: iter([{"prompt": "x"}]))
    assert check_eval_metrics(METRIC, stream, "solution") == [METRIC]
