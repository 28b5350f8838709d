"""Episodes as datasets for TRL's other trainers, which train on them here."""

from marft_trl import AgentSpec
from marft_trl.team.as_dataset import to_dataset

import pytest
import torch
from datasets import Dataset
from peft import PeftModel
from transformers import AutoModelForCausalLM
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer

from .helpers import ended, lora, team_trainer, tiny_dataset


NAMES = ["reasoner", "actor"]
CUT = (1, 6)


@pytest.fixture(scope="module")
def played(tmp_path_factory, model_folder):
    trainer = team_trainer(model_folder, tmp_path_factory.mktemp("played"))
    rows = list(tiny_dataset(3))
    episodes = ended(trainer.team.run(rows, num_samples=4, seed=0), cut=CUT)
    rewards = [float(7 * index % 5) for index in range(len(episodes))]
    return trainer.team, episodes, rewards


def settings(cls, folder, **options):
    return cls(str(folder), max_steps=1, report_to="none", use_cpu=True, bf16=False, save_strategy="no", **options)


def trains(cls, model_folder, args, dataset, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    trainer = cls(model, args=args, train_dataset=dataset, processing_class=tokenizer, peft_config=lora())
    trainer.train()
    assert trainer.state.global_step == 1
    return trainer


def turns_of(episodes, agent):
    return [turn for episode in episodes for turn in episode.turns if turn.agent == agent and not turn.truncated]


def test_sft_learns_the_sampled_tokens_after_the_observation(played, model_folder, tmp_path, tokenizer):
    team, episodes, rewards = played
    dataset = team.to_dataset(episodes, agent="actor", rewards=rewards, best=2)
    groups = [range(start, start + 4) for start in range(0, 12, 4)]
    best_indices = [index for group in groups for index in sorted(group, key=lambda index: -rewards[index])[:2]]
    turns = turns_of([episodes[index] for index in best_indices], "actor")
    assert len(dataset) == len(turns) > 0 and set(dataset["agent"]) == {"actor"}
    assert list(dataset["reward"]) == [rewards[index] for index in best_indices if index not in CUT]
    trainer = trains(SFTTrainer, model_folder, settings(SFTConfig, tmp_path), dataset, tokenizer)
    for row, turn in zip(trainer.train_dataset, turns, strict=True):
        ids, length = [*turn.prompt_ids, *turn.completion_ids], len(turn.prompt_ids)
        assert row["input_ids"][: len(ids)] == ids
        assert row["labels"][:length] == [-100] * length and row["labels"][length : len(ids)] == ids[length:]
    trainer.save_model(str(tmp_path / "actor"))
    base = AutoModelForCausalLM.from_pretrained(model_folder)
    model = PeftModel.from_pretrained(base, tmp_path / "actor", adapter_name="actor", is_trainable=True)
    again = team_trainer(model, tmp_path / "again")
    assert again.policies.get_origin("actor") == "loaded" and again.policies.get_origin("reasoner") == "fresh"
    trained_weights = [parameter for name, parameter in trainer.model.named_parameters() if "lora_B" in name]
    loaded_weights = [parameter for name, parameter in again.policies.parameters("actor").items() if "lora_B" in name]
    assert any(parameter.any() for parameter in trained_weights)
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(trained_weights, loaded_weights, strict=True))


def test_conversations_and_texts(played):
    team, episodes, rewards = played
    dataset = team.to_dataset(episodes, "sft", rewards=rewards, threshold=2.0)
    good = [episode for episode, reward in zip(episodes, rewards, strict=True) if reward >= 2.0]
    turns = [turn for agent in NAMES for turn in turns_of(good, agent)]
    conversations = [(row["messages"][-1]["content"], row["messages"][:-1]) for row in dataset]
    assert sorted(conversations, key=str) == sorted(((turn.raw_text, turn.observation) for turn in turns), key=str)


