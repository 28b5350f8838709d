"""Random numbers of user code are separate from those of training."""

import random

from marft_trl import AgentSpec, Workflow

import numpy as np
import pytest
import torch

from .helpers import StopAt, moved, team_trainer, varied_reward, weights


class Seeding(Workflow):
    """User code that seeds wherever it runs."""

    earns = True

    async def run(self, episode):
        await episode.call(self.seed)
        turn = await episode.turn("solo")
        self.seed()
        episode.earn(turn, 0.0)

    def seed(self):
        random.seed(0), np.random.seed(0), torch.manual_seed(0)


def seeding_view(agent, prompt, seen):
    torch.manual_seed(0)
    return prompt


def seeding_reward(completions, **kwargs):
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    return varied_reward(completions)


def test_users_code_that_seeds_changes_no_sample(model_folder, tmp_path):
    def run(folder, reward, **arguments):
        texts = []

        def noted(completions, **kwargs):
            texts.append(list(completions))
            return reward(completions)

        trainer_arguments = {"agents": [AgentSpec("solo")], "reward_funcs": noted, **arguments}
        trainer = team_trainer(model_folder, tmp_path / folder, **trainer_arguments)
        trainer.train()
        return texts, weights(trainer)

    plain, expected = run("plain", varied_reward)
    seeded, seeded_weights = run("seeded", seeding_reward, workflow=Seeding(), view=seeding_view)
    assert seeded == plain and plain[0] != plain[1]
    assert not moved(expected, seeded_weights)


def test_saving_and_planning_change_no_sample(model_folder, tmp_path):
    class Drawing(Workflow):
        async def run(self, episode):
            torch.rand(()), random.random()
            await episode.turn("solo")

    def run(plans, **settings):
        team = {"agents": [AgentSpec("solo")], "workflow": Drawing()}
        trainer = team_trainer(model_folder, tmp_path / str(plans), settings=settings, **team)
        if plans:
            trainer.plan()
        trainer.train()
        return weights(trainer)

    assert not moved(run(False), run(True, save_strategy="steps", save_steps=1))


@pytest.mark.slow
def test_users_code_draws_new_numbers_and_a_resumed_run_the_same(model_folder, tmp_path):
    drawn = []

    def random_reward(completions, **kwargs):
        drawn.append((random.random(), float(np.random.rand()), torch.rand(1).item()))
        return [torch.rand(1).item() for _ in completions]

    def trainer(folder, **arguments):
        trainer_arguments = {"reward_funcs": random_reward, "settings": {"save_strategy": "steps", "save_steps": 1}}
        return team_trainer(model_folder, tmp_path / folder, **trainer_arguments, **arguments)

    whole = trainer("whole")
    whole.train()
    assert len({number for numbers in drawn for number in numbers}) == 6
    expected = drawn.copy()
    drawn.clear()
    trainer("cut", callbacks=[StopAt(1)]).train()
    resumed = trainer("cut")
    resumed.train(resume_from_checkpoint=True)
    assert drawn == expected
    assert not moved(weights(whole), weights(resumed))
