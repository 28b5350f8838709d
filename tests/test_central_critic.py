"""What the critic reads, and the scale of what it predicts."""

import math

from marft_trl import AgentSpec
from marft_trl.algorithms.rows import Row
from marft_trl.extras.apps import ExternalApp
from marft_trl.learning.critic_learner import ValueScale
from marft_trl.rollout.generator import SampledTurn
from marft_trl.workflows import EnvironmentLoop

import pytest
import torch

from .helpers import by_hand, team_trainer
from .test_applications import Client
from .test_own_returns import Alternating, run, worth
from .test_parts import one_process


PPO = {"advantage": "gae", "num_generations": 1, "critic_learning_rate": 1e-3}


def row(critic, targets):
    tokens = torch.zeros(max(len(targets), 1), dtype=torch.long)
    return Row("a", "a", tokens, tokens, critic=critic, value_targets=torch.tensor(targets))


def test_the_scale_of_values_by_hand():
    """Bias-corrected as in Adam: after one batch, the moments of the targets. Unknown targets do not count."""
    scale = ValueScale(True, ["one", "two"], one_process(), decay=0.5)
    outputs = torch.tensor([0.0, 1.0])
    assert scale.get_moments("one") == (0.0, 1.0) and scale.read("one", outputs) is outputs
    scale.update([row("one", [100.0, 104.0]), row("one", [102.0]), row("two", [float("nan")])])
    mean, deviation = scale.get_moments("one")
    assert mean == 102.0 and math.isclose(deviation, (8 / 3) ** 0.5, rel_tol=1e-6)
    assert scale.get_moments("two") == (0.0, 1.0)
    assert scale.read("one", outputs).tolist() == pytest.approx([102.0, 102 + (8 / 3) ** 0.5])
    torch.testing.assert_close(scale.normalized("one", scale.read("one", outputs)), outputs, atol=1e-4, rtol=1e-4)
    scale.update([row("one", [110.0])])
    mean, deviation = scale.get_moments("one")
    assert math.isclose(mean, (0.25 * 102 + 0.5 * 110) / 0.75)
    square = (0.25 * (102**2 + 8 / 3) + 0.5 * 110**2) / 0.75
    assert math.isclose(deviation, (square - mean**2) ** 0.5, rel_tol=1e-6)
    again = ValueScale(True, ["one", "two"], one_process(), decay=0.5)
    again.load_state_dict(scale.state_dict())
    assert again.get_moments("one") == scale.get_moments("one")


def test_the_scale_is_no_smaller_than_the_noise_of_a_critic():
    """As in `ValueNorm`: a variance of 0.01, and a memory of 100,000 batches."""
    scale = ValueScale(True, ["one"], one_process())
    scale.update([row("one", [0.02, -0.02])])
    assert scale.get_moments("one") == (0.0, pytest.approx(0.1))
    for _ in range(3):
        scale.update([row("one", [10.0, 12.0])])
    expected = pytest.approx(33 / 4, rel=1e-4), pytest.approx((366 / 4 - (33 / 4) ** 2) ** 0.5, rel=1e-3)
    assert scale.get_moments("one") == expected


def test_a_scale_saved_by_an_earlier_version_is_converted():
    """Batches of that version had 1,000 times the weight, so new batches would never have counted."""
    batches = [[row("one", [value, value + 2.0])] for value in (1.0, 2.0, 3.0, 20.0, 21.0)]
    whole, earlier, later = (ValueScale(True, ["one"], one_process(), *decay) for decay in ((), (0.99,), ()))
    for number, batch in enumerate(batches):
        whole.update(batch)
        if number < 3:
            earlier.update(batch)
    for state in (earlier.state_dict(), earlier.state_dict()["moments"]):
        later.load_state_dict(state)
        for batch in batches[3:]:
            later.update(batch)
        assert later.get_moments("one") == pytest.approx(whole.get_moments("one"), rel=2e-3)


def test_the_clip_of_values_is_about_the_head_alone(model_folder, tmp_path):
    """No value is clipped before the first update of a batch, whatever the scale: rewards of 100 +- 10 that rise."""
    batches = []

    def reward(completions, **kwargs):
        batches.append(len(completions))
        middle = 100 + 50 * len(batches)
        return [middle + (10 if sum(map(ord, str(completion))) % 2 else -10) for completion in completions]

    settings = {**PPO, "critic": "shared", "level": "action", "normalize_values": True, "value_clip": 0.2}
    settings |= {"max_steps": 3}
    trainer = team_trainer(model_folder, tmp_path, reward_funcs=reward, settings=settings)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "critic/clip_ratio" in entry]
    assert [entry["critic/clip_ratio"] for entry in logs] == [0.0, 0.0, 0.0]


