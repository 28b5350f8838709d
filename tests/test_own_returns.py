"""Agents with returns of their own: what each receives reaches its own turns, and no others."""

import math
import statistics

from marft_trl import AgentSpec
from marft_trl.algorithms.baselines import RunningBaselines
from marft_trl.algorithms.functional import gae, own_steps, returns_to_go
from marft_trl.workflows import EnvironmentLoop

import pytest
import torch

from .helpers import collect, echo, team_trainer


def worth(turns) -> int:
    """A number of an episode, from -3 to 3, that depends on what was said in it."""
    return sum(sum(map(ord, turn.text)) for turn in turns) % 7 - 3


class Duel:
    """Three rounds. At the end, one agent receives what the other loses."""

    rounds = 3

    def reset(self, **row):
        self.turns, self.number = [], 0
        return "Begin."

    def step(self, turns):
        self.turns += turns
        self.number += 1
        is_done = self.number == self.rounds
        return f"Round {self.number}.", self.pay(is_done), is_done

    def pay(self, is_done):
        s = worth(self.turns) if is_done else 0
        return {"left": s, "right": -s}


class Common(Duel):
    """Both receive the same."""

    def pay(self, is_done):
        s = worth(self.turns) if is_done else 0
        return {"left": s, "right": s}


class Mixed(Duel):
    """In every round something for all and something for each."""

    def pay(self, is_done):
        return {"left": worth(self.turns), "right": worth(self.turns[:1])}


class Alternating(Duel):
    """One acts at a time, and both are paid after the last turn, whoever took it."""

    rounds = 5

    def whose_turn(self):
        return ("left", "right")[self.number % 2]


DUEL = [AgentSpec("left", system_prompt="You are left."), AgentSpec("right", system_prompt="You are right.")]
SHARED = [DUEL[0], AgentSpec("right", system_prompt="You are right.", adapter="left")]


class Seen:
    """Keeps what an estimator was given and what it made of it."""

    def __init__(self, estimator):
        self.estimator, self.calls = estimator, []

    def __getattr__(self, name):
        return getattr(self.estimator, name)

    def estimate(self, rollout, rows, training):
        done = self.estimator.estimate(rollout, rows, training)
        self.calls.append((rollout, done.rows))
        return done


def run(model, folder, workflow, agents=DUEL, steps=1, **settings):
    """Trains, and returns rollouts with their rows."""
    trainer = team_trainer(
        model,
        folder,
        agents=list(agents),
        reward_funcs=[],
        workflow=workflow,
        settings={"max_steps": steps, "max_completion_length": 4, **settings},
    )
    experience = trainer.parts.experience
    seen = experience._estimator = Seen(experience._estimator)
    trainer.train()
    return seen.calls


def own(episode, agent) -> float:
    return sum(episode.own.get(agent, ()))


def groups(rollout, agent, size):
    """The returns of an agent in the episodes of each prompt."""
    its = [own(episode, agent) for episode in rollout.episodes]
    return [its[first : first + size] for first in range(0, len(its), size)]


def by_group(values, value):
    return (value - statistics.mean(values)) / (statistics.stdev(values) + 1e-4)


def by_turn(values, value):
    """Every turn counts: three in each episode."""
    return by_group([*values, *values, *values], value)


def leave_one_out(values, value):
    others = list(values)
    others.remove(value)
    return value - statistics.mean(others)


def whole_batch(values, value):
    return by_group(values, value)


FORMULAS = {
    "group": (by_group, False),
    "agent": (by_turn, False),
    "leave_one_out": (leave_one_out, False),
    "batch": (whole_batch, True),
    "none": (lambda values, value: value, False),
    "rae": (lambda values, value: value, False),  # nothing came before the first batch
}


def close(found, expected):
    return math.isclose(found, expected, rel_tol=1e-4, abs_tol=1e-5)


SLOW = pytest.mark.slow


