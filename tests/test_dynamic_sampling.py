"""Groups without a signal are replaced by groups of further prompts."""

import math

from marft_trl import Workflow
from marft_trl.rollout import dynamic_sampling
from marft_trl.tiny import tiny_dataset

import pytest
from datasets import Dataset, IterableDataset

from .helpers import StopAt, config, logged_steps, moved, moved_by_training, team_trainer, varied_reward, weights


def reward_of(*names):
    """Only questions about these people earn a reward, which differs between completions."""

    def some_reward(prompts, completions, log_extra=None, **kwargs):
        if log_extra is not None:
            log_extra("asked", [str(prompt) for prompt in prompts])
        counts = [any(name in str(prompt) for name in names) for prompt in prompts]
        return [score * is_rewarded for is_rewarded, score in zip(counts, varied_reward(completions), strict=True)]

    return some_reward


@pytest.fixture(autouse=True)
def _as_in_the_package(monkeypatch):
    """Restore the limit, which tests change."""
    monkeypatch.setattr(dynamic_sampling, "MOST_PROMPTS", dynamic_sampling.MOST_PROMPTS)


def trainer_with(model, folder, reward, callbacks=None, dataset=None, most=3.0, workflow=None, **settings):
    dynamic_sampling.MOST_PROMPTS = most
    settings = {"dynamic_sampling": True, "per_device_train_batch_size": 16, "max_steps": 3, **settings}
    arguments = {"train_dataset": dataset or tiny_dataset(64), "callbacks": callbacks, "workflow": workflow}
    return team_trainer(model, folder, settings=settings, reward_funcs=reward, **arguments)


def trained_rollouts(trainer):
    rollouts, original = [], trainer.parts.reporter.rollout

    def record(rollout, *args):
        rollouts.append(rollout)
        return original(rollout, *args)

    trainer.parts.reporter.rollout = record
    return rollouts


def test_batches_are_filled_with_groups_that_differ(model_folder, tmp_path):
    scores, base_reward = {}, reward_of("Ann", "Ben", "Cat")

    def recording_reward(prompts, completions, **kwargs):
        rewards = base_reward(prompts, completions)
        scores.update(zip(zip(map(str, prompts), map(str, completions), strict=True), rewards, strict=True))
        return rewards

    trainer = trainer_with(model_folder, tmp_path, recording_reward, most=8.0)
    rollouts = trained_rollouts(trainer)
    trainer.train()
    for rollout in rollouts:
        assert [episode.index for episode in rollout.episodes] == list(range(16))
        for start in range(0, 16, 4):
            group = rollout.episodes[start : start + 4]
            assert len({episode.row["prompt"] for episode in group}) == 1
            assert any(name in group[0].row["prompt"] for name in ("Ann", "Ben", "Cat"))
            assert len(set(rollout.rewards[start : start + 4].tolist())) > 1
        for episode, reward in zip(rollout.episodes, rollout.rewards.tolist(), strict=True):
            assert reward == pytest.approx(scores[str(episode.prompt), episode.answer.text])
    for step in logged_steps(trainer):
        assert step["dynamic_sampling/filled"] == 1
        # metrics cover all sampled groups, not only the chosen ones
        assert step["frac_reward_zero_std"] == pytest.approx(1 - step["dynamic_sampling/with_signal"])
    drawn = [step["dynamic_sampling/prompts"] for step in logged_steps(trainer)]
    assert min(drawn) >= 1 and max(drawn) > 1


@pytest.mark.parametrize("most", [2.5, dynamic_sampling.MOST_PROMPTS])
def test_sampling_stops_at_the_limit_of_prompts(model_folder, tmp_path, most):
    trainer = trainer_with(model_folder, tmp_path, reward_of(), most=most, max_steps=1)
    assert not moved_by_training(trainer)
    (step,) = logged_steps(trainer)
    drawn = 2.5 if most == 2.5 else 3.0
    assert step["dynamic_sampling/prompts"] == drawn and step["dynamic_sampling/filled"] == 0
    assert step["frac_rows_without_signal"] == 1


