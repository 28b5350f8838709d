"""`marft-a` and `marft-t` against the original's formulas, written anew from its code, on the same random rollouts."""

import numpy as np
import pytest
import torch

from marft_trl.tiny import tiny_dataset

from .helpers import team_trainer, varied_reward


GAMMA, LAMBDA, CLIP, HUBER, ENTROPY = 0.99, 0.95, 0.2, 10.0, 0.01


def originals_gae(rewards, values):
    """
    Backwards over agents, and within an agent over tokens: `values[e][a]` has one entry per action (a list of one) or
    per token; the reward of an agent comes after its last entry. One environment step, which ends the episode.
    """
    advantages = []
    for episode_rewards, episode_values in zip(rewards, values, strict=True):
        running, following, collected = 0.0, 0.0, []
        for reward, its in reversed(list(zip(episode_rewards, episode_values, strict=True))):
            mine = []
            for position in reversed(range(len(its))):
                gained = reward if position == len(its) - 1 else 0.0
                delta = gained + GAMMA * following - its[position]
                running = delta + GAMMA * LAMBDA * running
                following = its[position]
                mine.insert(0, running)
            collected.insert(0, mine)
        advantages.append(collected)
    return advantages


def originals_huber(error):
    size = np.abs(error)
    return (size <= HUBER) * error**2 / 2 + (size > HUBER) * HUBER * (size - HUBER / 2)


def rolled_out(model_folder, folder, preset):
    """A trainer whose critic and policies have moved on since they sampled, its slice, and its rows by episode."""
    trainer = team_trainer(
        model_folder,
        folder,
        reward_funcs=varied_reward,
        settings={"preset": preset, "per_device_train_batch_size": 8, "num_generations": 1, "learning_rate": 1e-3},
    )
    torch.manual_seed(0)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    (slice_,) = trainer._generate_and_score_completions(tiny_dataset(8).to_list())
    rewards = trainer._metrics["train"]["reward"]
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.02)
        for parameter in trainer.critic.heads.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    by_episode: dict[int, list] = {}
    for row in slice_.rows:
        by_episode.setdefault(row.episode, []).append(row)
    return trainer, slice_, by_episode, rewards


def present(trainer, row):
    """Log-probabilities, entropies and values under the present weights, by plain passes."""
    ids = torch.cat([row.prompt_ids, row.completion_ids]).unsqueeze(0)
    first = len(row.prompt_ids) - 1
    with torch.no_grad():
        trainer.policies.activate(row.agent)
        scores = torch.log_softmax(trainer.model.get_base_model()(input_ids=ids).logits[0, first:-1], dim=-1)
        with trainer.policies.base():
            hidden = trainer.model.get_base_model().model(input_ids=ids).last_hidden_state[0, first:-1]
        values = trainer.critic.heads["_critic"](hidden).squeeze(-1)
    logps = scores.gather(1, row.completion_ids.unsqueeze(1)).squeeze(1)
    return logps.numpy(), -(scores.exp() * scores).sum(-1).numpy(), values.numpy()


@pytest.mark.parametrize("preset", ["marft-a", "marft-t"])
def test_numbers_of_the_original(model_folder, tmp_path, preset):
    trainer, slice_, by_episode, _ = rolled_out(model_folder, tmp_path, preset)
    is_action = preset == "marft-a"
    episodes = [sorted(rows, key=lambda row: row.agent == "actor") for rows in by_episode.values()]
    answers = [trainer._tokenizer.decode(rows[1].completion_ids, skip_special_tokens=True) for rows in episodes]
    team = varied_reward(answers)
    rewards = [[0.0, reward] for reward in team]  # to the last agent
    old = [[row.old_values.tolist() for row in rows] for rows in episodes]
    raw = originals_gae(rewards, old)

    # advantages, standardized over everything that counts, and targets
    everything = np.array([a for rows in raw for its in rows for a in its])
    mean, std = np.nanmean(everything), np.nanstd(everything)
    rows = [row for its in episodes for row in its]
    flat_raw, flat_old = [its for its_rows in raw for its in its_rows], [its for its_rows in old for its in its_rows]
    for row, its, values in zip(rows, flat_raw, flat_old, strict=True):
        got = np.atleast_1d(np.asarray(row.advantage))
        np.testing.assert_allclose(got, (np.array(its) - mean) / (std + 1e-8), atol=1e-4)
        np.testing.assert_allclose(row.value_targets.numpy(), np.array(its) + np.array(values), atol=1e-4)

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
        policy[row.agent] = policy.get(row.agent, 0.0) + surrogate.sum()
        entropy[row.agent] = entropy.get(row.agent, 0.0) + entropies.sum()
        counts[row.agent] = counts.get(row.agent, 0) + len(surrogate)
        before, target = row.old_values.numpy(), row.value_targets.numpy()
        near = before + np.clip(values - before, -CLIP, CLIP)
        value += np.maximum(originals_huber(target - near), originals_huber(target - values)).sum()
        value_count += len(values)

    got = dict.fromkeys(counts, 0.0)
    for batch in trainer._micro_batches(slice_.rows):
        got[batch.agent] += trainer._micro_batch_loss(trainer.model, batch, slice_).item()
    got_value = sum(
        trainer._value_loss(trainer.model, batch, slice_).item() for batch in trainer._value_batches(slice_.rows)
    )
    for name, count in counts.items():
        want = policy[name] / count - ENTROPY * entropy[name] / count
        assert got[name] == pytest.approx(want, abs=2e-4), name
    # the original takes one mean over the positions of all agents; ours of each agent, weighted alike, is that
    total = sum(counts.values())
    joint = (sum(policy.values()) - ENTROPY * sum(entropy.values())) / total
    assert sum(got[name] * count / total for name, count in counts.items()) == pytest.approx(joint, abs=2e-4)
    assert got_value == pytest.approx(value / value_count, rel=1e-4)