@pytest.mark.parametrize("advantage", ["group", *(pytest.param(one, marks=SLOW) for one in list(FORMULAS)[1:])])
@pytest.mark.parametrize("agents", [pytest.param(DUEL, marks=SLOW), SHARED], ids=["own adapters", "one adapter"])
def test_opposed_rewards_reach_every_own_turn(model_folder, tmp_path, advantage, agents):
    """By formulas of their own for each baseline: what one gains, the other loses."""
    formula, over_batch = FORMULAS[advantage]
    ((rollout, rows),) = run(model_folder, tmp_path, EnvironmentLoop(Duel), agents, advantage=advantage)
    assert rollout.has_own_returns and any(own(one, "left") for one in rollout.episodes)
    for agent in ("left", "right"):
        cells = groups(rollout, agent, 4)
        for index, (episode, its) in enumerate(zip(rollout.episodes, rows, strict=True)):
            values = [value for cell in cells for value in cell] if over_batch else cells[index // 4]
            expected = formula(values, own(episode, agent))
            found = [row.advantage for row in its if row.agent == agent]
            assert len(found) == 3 and all(close(one, expected) for one in found), (agent, index)


@pytest.mark.parametrize(
    "environment", [pytest.param(Duel, marks=SLOW), pytest.param(Common, marks=SLOW), Mixed, Alternating]
)
@pytest.mark.parametrize("side_by_side", [False, pytest.param(True, marks=SLOW)])
def test_returns_to_go_of_games(model_folder, tmp_path, environment, side_by_side):
    """As rewards, a turn is worth what its agent receives from its joint step on."""
    if environment is Alternating and side_by_side:
        pytest.skip("one agent acts at a time")
    turns = "one" if environment is Alternating else "all"
    workflow = EnvironmentLoop(environment, turns=turns, side_by_side=side_by_side)
    settings = {"advantage": "none", "credit_kind": "rewards", "gamma": 0.5}
    ((rollout, rows),) = run(model_folder, tmp_path, workflow, **settings)
    for episode, its in zip(rollout.episodes, rows, strict=True):
        steps = episode.joint_steps()
        for turn, row in zip(episode.turns, its, strict=True):
            later = [
                0.5 ** (steps[k] - steps[turn.index]) * episode.own[turn.agent][k]
                for k in range(len(episode.turns))
                if steps[k] >= steps[turn.index]
            ]
            assert close(row.advantage, sum(later))


@pytest.mark.parametrize(
    "critic", ["multi_head", *(pytest.param(one, marks=SLOW) for one in ("shared", "per_agent", "frozen"))]
)
@pytest.mark.parametrize("level", ["token", pytest.param("action", marks=SLOW)])
@pytest.mark.parametrize("environment", [pytest.param(Duel, marks=SLOW), Alternating])
def test_a_critic_learns_what_its_agent_will_receive(model_folder, tmp_path, critic, level, environment):
    """Without discounts, the target of every value is what the agent receives from the turn on."""
    settings = {"advantage": "gae", "critic": critic, "level": level, "gae_lambda": 1.0, "num_generations": 1}
    workflow = EnvironmentLoop(environment, turns="one" if environment is Alternating else "all")
    ((rollout, rows),) = run(model_folder, tmp_path, workflow, **settings)
    for episode, its in zip(rollout.episodes, rows, strict=True):
        for row in its:
            torch.testing.assert_close(
                row.value_targets, torch.full_like(row.value_targets, own(episode, row.agent)), atol=1e-5, rtol=1e-5
            )
    signs = {row.agent: [] for its in rows for row in its}
    assert set(signs) == {"left", "right"} and any(own(one, "left") for one in rollout.episodes)


def test_where_a_horizon_cuts_every_agent_goes_on_with_its_own_value(model_folder, tmp_path):
    settings = {"advantage": "gae", "critic": "multi_head", "level": "action", "gae_lambda": 1.0, "gamma": 0.5}
    workflow = EnvironmentLoop(Alternating, turns="one", horizon=4)
    ((_, rows),) = run(model_folder, tmp_path, workflow, num_generations=1, **settings)
    for its in rows:
        values = {row.agent: row.last_value for row in its[2:]}
        assert list(values) == ["left", "right"] and values["left"] != values["right"]
        assert [row.last_value for row in its[:2]] == [0.0, 0.0]
        # left acts at steps 0 and 2, right at 1 and 3, and what comes next is step 4
        expected = [0.5**4 * values["left"], 0.5**3 * values["right"], 0.5**2 * values["left"], 0.5 * values["right"]]
        assert [row.agent for row in its] == ["left", "right", "left", "right"]
        assert all(close(row.value_targets.item(), one) for row, one in zip(its, expected, strict=True))


def test_own_steps_by_hand():
    """Turns 0, 2 and 3 of five are its own; 2 and 3 are simultaneous."""
    rewards, steps = torch.tensor([1.0, 2, 4, 8, 16]), torch.tensor([0, 1, 2, 2, 3])
    mine = own_steps(rewards, steps, torch.tensor([0, 2, 3]), gamma=0.5)
    assert mine.rewards.tolist() == [1 + 0.5 * 2, 0, 4 + 8 + 0.5 * 16]
    assert mine.steps.tolist() == [0, 1, 1] and mine.discounts == [0.25, 0.25]
    values, last = torch.tensor([0.5, 1.0, 3.0]), 10.0
    advantages, _ = gae(mine.rewards, values, mine.steps, mine.discounts, 0.5, last)
    second = 20 + 0.25 * last  # what the second own step is worth
    assert advantages[1:].tolist() == [second - 1, second - 3]
    # 0.25: the discount; 2: the mean value of both turns; 0.5: lambda
    assert advantages[0].item() == 2 + 0.25 * 2 + 0.25 * 0.5 * (second - 2) - 0.5
    assert returns_to_go(rewards, steps, 0.5)[[0, 2, 3]].tolist() == [7.0, 20.0, 20.0]


@pytest.mark.slow
def test_the_sum_of_the_team_cancels_and_is_refused_by_name(model_folder, tmp_path):
    with pytest.raises(ValueError, match="sum to zero in all.*learn from the sum"):
        run(model_folder, tmp_path, EnvironmentLoop(Duel), returns="team", steps=2)  # once eight episodes have earned


@pytest.mark.slow
def test_own_returns_of_a_team_with_one_interest_are_those_of_the_team(model_folder, tmp_path):
    """Where nobody is rewarded by name, `returns="agent"` compares the same returns, agent by agent."""

    class Plain(Duel):
        def pay(self, is_done):
            return worth(self.turns) if is_done else 0

    found = {}
    for returns, advantage in (("team", "agent"), ("agent", "agent")):
        calls = run(model_folder, tmp_path / returns, EnvironmentLoop(Plain), returns=returns, advantage=advantage)
        found[returns] = [[row.advantage for row in its] for its in calls[0][1]]
    assert torch.tensor(found["team"]).sub(torch.tensor(found["agent"])).abs().max() < 1e-5
    assert any(any(its) for its in found["team"])


def test_running_baselines_by_hand():
    """Corrected as in Adam: after one batch it is its mean. Batches without a return change nothing."""
    running = RunningBaselines(0.5)
    assert running.lookup(["a", "b"]).tolist() == [0.0, 0.0]
    nan = float("nan")
    running.update(["a", "a", "b", "a"], torch.tensor([1.0, 4.0, nan, 4.0]), torch.tensor([1.0, 0.5, 1.0, 0.5]))
    assert running.lookup(["a", "b"]).tolist() == [2.5, 0.0]
    running.update(["a"], torch.tensor([5.5]), torch.ones(1))
    assert math.isclose(running.lookup(["a"]).item(), (0.25 * 2.5 + 0.5 * 5.5) / 0.75, rel_tol=1e-6)
    again = RunningBaselines(0.5)
    again.load_state_dict(running.state_dict())
    assert again.lookup(["a"]).equal(running.lookup(["a"]))


def test_own_returns_by_the_setting_are_reported_also_of_a_workflow_that_earns_nothing(model_folder, tmp_path):
    trainer = team_trainer(model_folder, tmp_path, settings={"returns": "agent", "max_steps": 1})
    trainer.train()
    logs = {name for entry in trainer.state.log_history for name in entry}
    assert {"agents/reasoner/return", "agents/actor/return"} <= logs


def test_rae_compares_with_earlier_batches(model_folder, tmp_path):
    calls = run(
        model_folder, tmp_path, EnvironmentLoop(Duel), advantage="rae", num_generations=1, steps=2, learning_rate=0.0
    )
    (first, _), (second, rows) = calls
    for agent in ("left", "right"):
        before = statistics.mean(own(one, agent) for one in first.episodes)
        for episode, its in zip(second.episodes, rows, strict=True):
            assert all(close(row.advantage, own(episode, agent) - before) for row in its if row.agent == agent)


def test_an_environment_that_does_not_say_who_is_next(model_folder):
    with pytest.raises(ValueError, match=r"`Duel` needs `whose_turn\(\)`"):
        EnvironmentLoop(Duel, turns="one")
    with pytest.raises(ValueError, match="`turns` of `EnvironmentLoop` must be 'all' or 'one', got 'each'"):
        EnvironmentLoop(Duel, turns="each")


def test_private_feedback_and_own_turns_are_all_that_an_agent_sees():
    class Secret(Alternating):
        def reset(self, **row):
            super().reset(**row)
            return {"left": "L", "right": "R"}

    workflow = EnvironmentLoop(Secret, turns="one", shows="own", horizon=4)
    (episode,) = collect(workflow, [{"prompt": "q"}], ["left", "right"], echo())
    assert [turn.agent for turn in episode.turns] == ["left", "right", "left", "right"]
    assert episode.turns[1].text == "right(R,Round 1.)"
    assert episode.turns[2].text == "left(L,left(L),Round 1.,Round 2.)"
    assert [one.agent for one in episode.horizons] == ["left", "right"]
    assert [item.text for item in episode.horizons[1].seen if item.agent == "right"] == [
        turn.text for turn in episode.turns if turn.agent == "right"
    ]
