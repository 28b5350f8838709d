"""`marft-a` and `marft-t` against the original's formulas, rewritten from its code, on the same random rollouts."""

from dataclasses import replace

from marft_trl import AgentSpec
from marft_trl.algorithms.baselines import BASELINES, Baseline
from marft_trl.tiny import tiny_dataset
from marft_trl.workflows import EnvironmentLoop

import numpy as np
import pytest
import torch
from transformers import TrainerCallback

from .helpers import logged_steps, only_slice, plain_logps, plain_scores, shake, team_trainer, varied_reward


GAMMA, LAMBDA, CLIP, HUBER, ENTROPY = 0.99, 0.95, 0.2, 10.0, 0.01


def originals_gae(rewards, values):
    """
    Backwards over agents, and within an agent over tokens: `values[e][a]` has one entry per action (a list of one) or
    per token; the reward of an agent comes after its last entry. One environment step, which ends the episode.
    """
    advantages = []
    for episode_rewards, episode_values in zip(rewards, values, strict=True):
        running, following, collected = 0.0, 0.0, []
        for reward, agent_values in reversed(list(zip(episode_rewards, episode_values, strict=True))):
            agent_advantages = []
            for position in reversed(range(len(agent_values))):
                token_reward = reward if position == len(agent_values) - 1 else 0.0
                delta = token_reward + GAMMA * following - agent_values[position]
                running = delta + GAMMA * LAMBDA * running
                following = agent_values[position]
                agent_advantages.insert(0, running)
            collected.insert(0, agent_advantages)
        advantages.append(collected)
    return advantages


def originals_huber(error):
    size = np.abs(error)
    return (size <= HUBER) * error**2 / 2 + (size > HUBER) * HUBER * (size - HUBER / 2)


def moved_on(model_folder, folder, rows, **settings):
    """A trainer whose policies have moved on since they sampled, and its one slice."""
    trainer = team_trainer(model_folder, folder, settings=settings)
    torch.manual_seed(0)
    slice_ = only_slice(trainer, rows)
    shake(trainer.model, 0.02)
    return trainer, slice_


@torch.no_grad()
def present(trainer, row):
    scores = plain_scores(trainer, row)
    ids = torch.cat([row.prompt_ids, row.completion_ids]).unsqueeze(0)
    with trainer.policies.base():
        hidden = trainer.model.get_base_model().model(input_ids=ids).last_hidden_state
    values = trainer.critic.heads["_critic"](hidden[0, len(row.prompt_ids) - 1 : -1]).squeeze(-1)
    logps = scores.gather(1, row.completion_ids.unsqueeze(1)).squeeze(1)
    return logps.numpy(), -(scores.exp() * scores).sum(-1).numpy(), values.numpy()


@pytest.mark.parametrize("preset", ["marft-a", "marft-t"])
def test_numbers_of_the_original(model_folder, tmp_path, preset):
    trainer, slice_ = moved_on(model_folder, tmp_path, tiny_dataset(8).to_list(), preset=preset, num_generations=1)
    with torch.no_grad():
        for parameter in trainer.critic.heads.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    by_episode: dict[int, list] = {}
    for row in slice_.rows:
        by_episode.setdefault(row.episode, []).append(row)
    is_action = preset == "marft-a"
    episodes = [sorted(rows, key=lambda row: row.agent == "actor") for rows in by_episode.values()]
    answers = [trainer.processing_class.decode(rows[1].completion_ids, skip_special_tokens=True) for rows in episodes]
    rewards = [[0.0, reward] for reward in varied_reward(answers)]  # to the last agent
    old = [[row.old_values.tolist() for row in rows] for rows in episodes]
    raw = originals_gae(rewards, old)

    # advantages, standardized over everything that counts, and targets
    rows, raw, old = ([row for episode in nested for row in episode] for nested in (episodes, raw, old))
    everything = np.concatenate(raw)
    mean, std = np.nanmean(everything), np.nanstd(everything)
    for row, advantages, values in zip(rows, map(np.array, raw), map(np.array, old), strict=True):
        row_advantages = np.atleast_1d(np.asarray(row.advantage))
        np.testing.assert_allclose(row_advantages, (advantages - mean) / (std + 1e-8), atol=1e-4)
        np.testing.assert_allclose(row.value_targets.numpy(), advantages + values, atol=1e-4)

    # losses with weights that have moved on
    policy, entropy, value, counts, value_count = {}, {}, 0.0, {}, 0
    for row in rows:
        logps, entropies, values = present(trainer, row)
        logps_old, advantage = row.old_per_token_logps.numpy(), np.atleast_1d(np.asarray(row.advantage))
        log_ratio = logps - logps_old
        if is_action:
            log_ratio, entropies, values = log_ratio.sum(keepdims=True), entropies.mean(keepdims=True), values[:1]
        ratio = np.exp(log_ratio)
        surrogate = np.maximum(-np.clip(ratio, 1 - CLIP, 1 + CLIP) * advantage, -ratio * advantage)
        for totals, amount in ((policy, surrogate.sum()), (entropy, entropies.sum()), (counts, len(surrogate))):
            totals[row.agent] = totals.get(row.agent, 0) + amount
        before, target = row.old_values.numpy(), row.value_targets.numpy()
        near = before + np.clip(values - before, -CLIP, CLIP)
        value += np.maximum(originals_huber(target - near), originals_huber(target - values)).sum()
        value_count += len(values)

    def loss_of(learning) -> float:
        """The loss where only these adapters, or parts of the critic, learn."""
        slice_loss = trainer.parts.loss.slice_loss
        return slice_loss(trainer.model, slice_, frozenset(learning), trainer.accelerator.backward).item()

    losses = {name: loss_of([trainer.policies.get_adapter(name)]) for name in counts}
    value_loss = loss_of(trainer.critic.parts)
    for name, count in counts.items():
        expected = policy[name] / count - ENTROPY * entropy[name] / count
        assert losses[name] == pytest.approx(expected, abs=2e-4), name
    # the original takes one mean over the positions of all agents: the mean of our losses, weighted by positions
    total = sum(counts.values())
    joint = (sum(policy.values()) - ENTROPY * sum(entropy.values())) / total
    assert sum(losses[name] * count / total for name, count in counts.items()) == pytest.approx(joint, abs=2e-4)
    assert value_loss == pytest.approx(value / value_count, rel=1e-4)


