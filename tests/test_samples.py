"""Accuracy of several samples of a question, against closed forms and brute force, and the coverage of intervals."""

import itertools
import math
import statistics

from marft_trl import AgentSpec
from marft_trl.reporting import Interval, avg_at_k, interval, maj_at_k, paired_difference, pass_at_k
from marft_trl.reporting.evaluation import by_question, sample_rows, scores, write_samples
from marft_trl.rollout.generator import Generator, SampledTurn
from marft_trl.tiny import exact_answer, tiny_dataset

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .helpers import team_trainer


def majority(votes):
    """Expected score of the most frequent answer among votes `(answer, score of the answer)`."""
    counts = {answer: sum(other == answer for other, _ in votes) for answer, _ in votes if answer is not None}
    if not counts:
        return 0.0
    most = max(counts.values())
    winners = [answer for answer, count in counts.items() if count == most]
    return statistics.fmean(next(score for other, score in votes if other == answer) for answer in winners)


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(right, data):
    k = data.draw(st.integers(1, len(right)))
    subsets = [any(chosen) for chosen in itertools.combinations(right, k)]
    assert pass_at_k(len(right), sum(right), k) == pytest.approx(statistics.fmean(subsets), abs=1e-12)


@settings(max_examples=150)
@given(st.lists(st.sampled_from(["a", "b", "c", "d", None]), min_size=1, max_size=8), st.data())
def test_maj_at_k_is_the_mean_over_subsets(answers, data):
    k = data.draw(st.integers(1, len(answers)))
    of_answer = {"a": 1.0, "b": 0.25, "c": 0.0, "d": 0.0, None: 0.0}
    scores = [of_answer[answer] for answer in answers]
    subsets = [majority(votes) for votes in itertools.combinations(zip(answers, scores, strict=True), k)]
    assert maj_at_k(answers, scores, k) == pytest.approx(statistics.fmean(subsets), abs=1e-12)


def test_maj_at_k_of_many_samples_is_quick():
    answers = [index % 9 for index in range(64)]
    assert 0 <= maj_at_k(answers, [float(answer == 0) for answer in answers], 32) <= 1


IMPOSSIBLE = [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0), (0, 0, 1)]


@pytest.mark.parametrize(
    ("figure", "arguments", "message"),
    [
        *((pass_at_k, counts, "") for counts in IMPOSSIBLE),
        (maj_at_k, (["a", "b"], [1.0], 1), "same length, got 2 and 1"),
        *((avg_at_k, ([1.0, 0.0, 0.5], k), f"`k` must be between 1 and .*, got {k}") for k in (4, 0)),
        (interval, ([],), "shape"),
        (interval, ([[1.0, math.nan]],), "1 of the 2"),
        (interval, ([1.0], 1.0), "confidence"),
        (interval, ([0.5, 2.0],), "from 0.5 to 2, outside `bounds`"),
        (paired_difference, ([[1.0, 0.0]], [[1.0]]), "same seeds and questions"),
    ],
)
def test_figures_that_cannot_be(figure, arguments, message):
    with pytest.raises(ValueError, match=message):
        figure(*arguments)


def test_long_answers_vote_by_all_of_their_text():
    """Programs with the same beginning are different votes, and the file has a short form of each vote."""
    texts = ["x" * 300 + end for end in ("right", "right", "right", "wrong", "other")]
    record = {"row": {"prompt": "q"}, "rewards": {}, "turns": []}
    records = [{**record, "answer": text, "reward": float(text.endswith("right"))} for text in texts]
    rows = sample_rows(records, str, 1.0, None)
    assert by_question(rows, "maj@5") == {rows[0]["question"]: 1.0}
    assert all(len(row["vote"]) < 230 for row in rows)


def test_an_interval_of_a_single_score_is_that_score():
    assert interval([0.25], bounds=None) == Interval(0.25, 0.25, 0.25, 1, 1)


def test_the_interval_of_seeds_is_students():
    # Three seeds 0, 1, 2 of one question: mean 1, standard error 1 / sqrt(3), t(0.975, 2) = 4.303
    estimate = interval([[0.0], [1.0], [2.0]], n_resamples=200_000, bounds=None)
    assert estimate.mean == 1.0
    assert estimate.high - 1 == pytest.approx(4.303 / math.sqrt(3), rel=0.03)
    assert 1 - estimate.low == pytest.approx(4.303 / math.sqrt(3), rel=0.03)