@pytest.mark.slow
def test_nothing_more_is_drawn_where_all_groups_differ(model_folder, tmp_path):
    def different(completions, **kwargs):
        return [float(index) for index in range(len(completions))]

    on = trainer_with(model_folder, tmp_path / "on", different, max_steps=2)
    on.train()
    off = trainer_with(model_folder, tmp_path / "off", different, dynamic_sampling=False, max_steps=2)
    off.train()
    assert not moved(weights(on), weights(off))
    for on_step, off_step in zip(logged_steps(on), logged_steps(off), strict=True):
        assert on_step["dynamic_sampling/prompts"] == 1
        same = {name for name in off_step if "time" not in name and "second" not in name}
        assert {name: on_step[name] for name in same} == {name: off_step[name] for name in same}


def test_columns_of_reward_functions_stay_with_their_episodes_and_all_tokens_are_counted(model_folder, tmp_path):
    trainer = trainer_with(model_folder, tmp_path, reward_of("Ann", "Ben"), log_completions=True, max_steps=1)
    rollouts, tables, sampled = trained_rollouts(trainer), [], []
    fill_table, generate = trainer.parts.state.fill_table, trainer.parts.runner.generator.generate

    def record_table(prompts, completions, advantages, rewards, extra):
        tables.append(extra)
        return fill_table(prompts, completions, advantages, rewards, extra)

    async def counting(requests, **options):
        turns = await generate(requests, **options)
        sampled.append(sum(len(sequence.ids) for sequence in [*requests, *turns]))
        return turns

    trainer.parts.state.fill_table = record_table
    trainer.parts.runner.generator.generate = counting
    trainer.train()
    (step,) = logged_steps(trainer)
    assert step["num_tokens"] == sum(sampled) and step["dynamic_sampling/prompts"] > 1
    (rollout,) = rollouts
    asked_prompts = next(table["asked"] for table in tables if table.get("asked"))
    expected = [str(episode.row["prompt"]) for episode in rollout.episodes for _ in episode.turns]
    assert list(asked_prompts) == expected and rollout.drawn is not None


@pytest.mark.slow
@pytest.mark.parametrize("advantage", ["c3", "turn"])
def test_candidates_move_with_their_episodes(model_folder, tmp_path, advantage):
    settings = {"advantage": advantage, "turn_candidates": 2, "num_generations": 1}
    settings |= {"per_device_train_batch_size": 4, "max_steps": 2, "most": 6.0}
    trainer = trainer_with(model_folder, tmp_path, reward_of("Ann", "Ben", "Cat"), **settings)
    rollouts = trained_rollouts(trainer)
    trainer.train()
    for rollout in rollouts:
        for index, episode in enumerate(rollout.episodes):
            nodes = [node for node in rollout.nodes if node.episode == index]
            assert len(nodes) == 2 and any(len(set(node.returns)) > 1 for node in nodes)
            for turn, node in zip(episode.turns, nodes, strict=True):
                assert turn.completion_ids in [candidate.completion_ids for candidate in node.turns]
                assert {turn.prompt_ids} == {candidate.prompt_ids for candidate in node.turns}
    assert any(step["dynamic_sampling/prompts"] > 1 for step in logged_steps(trainer))


@pytest.mark.slow
def test_a_resumed_run_draws_the_same_prompts(model_folder, tmp_path):
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 1, "num_train_epochs": 100}

    def make(folder, callbacks=None):
        reward = reward_of("Ann", "Ben")
        return trainer_with(model_folder, tmp_path / folder, reward, callbacks, tiny_dataset(8), **settings)

    whole = make("whole")
    whole.train()
    make("cut", [StopAt(2)]).train()
    resumed = make("cut")
    resumed.train(resume_from_checkpoint=True)
    assert not moved(weights(whole), weights(resumed))
    numbers = [[step["dynamic_sampling/prompts"] for step in logged_steps(trainer)] for trainer in (whole, resumed)]
    assert numbers[0] == numbers[1] and max(numbers[0]) > 1


