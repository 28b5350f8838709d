"""Train with a custom generator, critic, level, loss, credit rule and baseline."""

from dataclasses import dataclass

from marft_trl import MARFTConfig, MARFTTrainer
from marft_trl.algorithms.baselines import BASELINES, CREDITS, Baseline, CreditRule
from marft_trl.algorithms.critics import CRITICS, Critic
from marft_trl.algorithms.rows import LEVELS, ActionLevel
from marft_trl.rollout.generator import Generator, SampledTurn
from marft_trl.seams.trl import LOSSES, LossType

import pytest
import torch
from torch import nn

from . import helpers
from .helpers import moved_by_training, team_trainer


PPO = {"advantage": "gae", "num_generations": 1, "critic_learning_rate": 1e-2}


def train(model_folder, tmp_path, settings, prepare=lambda trainer: None):
    trainer = team_trainer(model_folder, tmp_path, settings=settings)
    prepare(trainer)
    assert {name.split(".")[-2] for name in moved_by_training(trainer)} >= {"reasoner", "actor"}
    return trainer


class WordList(Generator):
    """A generator without a model: every agent replies with words of a list, in turn. The word "77" is truncated."""

    def __init__(self, tokenizer, texts):
        self._tokenizer, self._texts, self._asked = tokenizer, texts, 0

    async def generate(self, observed, greedy=False, sampling=None):
        sampled = []
        for observation in observed:
            texts = self._texts[observation.agent]
            text = texts[self._asked % len(texts)]
            self._asked += 1
            end = [] if text == "77" else [self._tokenizer.eos_token_id]
            sampled.append(SampledTurn([*self._tokenizer(text)["input_ids"], *end]))
        return sampled

    def holds_stop(self, agent, ids):
        return False

    def settings(self, agent):
        return {"max_new_tokens": 16, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None}


def test_a_custom_generator(model_folder, tmp_path):
    texts = {"reasoner": ["1", "2", "3"], "actor": ["4", "55", "6", "77"]}

    def prepare(trainer):
        trainer.parts.runner.generator = WordList(trainer.processing_class, texts)

    trainer = train(model_folder, tmp_path, {"mask_truncated_completions": True}, prepare)
    rows = rows_of(trainer)
    completions = [trainer.processing_class.decode(row.completion_ids, skip_special_tokens=True) for row in rows]
    assert {"77"} < set(completions) <= {"1", "2", "3", "4", "55", "6", "77"} and len(set(completions)) > 2
    assert [row.counts for row in rows] == [text != "77" for text in completions]
    ends = [int(row.completion_ids[-1]) == trainer.processing_class.eos_token_id for row in rows]
    assert ends == [row.counts for row in rows]


def rows_of(trainer):
    return [row for slice_ in trainer.parts.state.slices for row in slice_.rows]


class TwoLayers(Critic):
    name = "two_layers"

    def make_head(self, width):
        return nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, 1))


def test_a_custom_critic(model_folder, tmp_path, monkeypatch):
    monkeypatch.setitem(CRITICS, "two_layers", TwoLayers)
    heads = {}

    def prepare(trainer):
        heads.update({name: p.detach().clone() for name, p in trainer.critic.heads.named_parameters()})

    trainer = train(model_folder, tmp_path, {**PPO, "critic": "two_layers"}, prepare)
    now = dict(trainer.critic.heads.named_parameters())
    assert len(now) == 4 and all(not now[name].equal(before) for name, before in heads.items())
    trainer.save_model()
    again = team_trainer(model_folder, tmp_path, settings={**PPO, "critic": "two_layers"})
    again.critic.load(tmp_path)
    assert all(parameter.equal(now[name]) for name, parameter in again.critic.heads.named_parameters())
    with pytest.raises(ValueError, match="must be one of .*'two_layers'"):
        MARFTConfig(str(tmp_path), **PPO, critic="three_layers")


@dataclass(frozen=True)
class RootLevel(ActionLevel):
    """Turns as actions whose log-probability is divided by the root of their length."""

    def divisors(self, rows):
        return torch.tensor([max(len(row.completion_ids), 1) ** 0.5 for row in rows])


def test_a_custom_level(model_folder, tmp_path, monkeypatch):
    monkeypatch.setitem(LEVELS, "root", RootLevel)
    trainer = train(model_folder, tmp_path, {"level": "root", "loss_type": "grpo", "num_iterations": 2})
    assert trainer.importance_sampling_level == "sequence"
    # The ratio of the second update, by hand
    row = rows_of(trainer)[0]
    trainer.model.train()
    with torch.no_grad():
        (logps,) = trainer.parts.log_probs.compute_log_probs([row])
        batch = {"completion_mask": torch.ones(1, len(logps), dtype=torch.long)}
        batch["old_per_token_logps"] = row.old_per_token_logps.unsqueeze(0)
        loss_inputs = RootLevel().seen_by_loss(logps.unsqueeze(0), torch.zeros(1, len(logps)), batch, [row])
    expected = (logps - row.old_per_token_logps).sum() / len(logps) ** 0.5
    assert expected != 0
    torch.testing.assert_close(loss_inputs.log_ratios, expected.unsqueeze(0))
    torch.testing.assert_close(logps - loss_inputs.old_logps[0], expected.expand(len(logps)), rtol=1e-4, atol=1e-6)