@pytest.mark.slow
def test_normalized_values_take_large_rewards(model_folder, tmp_path, size=1e3):
    """After the first batch, values are of the size of the rewards, which heads of that size never reach."""

    class Sized(Alternating):
        def pay(self, is_done):
            return dict.fromkeys(("left", "right"), size * (20 + worth(self.turns)) if is_done else 0.0)

    workflow = EnvironmentLoop(Sized, turns="one")
    settings = {**PPO, "critic": "per_agent", "level": "action", "normalize_values": True, "gae_lambda": 1.0}
    first, second = run(model_folder, tmp_path, workflow, steps=2, **settings)
    for rollout, rows in (first, second):
        for episode, episode_rows in zip(rollout.episodes, rows, strict=True):
            for row in episode_rows:
                expected = torch.full((1,), float(sum(episode.own[row.agent])))
                torch.testing.assert_close(row.value_targets, expected, rtol=1e-4, atol=1e-5 * size)
    values = [row.old_values.item() / size for episode_rows in second[1] for row in episode_rows]
    assert all(17 - 3 < value < 23 + 3 for value in values)


@pytest.mark.parametrize("critic", ["shared", pytest.param("frozen", marks=pytest.mark.slow)])
def test_a_central_critic_reads_the_turns_of_other_agents(model_folder, tmp_path, critic):
    """Agents see only their own turns; the critic reads all turns before the joint step."""
    workflow = EnvironmentLoop(Alternating, turns="one", shows="own", horizon=4)
    settings = {**PPO, "num_generations": 4, "critic": critic, "critic_sees": "history", "num_iterations": 2}
    ((rollout, rows),) = run(model_folder, tmp_path, workflow, steps=2, **settings)
    for episode, episode_rows in zip(rollout.episodes, rows, strict=True):
        for turn, row in zip(episode.turns, episode_rows, strict=True):
            assert turn.prompt_ids == tuple(row.prompt_ids.tolist())  # the policy is scored on its own prompt
            assert (len(row.critic_prompt_ids) > len(turn.prompt_ids)) == (turn.index > 0)
    for first in range(0, len(rows), 4):  # episodes of one prompt: right has seen the same, whatever left has said
        seconds = [episode_rows[1] for episode_rows in rows[first : first + 4]]
        first_texts = {rollout.episodes[first + index].turns[0].text for index in range(4)}
        assert len({tuple(row.prompt_ids.tolist()) for row in seconds}) == 1
        assert len({tuple(row.critic_prompt_ids.tolist()) for row in seconds}) == len(first_texts)
    assert all({row.agent for row in episode_rows if row.last_value} == {"left", "right"} for episode_rows in rows)


def test_a_central_critic_reads_the_messages_of_an_application(model_folder, tmp_path):
    """Also those for turns before, and each once, however often they are sent again."""

    async def app(row, endpoint):
        ask = Client(endpoint)
        code = {"role": "user", "content": "the code is 17"}
        plan = await ask("ann", code)
        await ask("ben", {"role": "user", "content": "what did she say?"})
        await ask("ann", code, {"role": "assistant", "content": plan.content}, {"role": "user", "content": "again"})

    settings = {**PPO, "critic": "shared", "critic_sees": "history", "per_device_train_batch_size": 1}
    agents = [AgentSpec("ann"), AgentSpec("ben")]
    trainer = team_trainer(model_folder, tmp_path, agents=agents, workflow=ExternalApp(app), settings=settings)
    trainer.parts.runner.generator.generate = by_hand(lambda agents, prompt_ids: [SampledTurn([5, 6]) for _ in agents])
    (slice_,) = trainer.parts.batch_maker.for_training([{"prompt": "x"}])
    rows = sorted(slice_.rows, key=lambda row: row.number)
    read = [trainer.processing_class.decode(row.critic_prompt_ids) for row in rows]
    counts = [[text.count(phrase) for phrase in ("the code is 17", "what did she say?", "again")] for text in read]
    assert counts == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
