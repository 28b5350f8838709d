"""Agents that share an adapter: their weights in its loss, and their shares of its gradient."""

from dataclasses import replace

from marft_trl import AgentSpec, Sequential

import pytest
import torch

from .helpers import StopAt, moved, only_slice, team_trainer, weights


TALKER = Sequential(["talker", "talker", "quiet", "talker"])


def agents(*shared, unshared=()):
    return [
        *(AgentSpec(name, system_prompt=name, adapter="team", max_completion_length=4) for name in shared),
        *(AgentSpec(name, system_prompt=name, max_completion_length=4) for name in unshared),
    ]


def make(model, folder, team=None, workflow=TALKER, callbacks=None, **settings):
    defaults = {"gradient_checkpointing": False, "max_grad_norm": 0.0}
    arguments = {"agents": team or agents("talker", "quiet", "silent"), "workflow": workflow, "callbacks": callbacks}
    return team_trainer(model, folder, settings=defaults | settings, **arguments)


def gradients(trainer, slice_, agent):
    trainer.model.zero_grad()
    rows = [row for row in slice_.rows if row.agent == agent]
    trainer.compute_loss(trainer.model, replace(slice_, rows=rows)).backward()
    flat = {}
    for adapter in trainer.policies.trained:
        grads = [p.grad.flatten() for p in trainer.policies.parameters(adapter).values() if p.grad is not None]
        flat[adapter] = torch.cat(grads or [torch.zeros(0)])
    return flat


@pytest.mark.parametrize(
    "loss_type", ["dapo", *(pytest.param(name, marks=pytest.mark.slow) for name in ("grpo", "bnpo", "dr_grpo"))]
)
def test_equal_weight_is_a_mean_over_agents(model_folder, tmp_path, loss_type):
    """In an episode, one agent has three turns, another one turn, and the third none."""
    grads = {}
    for weight in ("size", "equal"):
        trainer = make(model_folder, tmp_path / weight, loss_type=loss_type, agent_weight=weight)
        slice_ = only_slice(trainer, [trainer.train_dataset[i // 4] for i in range(8)])
        grads[weight] = {name: gradients(trainer, slice_, name)["team"] for name in ("talker", "quiet")}
    sizes = dict.fromkeys(grads["size"], 0)
    for row in slice_.rows:
        sizes[row.agent] += 1 if loss_type in ("grpo", "dr_grpo") else row.num_loss_tokens
    for name in ("talker", "quiet"):
        factor = 0.5 / sizes[name] * sum(sizes.values())
        assert grads["size"][name].norm() > 0
        torch.testing.assert_close(grads["equal"][name], factor * grads["size"][name], rtol=1e-4, atol=1e-7)


def test_own_adapters_do_not_notice(model_folder, tmp_path):
    trainers = []
    for weight in ("size", "equal"):
        team = agents(unshared=["talker", "quiet"])
        trainers.append(make(model_folder, tmp_path / weight, team, agent_weight=weight, max_steps=1))
        trainers[-1].train()
    assert not moved(*map(weights, trainers))


def test_a_resumed_run_is_the_same(model_folder, tmp_path):
    settings = {"agent_weight": "equal", "max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    settings |= {"steps_per_generation": 2, "num_train_epochs": 100}
    whole = make(model_folder, tmp_path / "whole", **settings)
    whole.train()
    make(model_folder, tmp_path / "cut", callbacks=[StopAt(1)], **settings).train()  # in the middle of its rows
    resumed = make(model_folder, tmp_path / "cut", **settings)
    resumed.train(resume_from_checkpoint=True)
    assert not moved(weights(whole), weights(resumed))