def test_further_prompts_are_not_repeated_before_all_were_drawn(model_folder, tmp_path):
    dataset = Dataset.from_dict({"prompt": [f"Question {number}" for number in range(8)]})
    trainer = trainer_with(model_folder, tmp_path, reward_of(), dataset=dataset, max_steps=1)
    batches, original = [], trainer.parts.rollouts.run

    def record(rows, training, further=False, mode=None):
        batches.append([row["prompt"] for row in rows])
        return original(rows, training)

    trainer.parts.rollouts.run = record
    trainer.train()
    first, *further = batches
    assert len(set(first)) == 4 and all(batch == sorted(batch, key=batch.index) for batch in batches)
    drawn = [prompt for rows in further for prompt in rows[::4]]
    assert len(drawn) == 8 and len(set(drawn)) == 8


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"advantage": "none"}, "the same reward, but with `advantage='none'` such episodes still give a gradient"),
        ({"advantage": "gae", "critic": "shared"}, "but with `advantage='gae'` such episodes still give a gradient"),
        ({"credit": "removed"}, "with `credit='removed'` their turns still differ"),
        ({"credit": "per_step"}, "with `credit='per_step'` their turns still differ"),
        ({"credit": "step_discount", "credit_discount": 0.9}, "step_discount"),
    ],
    ids=str,
)
def test_incompatible_settings_are_refused(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **{"dynamic_sampling": True, **settings})


def test_streams_are_refused(model_folder, tmp_path):
    stream = IterableDataset.from_generator(lambda: iter([{"prompt": "x"}] * 8))
    with pytest.raises(ValueError, match="which a streamed `train_dataset` does not support"):
        trainer_with(model_folder, tmp_path, varied_reward, dataset=stream)


def test_own_returns_are_a_signal(model_folder, tmp_path):
    """Rewards by name may cancel in the team's sum and still differ between episodes."""

    class Rivals(Workflow):
        earns = True

        async def run(self, episode):
            turns = [await episode.turn("reasoner", sees=[]), await episode.turn("actor", sees=[])]
            gain = float(len(turns[0].text) % 3)
            episode.earn(turns[1], {"reasoner": gain, "actor": -gain})

    settings = {"max_steps": 1, "returns": "agent", "per_device_train_batch_size": 8}
    trainer = trainer_with(model_folder, tmp_path, None, workflow=Rivals(), most=4.0, **settings)
    assert moved_by_training(trainer)
    (step,) = logged_steps(trainer)
    assert step["dynamic_sampling/with_signal"] > 0 and math.isfinite(step["loss"])


def test_sums_that_were_earned_at_different_turns_teach_something(model_folder, tmp_path):
    class Earning(Workflow):
        earns = True
        count = 0

        async def run(self, episode):
            turns = [await episode.turn("reasoner"), await episode.turn("actor")]
            Earning.count += 1
            episode.earn(turns[Earning.count % 2], 1.0)

    settings = {"credit_kind": "rewards", "max_steps": 1, "per_device_train_batch_size": 8}
    trainer = trainer_with(model_folder, tmp_path, None, workflow=Earning(), **settings)
    trainer.train()
    (step,) = logged_steps(trainer)
    assert step["dynamic_sampling/prompts"] == step["dynamic_sampling/with_signal"] == 1.0


@pytest.mark.parametrize(
    ("advantage", "gamma", "signal"), [("group", 1.0, 0.0), ("agent", 0.5, 0.0), ("group", 0.5, 1.0)]
)
def test_equal_rewards_of_episodes_of_other_lengths_teach_nothing(model_folder, tmp_path, advantage, gamma, signal):
    """Unless the turns of different agents are compared, whose returns a discount makes different."""

    class Lengths(Workflow):
        count = 0

        async def run(self, episode):
            Lengths.count += 1
            if advantage == "group" and Lengths.count % 2:
                await episode.turn("reasoner")
            await episode.turn("reasoner")
            await episode.turn("actor")

    def same(completions, **kwargs):
        return [0.3] * len(completions)

    settings = {"credit_kind": "rewards", "advantage": advantage, "gamma": gamma, "per_device_train_batch_size": 8}
    trainer = trainer_with(model_folder, tmp_path, same, workflow=Lengths(), most=1.0, max_steps=1, **settings)
    trainer.train()
    (step,) = logged_steps(trainer)
    assert step["dynamic_sampling/with_signal"] == signal == 1 - step["frac_rows_without_signal"]