def test_the_interval_of_questions_is_that_of_a_share():
    # 50 of 200 right: the low end of Wald, 0.25 and sqrt(p (1 - p) / 200), and the high one of Agresti and Coull, 52
    # of 204 and sqrt(p (1 - p) / 204)
    estimate = interval([1.0] * 50 + [0.0] * 150, n_resamples=20_000)
    wald, error = math.sqrt(0.25 * 0.75 / 200), math.sqrt(52 / 204 * 152 / 204 / 204)
    assert estimate.low == pytest.approx(0.25 - 1.96 * wald, abs=0.004)
    assert estimate.high == pytest.approx(52 / 204 + 1.96 * error, abs=0.004)
    assert estimate.mean == 0.25


def test_common_difficulty_cancels_in_a_paired_difference():
    draws = np.random.default_rng(0)
    difficulty = draws.random((3, 40))
    difference = paired_difference(difficulty + 0.1, difficulty, bounds=None)
    assert (difference.low, difference.high) == (pytest.approx(0.1), pytest.approx(0.1))
    assert difference.is_clear
    assert interval(difficulty + 0.1, bounds=None).high - interval(difficulty).low > 0.2


def test_equal_scores_of_a_few_questions_say_little():
    # Agresti and Coull: 0 of 10 is 2 of 14; a pair of ten equal scores: deviation sqrt(1 / 12), of twelve
    none, error = interval([0.0] * 10, n_resamples=50_000), math.sqrt(2 / 14 * 12 / 14 / 13)
    assert none[:2] == (0.0, 0.0) and none.high == pytest.approx(2 / 14 + 1.96 * error, abs=0.05)
    pair = paired_difference([1.0] * 10, [1.0] * 10, n_resamples=50_000)  # in steps of a twelfth
    assert pair.high == -pair.low == pytest.approx(1.96 * math.sqrt(1 / 12 / 11), abs=0.09)
    many = paired_difference([1.0] * 200, [1.0] * 200)
    assert many.high < 0.02


def covering(truth, count, make, seed=0):
    draws = np.random.default_rng(seed)
    intervals = [make(draws, seed=number, n_resamples=500) for number in range(count)]
    return sum(estimate.low <= truth <= estimate.high for estimate in intervals)


@pytest.mark.parametrize(
    ("share", "questions", "seeds"),
    [(0.01, 96, 3), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((0.9, 20, 1), (0.98, 96, 5)))],
)
def test_intervals_cover_the_true_share(share, questions, seeds):
    estimate = lambda draws, **options: interval(draws.random((seeds, questions)) < share, **options)  # noqa: E731
    assert covering(share, 100, estimate) >= 88


@pytest.mark.parametrize(
    ("share", "samples", "questions"), [(0.02, 4, 30), pytest.param(0.95, 8, 50, marks=pytest.mark.slow)]
)
def test_intervals_of_questions_with_several_samples_cover_the_true_share(share, samples, questions):
    """At least 93 % of intervals of 95 % contain the true share. All questions are equally hard."""
    estimate = lambda draws, **options: interval(draws.binomial(samples, share, questions) / samples, **options)  # noqa: E731
    assert covering(share, 300, estimate) >= 279


@pytest.mark.parametrize(
    ("better", "worse", "questions", "seeds"),
    [(0.1, 0.0, 10, 1), pytest.param(0.98, 0.9, 96, 3, marks=pytest.mark.slow)],
)
def test_differences_of_shares_near_their_ends_are_covered(better, worse, questions, seeds):
    def estimate(draws, **options):
        return paired_difference(*(draws.random((seeds, questions)) < share for share in (better, worse)), **options)

    assert covering(better - worse, 100, estimate) >= 88


def test_intervals_cover_the_true_difference():
    """Seeds and questions vary, samples are right or wrong: at least 90 of 100 intervals of 95 % hold the truth."""

    def estimate(draws, **options):
        difficulty, arms = draws.normal(0, 0.15, 60), []
        for mean, spread in ((0.6, 0.05), (0.5, 0.08)):
            chances = mean + difficulty + draws.normal(0, spread, (3, 1))
            arms.append(draws.binomial(4, chances.clip(0, 1)) / 4)
        return paired_difference(*arms, **options)

    assert covering(0.1, 100, estimate, seed=3) >= 90


# ---- Evaluations of a trainer ----


class Counting(Generator):
    """A generator that replies by a function of the prompt, and notes the sampling settings of each request."""

    def __init__(self, tokenizer, texts):
        self.tokenizer, self.texts, self.asked = tokenizer, texts, []

    async def generate(self, observed, greedy=False, sampling=None):
        self.asked.append({"greedy": True} if greedy else sampling)
        turns = []
        for request in observed:
            text = self.texts(self.tokenizer.decode(request.ids))
            turns.append(SampledTurn(self.tokenizer(text)["input_ids"] + [self.tokenizer.eos_token_id]))
        return turns

    def holds_stop(self, agent, ids):
        return False

    def settings(self, agent):
        return dict.fromkeys(("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens"), 1)


