"""Critics: what their gradients touch, what they learn, where values are read, and what they share."""

from marft_trl.rollout.generator import SampledTurn
from marft_trl.tiny import tiny_dataset

import pytest
import torch
from datasets import Dataset

from .helpers import by_hand, in_turn, moved_by_training, only_slice, team_trainer


ROWS = [tiny_dataset(1)[0]] * 8
PPO = {"advantage": "gae", "critic": "shared", "num_generations": 1, "normalize_advantages": "none", "gae_lambda": 1.0}


@pytest.mark.parametrize(
    ("critic", "level"), in_turn([("shared",), ("per_agent",), ("multi_head",), ("frozen",)], "token", "action")
)
def test_policy_and_critic_gradients_are_separate(model_folder, tmp_path, critic, level):
    settings = {**PPO, "critic": critic, "level": level, "max_steps": 1, "beta": 0.1}
    trainer = team_trainer(model_folder, tmp_path, settings=settings)
    slice_, parts = only_slice(trainer, ROWS), trainer.parts.updates.trained_parameters()
    for name in parts:
        for parameters in parts.values():
            for parameter in parameters.values():
                parameter.grad = None
        loss = trainer.parts.loss.slice_loss(trainer.model, slice_, frozenset([name]), trainer.accelerator.backward)
        loss.backward()
        touched = {n for n, group in parts.items() for p in group.values() if p.grad is not None and p.grad.any()}
        assert touched == {name}
    assert set(trainer.policies.trained) == {"actor", "reasoner"}
    assert len(parts) - 2 == (2 if critic == "per_agent" else 1)
    assert not [n for n, p in trainer.model.named_parameters() if "lora_" not in n and p.requires_grad]


@pytest.mark.parametrize("critic", ["shared", "frozen", "per_agent", "multi_head"])
@pytest.mark.slow
def test_every_critic_learns_true_values(model_folder, tmp_path, critic):
    worth = {"Ann has 7 apples.": 1.0, "and": -1.0, "How many are left?": 3.0, "Ben loses 2.": 0.0}
    if critic == "frozen":  # the features of a hardly trained base tell few prompts apart
        worth = dict(list(worth.items())[:2])
    steps = 80 if critic == "frozen" else 56

    def worth_of(completions, prompts, **kwargs):
        return [worth[prompt] for prompt in prompts]

    settings = {
        **{**PPO, "critic": critic, "level": "action", "value_clip": None, "learning_rate": 0.0},
        **{"critic_learning_rate": 5e-3 if critic != "frozen" else 1e-3, "max_grad_norm": 10.0},
        **{"per_device_train_batch_size": 64, "num_iterations": 8, "max_steps": steps, "critic_warmup_steps": steps},
        **{"max_completion_length": 1, "gradient_checkpointing": False, "lr_scheduler_type": "constant"},
    }
    prompts = Dataset.from_dict({"prompt": list(worth) * 64})
    trainer = team_trainer(model_folder, tmp_path, reward_funcs=worth_of, settings=settings, train_dataset=prompts)
    assert not any("_critic" not in name for name in moved_by_training(trainer))
    explained = [e["critic/explained_variance"] for e in trainer.state.log_history if "critic/explained_variance" in e]
    assert abs(explained[0]) < 0.5  # it starts with next to nothing
    assert sum(explained[-3:]) / 3 > 0.95


def test_multi_head_critics_have_a_head_per_agent(model_folder, tmp_path):
    """An agent's head is chosen by its index: the values of an agent do not depend on another agent's head."""
    trainer = team_trainer(model_folder, tmp_path, settings={**PPO, "critic": "multi_head"})
    critic = trainer.critic
    outputs = torch.tensor([[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [7.0, 8.0]]])
    assert critic.select_values(outputs, ["actor", "reasoner"]).tolist() == [[2.0, 4.0], [5.0, 7.0]]


def test_values_are_read_before_each_sampled_token(model_folder, tmp_path):
    for level in ("token", "action"):
        trainer = team_trainer(model_folder, tmp_path, settings={**PPO, "level": level})
        with torch.no_grad():
            for parameter in trainer.critic.parameters("_critic").values():
                parameter.normal_(std=0.2)
        head = trainer.critic.heads["_critic"]
        for row in only_slice(trainer, ROWS).rows:
            trainer.policies.activate_adapter("_critic")
            ids = torch.cat([row.prompt_ids, row.completion_ids]).unsqueeze(0)
            with torch.no_grad():
                hidden = trainer.model.get_base_model().model(input_ids=ids).last_hidden_state[0]
                first = len(row.prompt_ids) - 1
                count = len(row.completion_ids) if level == "token" else 1
                want = head(hidden[first : first + count]).squeeze(-1)
            torch.testing.assert_close(row.old_values, want, rtol=1e-4, atol=1e-4)


