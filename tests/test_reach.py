"""Rewards that cancel, and agents that no reward reaches, are never silent."""

from marft_trl import AgentSpec
from marft_trl.rollout.reward_scorer import PATIENCE, RewardReachChecker
from marft_trl.workflows import EnvironmentLoop

import pytest

from .helpers import team_trainer


class Duel:
    """What one agent gains the other loses."""

    def __init__(self, share=-1.0):
        self.share = share

    def reset(self, **row):
        self.rounds = 0

    def step(self, turns):
        self.rounds += 1
        score = float(sum(map(ord, turns[0].text)) % 7) - 3.5
        rewards = {turns[0].agent: score, turns[1].agent: self.share * score}
        return None, rewards if self.rounds == 3 else 0.0, self.rounds == 3


TEAM = [AgentSpec("left", system_prompt="Left.", max_completion_length=8), AgentSpec("right", system_prompt="Right.")]


def test_opposed_rewards_that_cancel_are_an_error(model_folder, tmp_path):
    trainer = team_trainer(
        model_folder, tmp_path, agents=TEAM, workflow=EnvironmentLoop(Duel, horizon=3), reward_funcs=None,
        settings={"returns": "team"},
    )  # fmt: skip
    with pytest.raises(ValueError, match="agents 'left', 'right' sum to zero in all of the last 8 episodes"):
        trainer.train()


def test_opposed_rewards_that_nearly_cancel_are_said_once_and_loudly(model_folder, tmp_path, caplog):
    workflow = EnvironmentLoop(lambda: Duel(-0.8), horizon=3)
    trainer = team_trainer(
        model_folder, tmp_path, agents=TEAM, workflow=workflow, reward_funcs=None, settings={"returns": "team"}
    )
    trainer.train()
    said = [record.message for record in caplog.records if "ARE OPPOSED" in record.message]
    assert len(said) == 1 and "'left' AND 'right' ARE OPPOSED (correlation -1.00" in said[0]


def test_an_agent_that_no_reward_reaches_is_named(model_folder, tmp_path, caplog):
    def of_turn(completions, turn, **kwargs):
        return [None if one.agent == "actor" else float(len(one.text)) for one in turn]

    agents = [
        AgentSpec("reasoner", system_prompt="Write the steps.", reward_funcs=of_turn, max_completion_length=24),
        AgentSpec("actor", system_prompt="Write the answer.", reward_funcs=of_turn, max_completion_length=6),
    ]
    settings = {"credit": "per_step", "max_steps": PATIENCE + 1, "learning_rate": 0.0}
    team_trainer(model_folder, tmp_path, agents=agents, settings=settings).train()
    said = [record.message for record in caplog.records if "NO REWARD REACHES" in record.message]
    assert len(said) == 1 and "THE AGENT 'actor'" in said[0]


def test_an_agent_that_is_never_rewarded_by_name_is_named_at_the_first_batch(model_folder, tmp_path, caplog):
    class OneSided(Duel):
        def step(self, turns):
            feedback, reward, is_done = super().step(turns)
            return feedback, {"left": reward["left"] if is_done else 0.0}, is_done

    trainer = team_trainer(
        model_folder, tmp_path, agents=TEAM, workflow=EnvironmentLoop(OneSided, horizon=3), reward_funcs=None,
        settings={"max_steps": 2},
    )  # fmt: skip
    trainer.train()
    said = [record.message for record in caplog.records if "NO REWARD CAN REACH" in record.message]
    assert len(said) == 1 and "THE AGENT 'right'" in said[0] and "rewarded only 'left' by name" in said[0]


def test_what_is_told_by_hand(caplog):
    reach = RewardReachChecker(["a", "b"])
    reach.check_opposed([{}, {"a": 1.0}, {"a": 1.0, "b": 0.0}])  # one agent alone
    reach.check_opposed([{"a": 1.0, "b": 1.0}] * 20)
    reach.check_opposed([{"a": 1.0, "b": -1.0}, {"a": 1.0, "b": 0.0}])  # not in every episode
    opposed = [{"a": 1.0, "b": -1.0}, {"a": -2.0, "b": 2.0}, {}]
    for _ in range(3):
        reach.check_opposed(opposed)
    with pytest.raises(ValueError, match="sum to zero in all of the last 8 episodes"):
        reach.check_opposed(opposed)
    reach.check_opposed(opposed, no_other_rewards=False)
    for _ in range(PATIENCE - 1):
        reach.note_advantages({"a": True, "b": False})
    reach.note_advantages({"a": True, "b": True})  # begins to count anew
    for _ in range(PATIENCE - 1):
        reach.note_advantages({"a": True, "b": False})
        reach.note_advantages({"a": False, "b": False})  # nobody learned: says nothing of one
    assert "NO REWARD" not in caplog.text
    for _ in range(2 * PATIENCE):
        reach.note_advantages({"a": True, "b": False})
    assert caplog.text.count("NO REWARD REACHES THE AGENT 'b'") == 1