def alone(model_folder, tmp_path, **settings):
    return team_trainer(
        model_folder, tmp_path, agents=[AgentSpec("solver")], reward_funcs=exact_answer,
        eval_dataset=tiny_dataset(6, seed=1), settings={"num_generations_eval": 4, **settings},
    )  # fmt: skip


def test_an_evaluation_writes_every_sample(model_folder, tmp_path):
    trainer = alone(model_folder, tmp_path, eval_k=[1, 2, 4])
    figures = trainer.evaluate()
    rows = pd.read_json(tmp_path / "evaluations.jsonl", lines=True)
    assert len(rows) == 24 and set(rows["sample"]) == {0, 1, 2, 3} and rows["question"].nunique() == 6
    assert figures["eval_avg@4"] == pytest.approx(rows["right"].mean()) == pytest.approx(figures["eval_reward"])
    for k in (1, 2, 4):
        by_hand = [pass_at_k(4, int(samples["right"].sum()), k) for _, samples in rows.groupby("question")]
        assert figures[f"eval_pass@{k}"] == pytest.approx(np.mean(by_hand))
        assert figures[f"eval_pass@{k}_low"] <= figures[f"eval_pass@{k}"] <= figures[f"eval_pass@{k}_high"]
        votes = [maj_at_k(list(samples["vote"]), list(samples["right"]), k) for _, samples in rows.groupby("question")]
        assert figures[f"eval_maj@{k}"] == pytest.approx(np.mean(votes))
    assert figures["eval_pass@1"] == pytest.approx(figures["eval_maj@1"])
    assert trainer.state.log_history[-1]["eval_pass@4"] == figures["eval_pass@4"]
    assert (rows["seed"] == trainer.args.seed).all() and (rows["tokens"] > 0).all()


def test_an_evaluation_of_the_same_step_replaces_the_former(model_folder, tmp_path):
    trainer = alone(model_folder, tmp_path, eval_k=[1])
    trainer.evaluate()
    trainer.state.global_step = 5
    trainer.evaluate()
    trainer.evaluate(tiny_dataset(2, seed=9), metric_key_prefix="other")
    trainer.evaluate()
    rows = pd.read_json(tmp_path / "evaluations.jsonl", lines=True)
    assert rows.groupby(["set", "step"]).size().to_dict() == {("eval", 0): 24, ("eval", 5): 24, ("other", 5): 8}
    trainer.state.global_step = 0  # a resumed run evaluates again
    trainer.evaluate()
    rows = pd.read_json(tmp_path / "evaluations.jsonl", lines=True)
    assert rows.groupby(["set", "step"]).size().to_dict() == {("eval", 0): 24, ("other", 5): 8}


def test_settings_of_an_evaluation_apply_to_all_sets_of_that_call_only(model_folder, tmp_path):
    trainer = alone(model_folder, tmp_path, eval_sampling={"temperature": 0.5, "top_p": 0.9})
    generator = Counting(trainer.processing_class, lambda text: "1")
    trainer.parts.runner.generator = generator
    sets = {"one": tiny_dataset(2, seed=1), "two": tiny_dataset(4, seed=2)}
    figures = trainer.evaluate(sets, num_samples=2, sampling={"temperature": 0.0}, k=[2])
    assert {tuple(sampling) for sampling in generator.asked} == {("greedy",)}
    assert {"eval_one_pass@2", "eval_two_maj@2", "eval_one_avg@2"} <= set(figures)
    generator.asked.clear()
    figures = trainer.evaluate()
    assert all(sampling == {"temperature": 0.5, "top_p": 0.9} for sampling in generator.asked)
    assert not any("@" in name for name in figures)
    trainer.train()
    assert generator.asked[-1] is None  # training samples as before


def test_greedy_evaluation_is_that_of_a_greedy_team(model_folder, tmp_path):
    trainer = alone(model_folder, tmp_path, eval_sampling={"temperature": 0.0})
    questions = tiny_dataset(6, seed=1)
    answers = [episode.answer.text for episode in trainer.team.run(questions.to_list(), greedy=True)]
    right = exact_answer(answers, questions["solution"])
    assert trainer.evaluate()["eval_reward"] == pytest.approx(np.mean(right))


def test_a_low_temperature_is_all_but_greedy(model_folder, tmp_path):
    trainer = alone(model_folder, tmp_path)
    trainer.model.get_base_model().model.norm.weight.data *= 1000  # so that no two tokens are almost equally likely

    def completions(**options):
        episodes = trainer.team.run(tiny_dataset(6, seed=1).to_list(), **options)
        return [episode.turns[0].completion_ids for episode in episodes]

    assert completions(sampling={"temperature": 1e-4}, seed=3) == completions(greedy=True)
    assert completions(sampling={"temperature": 5e3}, seed=3) != completions(greedy=True)