def group_rows(model_folder, folder, **settings):
    rows = [row for row in tiny_dataset(2).to_list() for _ in range(4)]
    trainer, slice_ = moved_on(model_folder, folder, rows, num_iterations=2, **settings)
    assert len({row.advantage for row in slice_.rows}) > 2
    return trainer, slice_


def gradients_of(trainer):
    gradients = {n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None}
    trainer.model.zero_grad()
    return gradients


def gradients_of_loss(trainer, slice_):
    trainer.accelerator.backward(trainer.compute_loss(trainer.model, slice_))
    return gradients_of(trainer)


def assert_same_gradients(trainer, slice_, loss_of_row):
    """The gradients of each agent are those of the mean of a formula over its rows."""
    gradients, expected = gradients_of_loss(trainer, slice_), {}
    for agent in ("reasoner", "actor"):
        rows = [row for row in slice_.rows if row.agent == agent]
        (sum(map(loss_of_row, rows)) / len(rows)).backward()
        expected |= {n: g for n, g in gradients_of(trainer).items() if f".{agent}." in n and g.any()}
    assert len(expected) >= 16 and {n for n, g in gradients.items() if g.any()} == set(expected)
    for name, gradient in expected.items():
        assert (gradients[name] - gradient).norm() <= 1e-4 * gradient.norm(), name


def test_magrpo_is_the_loss_of_comlrl(model_folder, tmp_path):
    """
    CoMLRL 1.4.3, `magrpo.py`: advantages are returns less their mean over the group, over their deviation (:1620); the
    loss of an agent is the mean over its samples of minus the summed log-probability times the advantage (:1687), with
    neither ratio nor clip, also on samples of an older policy. Its code leaves the last token of a completion out.
    """
    trainer, slice_ = group_rows(model_folder, tmp_path, preset="magrpo")
    assert all(row.old_per_token_logps is None for row in slice_.rows)  # nothing is scored or kept for a ratio
    other = [torch.full((len(row.completion_ids),), -3.0) for row in slice_.rows]  # they would not matter either
    rows = [replace(row, old_per_token_logps=logps) for row, logps in zip(slice_.rows, other, strict=True)]
    by_prompt: dict[tuple, list] = {}
    for row in rows:
        if row.agent == "reasoner":
            by_prompt.setdefault(tuple(row.prompt_ids.tolist()), []).append(row.advantage)
    for group in by_prompt.values():  # standardized within the group, with Bessel's correction and 1e-4 as in TRL
        advantages = torch.tensor(group, dtype=torch.float64)
        assert advantages.mean().abs() < 1e-5 and (advantages.std() == 0 or 0.99 < advantages.std() < 1.0)
    slice_ = replace(slice_, rows=rows)
    assert_same_gradients(trainer, slice_, lambda row: -row.advantage * plain_logps(trainer, row).sum())


def test_the_return_of_magrpo_is_the_reward_from_the_turn_on(model_folder, tmp_path, monkeypatch):
    class Rounds:
        def reset(self, **row):
            self.rounds = 0

        def step(self, turns):
            self.rounds += 1
            return "go on", float(10**self.rounds), self.rounds == 2

    settings = {"preset": "magrpo", "scale_rewards": "none", "num_generations": 2, "per_device_train_batch_size": 2}
    team = {"agents": [AgentSpec("solo")], "workflow": EnvironmentLoop(Rounds), "reward_funcs": None}
    trainer = team_trainer(model_folder, tmp_path, settings=settings, **team)
    compared = []

    def spy(samples, scale):
        compared.extend(samples.returns.tolist())
        return BASELINES["none"].function(samples, scale)

    monkeypatch.setitem(BASELINES, trainer.args.advantage, Baseline(trainer.args.advantage, spy))
    only_slice(trainer, [tiny_dataset(1)[0]] * 2)
    assert compared == [110.0, 100.0] * 2