def test_a_custom_level_is_validated_like_built_in_levels(tmp_path, monkeypatch):
    monkeypatch.setitem(LEVELS, "root", RootLevel)
    with pytest.raises(ValueError, match="`loss_type='dapo'` weights a turn by its number of tokens"):
        MARFTConfig(str(tmp_path), level="root", loss_type="dapo")
    with pytest.raises(ValueError, match=r"`token_gamma=0.5` has no effect with `level='root'`"):
        MARFTConfig(str(tmp_path), level="root", token_gamma=0.5, **PPO, critic="shared")
    assert MARFTConfig(str(tmp_path), level="root").loss_type == "grpo"
    assert not MARFTConfig(str(tmp_path), level="root").use_bias_correction_kl


class ReinforceTrainer(MARFTTrainer):
    """The loss `-A log p`, as the mean over tokens of a turn and over the turns of a micro-batch."""

    def _compute_loss(self, model, inputs):
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        attention_mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        mask = inputs["completion_mask"]
        logps, _, _ = self._get_per_token_logps_and_entropies(model, ids, attention_mask, mask.size(1))
        per_turn = (logps * mask).sum(1) / mask.sum(1).clamp(min=1)
        return -(inputs["advantages"].view(len(ids), -1)[:, 0] * per_turn).mean()


def test_a_custom_loss(model_folder, tmp_path, monkeypatch):
    """With episodes of the present weights, its gradient is that of `loss_type="grpo"`."""
    monkeypatch.setitem(LOSSES, "reinforce", LossType(is_row_mean=True))
    after = {}
    for loss_type, trainer_class in (("reinforce", ReinforceTrainer), ("grpo", MARFTTrainer)):
        settings = {"loss_type": loss_type, "max_steps": 1, "optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0}
        monkeypatch.setattr(helpers, "MARFTTrainer", trainer_class)
        trainer = team_trainer(model_folder, tmp_path / loss_type, settings=settings)
        moved = moved_by_training(trainer)
        assert {name.split(".")[-2] for name in moved} == {"reasoner", "actor"}
        after[loss_type] = {name: trainer.model.get_parameter(name).detach() for name in moved}
    for name, weight in after["grpo"].items():
        torch.testing.assert_close(after["reinforce"][name], weight, rtol=1e-4, atol=1e-6)


def actors_alone(reward, turns, steps, discount, as_rewards):
    return torch.tensor([reward if turn.agent == "actor" else 0.0 for turn in turns])


def test_a_custom_credit_rule(model_folder, tmp_path, monkeypatch):
    monkeypatch.setitem(CREDITS, "actors", CreditRule("actors", actors_alone))
    trainer = team_trainer(model_folder, tmp_path, settings={"credit": "actors", "advantage": "none", "max_steps": 1})
    trainer.train()
    rows = rows_of(trainer)
    assert {row.advantage for row in rows if row.agent == "reasoner"} == {0.0}
    assert len({row.advantage for row in rows if row.agent == "actor"}) > 1


def best_of_prompt(samples, scale):
    """Advantage 1 for turns whose return is the largest of their prompt, else -1."""
    best = torch.stack([samples.returns[samples.prompts == prompt].max() for prompt in samples.prompts])
    return torch.where(samples.returns >= best, 1.0, -1.0)


def test_a_custom_baseline(model_folder, tmp_path, monkeypatch):
    monkeypatch.setitem(BASELINES, "best", Baseline("best", best_of_prompt, needs_group=True))
    trainer = train(model_folder, tmp_path, {"advantage": "best"})
    rows = rows_of(trainer)
    assert {row.advantage for row in rows} == {1.0, -1.0}
    with pytest.raises(ValueError, match=r"`num_generations=1` needs a critic: `advantage='best'`"):
        MARFTConfig(str(tmp_path), advantage="best", num_generations=1)
    with pytest.raises(ValueError, match=r"`scale_rewards='batch'` has no effect with `advantage='best'`"):
        MARFTConfig(str(tmp_path), advantage="best", scale_rewards="batch")


class Curriculum:
    lesson = 1

    def state_dict(self):
        return {"lesson": self.lesson}

    def load_state_dict(self, state):
        self.lesson = state["lesson"]


def test_custom_state_is_part_of_checkpoints(model_folder, tmp_path):
    settings = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1}
    trainer, resumed = (team_trainer(model_folder, tmp_path, settings=settings) for _ in range(2))
    saved, loaded = Curriculum(), Curriculum()
    trainer.parts.checkpoints.stateful["curriculum"], resumed.parts.checkpoints.stateful["curriculum"] = saved, loaded
    saved.lesson = 5
    trainer.train()
    resumed.train(resume_from_checkpoint=True)
    assert loaded.lesson == 5


def test_hidden_states_of_a_reference_are_those_of_a_frozen_critic_alone():
    assert [kind.name for kind in CRITICS.values() if kind.reads_reference_pass] == ["frozen"]