def test_values_of_truncated_turns_see_their_tokens(model_folder, tmp_path):
    def values(is_masked):
        settings = {**PPO, "mask_truncated_completions": is_masked, "max_completion_length": 3}
        trainer = team_trainer(model_folder, tmp_path, settings=settings)
        without_end = by_hand(lambda agents, prompt_ids: [SampledTurn([5, 6, 7])] * len(agents))
        trainer.parts.runner.generator.generate = without_end
        rows = only_slice(trainer, ROWS).rows
        assert {row.num_loss_tokens for row in rows} == {0 if is_masked else 3}
        return torch.stack([row.old_values for row in rows])

    torch.testing.assert_close(values(True), values(False))


@pytest.mark.parametrize("level", ["action", "token"])
def test_the_reference_pass_serves_the_frozen_critic(model_folder, tmp_path, level):
    completions = [[5, 6, 2], [7, 2], [8, 9, 10, 11, 2], [2]]

    def features(beta, ppo=PPO | {"level": level, "critic": "frozen"}):
        settings = {**ppo, "beta": beta, "max_tokens_per_micro_batch": 500}
        trainer = team_trainer(model_folder, tmp_path, settings=settings)
        passes = []
        trainer.model.get_base_model().model.register_forward_hook(lambda *_: passes.append(1))
        generate = by_hand(lambda agents, prompt_ids: [SampledTurn(completions[i % 4]) for i in range(len(agents))])
        trainer.parts.runner.generator.generate = generate
        rows = only_slice(trainer, ROWS).rows
        if not ppo:
            return None, len(passes)
        assert {len(row.features) for row in rows} == ({1} if level == "action" else {1, 2, 3, 5})
        return torch.cat([row.features for row in rows]), len(passes)

    alone, _ = features(0.0)
    shared, passes = features(0.1)
    assert passes == features(0.1, ppo={})[1]  # none for the critic
    torch.testing.assert_close(shared, alone, rtol=1e-5, atol=1e-5)


def test_warm_up_teaches_the_critic_alone(model_folder, tmp_path):
    settings = {**PPO, "critic_warmup_steps": 2, "max_steps": 2, "lr_scheduler_type": "constant"}
    changed = moved_by_training(team_trainer(model_folder, tmp_path, settings=settings))
    assert changed and all("._critic." in name for name in changed)


def test_value_heads_rest_while_the_critic_does(model_folder, tmp_path):
    # heads are no part of the model whose gradients the Trainer clears
    settings = {**PPO, "update_order": "sequential", "max_steps": 2, "lr_scheduler_type": "constant", "optim": "sgd"}
    trainer = team_trainer(model_folder, tmp_path, settings={**settings, "critic_learning_rate": 1e-2})
    heads = []
    original = trainer.parts.updates.micro_step
    trainer.parts.updates.micro_step = lambda model: (
        heads.append([p.detach().clone() for p in trainer.critic.heads.parameters()]),
        original(model),
    )[1]
    trainer.train()
    end = list(trainer.critic.heads.parameters())
    assert not all(torch.equal(a, b) for a, b in zip(heads[0], heads[1], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(heads[1], end, strict=True))


@pytest.mark.parametrize("limit", [0.0, 1e-9])
def test_critic_gradients_are_clipped_separately_and_not_at_zero(model_folder, tmp_path, limit):
    settings = {**PPO, "max_steps": 1, "max_grad_norm": limit, "optim": "sgd"}
    settings |= {"critic_learning_rate": 1e-2, "level": "action"}
    trainer = team_trainer(model_folder, tmp_path, settings=settings)
    before = [parameter.detach().clone() for parameter in trainer.critic.heads.parameters()]
    trainer.train()
    changes = [(a - b).abs().max().item() for a, b in zip(trainer.critic.heads.parameters(), before, strict=True)]
    assert (max(changes) < 1e-10) == (limit == 1e-9)


def test_gradients_of_a_step_that_was_not_finished_are_no_part_of_the_next(model_folder, tmp_path):
    trainer = team_trainer(model_folder, tmp_path, settings=PPO)
    updates, heads = trainer.parts.updates, list(trainer.critic.heads.parameters())
    with updates.micro_step(trainer.model):
        for parameter in heads:
            parameter.grad = torch.ones_like(parameter)
    with updates.micro_step(trainer.model):  # of the same step
        assert all(parameter.grad is not None for parameter in heads)
    updates.forget()
    with updates.micro_step(trainer.model):
        assert all(parameter.grad is None for parameter in heads)