@pytest.mark.parametrize("settings", [{"preset": "grpo"}, {"level": "action", "beta": 0.1}], ids=str)
def test_grpo_has_the_kl_of_the_paper(model_folder, tmp_path, settings):
    """
    2402.03300, eq. 3 and 4: clipped ratios, means over tokens, and `beta * (r - log r - 1)`, r = ref / policy. At
    action level, the KL of a token is not weighed by the ratio of its turn.
    """
    trainer, slice_ = group_rows(model_folder, tmp_path, **settings)
    beta, epsilon = trainer.beta, trainer.args.epsilon
    assert beta == settings.get("beta", 0.04) and not trainer.args.use_bias_correction_kl

    def loss(row):
        logps = plain_logps(trainer, row)
        log_ratio = logps - row.old_per_token_logps
        ratio = (log_ratio.sum() if "level" in settings else log_ratio).exp()
        gain = torch.min(ratio * row.advantage, ratio.clamp(1 - epsilon, 1 + epsilon) * row.advantage)
        change = row.ref_per_token_logps - logps
        return beta * (change.exp() - change - 1).mean() - gain.mean()

    assert_same_gradients(trainer, slice_, loss)


def test_tokens_of_high_entropy_do_not_depend_on_how_rows_are_cut(model_folder, tmp_path):
    trainer, slice_ = group_rows(model_folder, tmp_path, top_entropy_quantile=0.3, loss_type="dapo")
    expected = gradients_of_loss(trainer, slice_)
    trainer.parts.batcher.max_tokens = 90  # several micro-batches of each agent
    batches = [batch.agent for batch in trainer.parts.batcher.cut(slice_.rows)]
    assert batches.count("reasoner") > 1 and batches.count("actor") > 1
    gradients = gradients_of_loss(trainer, slice_)
    thresholds = trainer.parts.log_probs.high_entropy_thresholds(slice_.rows, 0.3, trainer.parts.processes)
    assert set(thresholds) == {"reasoner", "actor"}
    for name, gradient in expected.items():
        assert (gradients[name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-9, name
    trainer.top_entropy_quantile = trainer.args.top_entropy_quantile = 1.0
    whole = gradients_of_loss(trainer, slice_)
    assert any((g - expected[n]).norm() > 1e-2 * g.norm() for n, g in whole.items())


def test_the_references_of_adapters_follow_by_hand(model_folder, tmp_path):
    agents = [AgentSpec("first", system_prompt="x"), AgentSpec("second"), AgentSpec("third", trainable=False)]
    settings = {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.25, "beta": 0.1}
    settings |= {"max_steps": 4, "save_strategy": "steps", "save_steps": 3}
    trainer = team_trainer(model_folder, tmp_path, agents=agents, settings=settings)

    def weights():
        parameters = {agent.name: trainer.policies.parameters(agent.name).values() for agent in agents}
        return {f"{name}.{i}": p.detach().clone() for name, values in parameters.items() for i, p in enumerate(values)}

    expected, history = weights(), []

    class Note(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            history.append(weights())

    trainer.callback_handler.callbacks.insert(0, Note())
    trainer.train()
    logs = logged_steps(trainer)
    assert logs[0]["kl"] == 0.0 and logs[1]["kl"] > 0
    for policy in (history[1], history[3]):
        mixed = {key: 0.25 * policy[key] + 0.75 * reference for key, reference in expected.items()}
        expected = {key: expected[key] if key.startswith("third") else mixed[key] for key in expected}
    references = trainer.policies.references()
    assert references.keys() == expected.keys()
    for key, reference in references.items():
        torch.testing.assert_close(reference, expected[key], rtol=1e-5, atol=1e-8)
    resumed = team_trainer(model_folder, tmp_path, agents=agents, settings=settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    for key, reference in resumed.policies.references().items():
        assert torch.equal(reference, references[key]), key


@pytest.mark.parametrize("advantage", ["turn", "turn_itself"])
def test_candidates_are_worth_their_episode_or_themselves_as_answers(model_folder, tmp_path, advantage):
    scored = []

    def reward(completions, turns, **kwargs):
        scored.append([episode_turns[-1].agent for episode_turns in turns])
        return [float(len(text)) for text in completions]

    settings = {"advantage": advantage, "turn_candidates": 3, "num_generations": 1, "per_device_train_batch_size": 2}
    trainer = team_trainer(model_folder, tmp_path, reward_funcs=reward, settings=settings)
    trainer.model.train()
    rollout = trainer.parts.rollouts.run(tiny_dataset(2).to_list(), training=True)
    last = {agent for agents in scored[:-1] for agent in agents}  # the last call scores the episodes themselves
    assert last == ({"actor"} if advantage == "turn" else {"reasoner", "actor"})
    for node in rollout.nodes:
        lengths = [float(len(turn.text)) for turn in node.turns]
        if advantage == "turn_itself" or node.turns[0].agent == "actor":
            assert node.returns == lengths
        else:
            assert node.returns != lengths