def test_eval_vote_and_eval_right_by(model_folder, tmp_path):
    trainer = team_trainer(
        model_folder, tmp_path, agents=[AgentSpec("solver")], reward_funcs=[exact_answer, half],
        eval_dataset=tiny_dataset(3, seed=1), eval_vote=lambda text: None,
        settings={"num_generations_eval": 2, "eval_k": [2], "eval_right_by": "half", "eval_right_at": 0.5},
    )  # fmt: skip
    figures = trainer.evaluate()
    assert (figures["eval_pass@2"], figures["eval_maj@2"], figures["eval_avg@2"]) == (1.0, 0.0, 1.0)


def half(completions, **kwargs):
    return [0.5 for _ in completions]


def test_the_best_model_by_a_metric_of_samples(model_folder, tmp_path):
    trainer = alone(
        model_folder, tmp_path, eval_k=[2], max_steps=2, eval_strategy="steps", eval_steps=1, save_steps=1,
        save_strategy="steps", load_best_model_at_end=True, metric_for_best_model="pass@2", greater_is_better=True,
    )  # fmt: skip
    trainer.train()
    rates = [log["eval_pass@2"] for log in trainer.state.log_history if "eval_pass@2" in log]
    assert trainer.state.best_metric == max(rates)


def test_scores_of_several_runs(tmp_path):
    for seed in (0, 1):
        samples = [("x", 0, 1.0), ("x", 1, 0.0), ("y", 0, 1.0), ("y", 1, float(seed))]
        rows = [dict(zip(("question", "sample", "right"), sample, strict=True), vote="a") for sample in samples]
        write_samples(tmp_path / str(seed), rows, "eval", 8, seed)
    folders = [tmp_path / "0", tmp_path / "1"]
    assert scores(folders).tolist() == [[0.5, 0.5], [0.5, 1.0]]
    assert scores(folders, "pass@2").tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert interval(scores(folders)).seeds == 2
    write_samples(tmp_path / "1", rows[:2], "eval", 8, 1)
    for step, message in ((None, "were evaluated on different questions"), (3, "no evaluation")):
        with pytest.raises(ValueError, match=message):
            scores(folders, step=step)
    write_samples(tmp_path / "1", rows, "test", 8, 1)
    with pytest.raises(ValueError, match="eval, test"):
        scores(folders)
    with pytest.raises(ValueError, match="measure"):
        scores(folders[:1], "best@2")


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"eval_k": [8]}, ValueError, "num_generations_eval=8"),
        ({"eval_k": [0]}, ValueError, "at least 1"),
        ({"eval_k": 4}, ValueError, "list of integers"),
        ({"eval_sampling": {"temprature": 1}}, ValueError, "temperature"),
        ({"eval_sampling": {"top_p": 1.5}}, ValueError, "from 0 to 1"),
        ({"eval_sampling": {"temperature": -1}}, ValueError, "at least 0"),
        ({"eval_sampling": {"min_p": "half"}}, ValueError, "must be a number"),
        ({"eval_sampling": 0.5}, TypeError, "mapping"),
        ({"eval_right_at": 0.5}, ValueError, "eval_k=None"),
        ({"eval_right_by": "exactanswer", "eval_k": [1]}, ValueError, "exact_answer"),
    ],
)
def test_settings_that_cannot_work(model_folder, tmp_path, settings, error, message):
    with pytest.raises(error, match=message):
        alone(model_folder, tmp_path, **settings)


def test_a_number_of_samples_that_batches_cannot_have(model_folder, tmp_path):
    trainer = alone(model_folder, tmp_path)
    with pytest.raises(ValueError, match="per_device_eval_batch_size"):
        trainer.evaluate(num_samples=7)
    with pytest.raises(ValueError, match="num_generations_eval=8"):
        trainer.evaluate(k=[8])


def test_an_interval_that_ends_at_zero_is_not_clear():
    assert not Interval(0.1, 0.0, 0.2, 1, 10).is_clear and not Interval(-0.1, -0.2, 0.0, 1, 10).is_clear
    assert Interval(0.1, 0.01, 0.2, 1, 10).is_clear and Interval(-0.1, -0.2, -0.01, 1, 10).is_clear


def test_options_of_a_paired_difference_are_those_of_an_interval():
    scores, others = np.random.default_rng(0).random((2, 1, 30))
    differences = {confidence: paired_difference(scores, others, confidence=confidence) for confidence in (0.5, 0.95)}
    assert differences[0.5].high - differences[0.5].low < 0.6 * (differences[0.95].high - differences[0.95].low)
    assert paired_difference(scores, others, seed=1) != paired_difference(scores, others, seed=2)