def test_dpo_pairs_turns_that_answer_the_same(played, model_folder, tmp_path, tokenizer):
    team, episodes, rewards = played
    dataset = team.to_dataset(episodes, "dpo", "reasoner", rewards=rewards)
    for row in dataset:
        group = [
            (reward, turn)
            for episode, reward in zip(episodes, rewards, strict=True)
            for turn in episode.turns
            if turn.agent == "reasoner" and turn.observation == row["prompt"]
        ]
        scores = {turn.raw_text: reward for reward, turn in sorted(group, key=lambda pair: pair[0])}
        good, bad = (row[name][0]["content"] for name in ("chosen", "rejected"))
        assert scores[good] == max(reward for reward, turn in group if not turn.truncated)
        assert min(reward for reward, turn in group if turn.raw_text == bad) == min(reward for reward, _ in group)
    assert len(dataset) <= 3
    trains(DPOTrainer, model_folder, settings(DPOConfig, tmp_path, per_device_train_batch_size=2), dataset, tokenizer)


def test_kto_labels_turns_by_their_prompt_s_mean_or_a_threshold(played, model_folder, tmp_path, tokenizer):
    team, episodes, rewards = played
    dataset = team.to_dataset(episodes, "kto", "actor", rewards=rewards)
    assert set(dataset.column_names) == {"prompt", "completion", "label", "agent"}
    means = [sum(rewards[start : start + 4]) / 4 for start in range(0, 12, 4)]
    expected = [
        rewards[index] > means[index // 4]
        for index, episode in enumerate(episodes)
        for turn in episode.turns
        if turn.agent == "actor" and not (rewards[index] > means[index // 4] and turn.truncated)
    ]
    assert dataset["label"] == expected and len(set(expected)) == 2
    above = team.to_dataset(episodes, "kto", "actor", rewards=rewards, threshold=0.0)
    assert set(above["label"]) == {True}
    trains(KTOTrainer, model_folder, settings(KTOConfig, tmp_path, per_device_train_batch_size=4), dataset, tokenizer)


def test_earned_rewards_are_used_and_agents_without_a_model_are_left_out(model_folder, tmp_path):
    agents = [AgentSpec("user", reply=lambda messages: "2 + 2?"), AgentSpec("actor")]
    trainer = team_trainer(model_folder, tmp_path, agents=agents)
    episodes = trainer.team.run(list(tiny_dataset(2)), num_samples=2, seed=0)
    dataset = trainer.team.to_dataset(episodes)
    assert isinstance(dataset, Dataset) and set(dataset["agent"]) == {"actor"}
    message = "`agent='user'` is not an agent with a policy; the agents with a policy are 'actor'"
    with pytest.raises(ValueError, match=message):
        trainer.team.to_dataset(episodes, agent="user")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "dpp", "rewards": []}, "'dpp'. Did you mean 'dpo'"),
        ({"agent": "actr"}, "Did you mean 'actor'"),
        ({"best": 0}, "`best` must be an integer of at least 1, got 0"),
        ({"kind": "kto", "best": 1, "rewards": [0.0] * 12}, "needs worse ones"),
        ({"kind": "kto"}, "pass `rewards`, a number for each episode"),
        ({"rewards": [1.0]}, "each of the 12 episodes, got 1 numbers"),
        ({"rewards": [float("nan")] * 12}, "not all of them finite"),
        ({"rewards": [1.0] * 12, "threshold": 2.0}, "lower `threshold`"),
        ({}, "all 24 were truncated at their length limit.*Raise `max_completion_length`"),
        ({"kind": "dpo", "rewards": [1.0] * 12}, "No pair is left"),
        ({"episodes": []}, r"`episodes` must be episodes that `team.run\(...\)` returned"),
        ({"episodes": ["an answer"]}, r"`episodes` must be episodes that `team.run\(...\)` returned"),
    ],
    ids=str,
)
def test_invalid_arguments_of_to_dataset_raise(played, arguments, message):
    team, episodes, _ = played
    episodes = episodes if arguments else ended(episodes, cut=range(12))
    with pytest.raises(ValueError, match=message):
        team.to_dataset(**{"episodes": episodes, **arguments})


def test_episodes_that_earned_the_same_are_not_desirable_and_options_of_the_template_stand_in_rows(played):
    team, episodes, _ = played
    assert set(team.to_dataset(episodes, "kto", rewards=[1.0] * 12)["label"]) == {False}
    dataset = to_dataset(episodes, "sft", NAMES, template={"enable_thinking": False})
    assert dataset[0]["chat_template_kwargs"] == {"enable_thinking": False}
