"""
Agents with individual returns: the reward of each agent reaches the turns of this agent and no others, under every
rule of credit (discounts over own turns, scored turns, re-runs, candidates, tools).
"""

import math
import statistics
from dataclasses import replace

from marft_trl import AgentSpec
from marft_trl.algorithms.baselines import BASELINES, RunningBaselines, TurnReturns
from marft_trl.algorithms.functional import gae, own_steps, returns_to_go
from marft_trl.rollout.reward_scorer import PATIENCE, RewardReachChecker
from marft_trl.rollout.runner import EpisodeRunner
from marft_trl.tiny import tiny_agents
from marft_trl.workflows import EnvironmentLoop

import pytest
import torch

from .helpers import add, collect, echo, team_trainer
from .test_tools import canned, tool_tokenizer


def worth(turns) -> int:
    """A number from -3 to 3 that depends on the texts of the turns."""
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


class Mixed(Duel):
    """Every round has a reward from all turns and one from the first."""

    def pay(self, is_done):
        return {"left": worth(self.turns), "right": worth(self.turns[:1])}


class Alternating(Duel):
    """The agents act in turn, and both are paid after the last turn, whoever took it."""

    rounds = 5

    def whose_turn(self):
        return ("left", "right")[self.number % 2]


GAME = EnvironmentLoop(Alternating, turns="one")
DUEL = [AgentSpec("left", system_prompt="You are left."), AgentSpec("right", system_prompt="You are right.")]
SHARED = [DUEL[0], AgentSpec("right", system_prompt="You are right.", adapter="left")]


class EstimatorRecorder:
    """Records the inputs and the results of an estimator."""

    def __init__(self, estimator):
        self.estimator, self.calls = estimator, []

    def __getattr__(self, name):
        return getattr(self.estimator, name)

    def estimate(self, rollout, rows, training):
        result = self.estimator.estimate(rollout, rows, training)
        self.calls.append((rollout, result.rows))
        return result


def run(model, folder, workflow, agents=DUEL, steps=1, **settings):
    settings = {"max_steps": steps, "max_completion_length": 4, **settings}
    arguments, has_tools = {"agents": list(agents), "reward_funcs": [], "workflow": workflow}, agents[0].tools
    arguments |= {"processing_class": tool_tokenizer()} if has_tools else {}
    trainer = team_trainer(model, folder, settings=settings, **arguments)
    if has_tools:
        canned(trainer)
    batch_maker = trainer.parts.batch_maker
    recorder = batch_maker._estimator = EstimatorRecorder(batch_maker._estimator)
    trainer.train()
    return recorder.calls


def own(episode, agent) -> float:
    return sum(episode.own.get(agent, ()))


def groups(rollout, agent, size):
    """The returns of an agent in the episodes of each prompt."""
    returns = [own(episode, agent) for episode in rollout.episodes]
    return [returns[first : first + size] for first in range(0, len(returns), size)]


SLOW = pytest.mark.slow


def by_group(values, value):
    return (value - statistics.mean(values)) / (statistics.stdev(values) + 1e-4)


def leave_one_out(values, value):
    return value - (sum(values) - value) / (len(values) - 1)


FORMULAS = {
    "group": (by_group, False),
    "agent": (lambda values, value: by_group(values * 3, value), False),  # every turn counts: three in each episode
    "leave_one_out": (leave_one_out, False),
    "batch": (by_group, True),
    "none": (lambda values, value: value, False),
    "rae": (lambda values, value: value, False),  # nothing came before the first batch
}


def close(actual, expected):
    return math.isclose(actual, expected, rel_tol=1e-4, abs_tol=1e-5)


@pytest.mark.parametrize("advantage", ["group", *(pytest.param(name, marks=SLOW) for name in list(FORMULAS)[1:])])
@pytest.mark.parametrize("agents", [pytest.param(DUEL, marks=SLOW), SHARED], ids=["own adapters", "one adapter"])
def test_opposed_rewards_reach_every_own_turn(model_folder, tmp_path, advantage, agents):
    """Each baseline has an independent formula; one agent gains what the other loses."""
    formula, over_batch = FORMULAS[advantage]
    ((rollout, rows),) = run(model_folder, tmp_path, EnvironmentLoop(Duel), agents, advantage=advantage)
    assert rollout.has_own_returns and any(own(episode, "left") for episode in rollout.episodes)
    for agent in ("left", "right"):
        cells = groups(rollout, agent, 4)
        for index, (episode, episode_rows) in enumerate(zip(rollout.episodes, rows, strict=True)):
            values = [value for cell in cells for value in cell] if over_batch else cells[index // 4]
            expected = formula(values, own(episode, agent))
            advantages = [row.advantage for row in episode_rows if row.agent == agent]
            assert len(advantages) == 3 and all(close(actual, expected) for actual in advantages), (agent, index)


@pytest.mark.parametrize(
    ("environment", "side_by_side"),
    [
        (Mixed, False),
        pytest.param(Alternating, False, marks=SLOW),
        *(pytest.param(game, True, marks=SLOW) for game in (Duel, Mixed)),
    ],
)
def test_returns_to_go_of_games(model_folder, tmp_path, environment, side_by_side):
    """With `credit_kind="rewards"`, a turn gets the rewards of its agent from the turn's joint step on."""
    turns = "one" if environment is Alternating else "all"
    workflow = EnvironmentLoop(environment, turns=turns, side_by_side=side_by_side)
    settings = {"advantage": "none", "credit_kind": "rewards", "gamma": 0.5}
    ((rollout, rows),) = run(model_folder, tmp_path, workflow, **settings)
    for episode, episode_rows in zip(rollout.episodes, rows, strict=True):
        steps = episode.joint_steps()
        for turn, row in zip(episode.turns, episode_rows, strict=True):
            later = [k for k in range(len(steps)) if steps[k] >= steps[turn.index]]
            rewards = [0.5 ** (steps[k] - steps[turn.index]) * episode.own[turn.agent][k] for k in later]
            assert close(row.advantage, sum(rewards))


@pytest.mark.parametrize(
    "critic", ["multi_head", *(pytest.param(kind, marks=SLOW) for kind in ("shared", "per_agent", "frozen"))]
)
@pytest.mark.parametrize("level", ["token", pytest.param("action", marks=SLOW)])
@pytest.mark.parametrize("environment", [pytest.param(Duel, marks=SLOW), Alternating])
def test_a_critic_learns_the_future_return_of_each_agent(model_folder, tmp_path, critic, level, environment):
    """Without discounts, the target of every value is the agent's return from the turn on."""
    settings = {"advantage": "gae", "critic": critic, "level": level, "gae_lambda": 1.0, "num_generations": 1}
    workflow = EnvironmentLoop(environment, turns="one" if environment is Alternating else "all")
    ((rollout, rows),) = run(model_folder, tmp_path, workflow, **settings)
    for episode, episode_rows in zip(rollout.episodes, rows, strict=True):
        for row in episode_rows:
            expected = torch.full_like(row.value_targets, own(episode, row.agent))
            torch.testing.assert_close(row.value_targets, expected, atol=1e-5, rtol=1e-5)
    assert {row.agent for episode_rows in rows for row in episode_rows} == {"left", "right"}
    assert any(own(episode, "left") for episode in rollout.episodes)


def test_a_horizon_bootstraps_each_agent_from_the_agents_value(model_folder, tmp_path):
    settings = {"advantage": "gae", "critic": "multi_head", "level": "action", "gae_lambda": 1.0, "gamma": 0.5}
    workflow = EnvironmentLoop(Alternating, turns="one", horizon=4)
    ((_, rows),) = run(model_folder, tmp_path, workflow, num_generations=1, **settings)
    for episode_rows in rows:
        values = {row.agent: row.last_value for row in episode_rows[2:]}
        assert list(values) == ["left", "right"] and values["left"] != values["right"]
        assert [row.last_value for row in episode_rows[:2]] == [0.0, 0.0]
        # left acts at steps 0 and 2, right at 1 and 3, and what comes next is step 4
        expected = [0.5**4 * values["left"], 0.5**3 * values["right"], 0.5**2 * values["left"], 0.5 * values["right"]]
        assert [row.agent for row in episode_rows] == ["left", "right", "left", "right"]
        assert all(close(row.value_targets.item(), target) for row, target in zip(episode_rows, expected, strict=True))


def test_own_steps_by_hand():
    """Turns 0, 2 and 3 of five belong to the agent; 2 and 3 are simultaneous."""
    rewards, steps = torch.tensor([1.0, 2, 4, 8, 16]), torch.tensor([0, 1, 2, 2, 3])
    agent_steps = own_steps(rewards, steps, torch.tensor([0, 2, 3]), gamma=0.5)
    assert agent_steps.rewards.tolist() == [1 + 0.5 * 2, 0, 4 + 8 + 0.5 * 16]
    assert agent_steps.steps.tolist() == [0, 1, 1] and agent_steps.discounts == [0.25, 0.25]
    values, last = torch.tensor([0.5, 1.0, 3.0]), 10.0
    advantages, _ = gae(agent_steps.rewards, values, agent_steps.steps, agent_steps.discounts, 0.5, last)
    second = 20 + 0.25 * last  # what the second own step is worth
    assert advantages[1:].tolist() == [second - 1, second - 3]
    # 0.25: the discount; 2: the mean value of both turns; 0.5: lambda
    assert advantages[0].item() == 2 + 0.25 * 2 + 0.25 * 0.5 * (second - 2) - 0.5
    assert returns_to_go(rewards, steps, 0.5)[[0, 2, 3]].tolist() == [7.0, 20.0, 20.0]


@pytest.mark.slow
def test_own_returns_equal_team_returns_without_rewards_by_name(model_folder, tmp_path):
    """Where nobody is rewarded by name, `returns="agent"` compares the same returns, agent by agent."""

    class Plain(Duel):
        def pay(self, is_done):
            return worth(self.turns) if is_done else 0

    advantages = {}
    for returns in ("team", "agent"):
        ((_, rows),) = run(model_folder, tmp_path, EnvironmentLoop(Plain), returns=returns, advantage="agent")
        advantages[returns] = [[row.advantage for row in episode_rows] for episode_rows in rows]
    assert torch.tensor(advantages["team"]).sub(torch.tensor(advantages["agent"])).abs().max() < 1e-5
    assert any(map(any, advantages["team"]))


def test_running_baselines_by_hand():
    """Bias-corrected as in Adam: one batch gives the batch mean. Batches without a return change nothing."""
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
    assert {"agents/reasoner/return", "agents/actor/return"} <= trainer.state.log_history[0].keys()


@pytest.mark.slow
def test_rae_compares_with_earlier_batches(model_folder, tmp_path):
    settings = {"advantage": "rae", "num_generations": 1, "learning_rate": 0.0}
    (first, _), (second, rows) = run(model_folder, tmp_path, EnvironmentLoop(Duel), steps=2, **settings)
    for agent in ("left", "right"):
        before = statistics.mean(own(episode, agent) for episode in first.episodes)
        for episode, turn_rows in zip(second.episodes, rows, strict=True):
            assert all(close(row.advantage, own(episode, agent) - before) for row in turn_rows if row.agent == agent)


def test_an_environment_without_whose_turn_is_refused():
    with pytest.raises(ValueError, match=r"`Duel` needs `whose_turn\(\)`"):
        EnvironmentLoop(Duel, turns="one")


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
    assert [horizon.agent for horizon in episode.horizons] == ["left", "right"]
    own_texts = [turn.text for turn in episode.turns if turn.agent == "right"]
    assert [turn.text for turn in episode.horizons[1].seen if turn.agent == "right"] == own_texts


# ---- Under every rule of credit ----


@pytest.mark.parametrize("workflow", [EnvironmentLoop(Duel), pytest.param(GAME, marks=SLOW)], ids=["duel", "game"])
def test_discounts_run_over_the_agents_own_turns(model_folder, tmp_path, workflow):
    """The last own turn gets the whole return, the one before it half of it, and so on."""
    settings = {"advantage": "none", "credit": "step_discount", "credit_discount": 0.5}
    ((rollout, rows),) = run(model_folder, tmp_path, workflow, **settings)
    assert any(own(episode, "left") for episode in rollout.episodes)
    for episode, episode_rows in zip(rollout.episodes, rows, strict=True):
        for agent in ("left", "right"):
            advantages = [row.advantage for row in episode_rows if row.agent == agent]
            expected = [own(episode, agent) * 0.5**left for left in reversed(range(len(advantages)))]
            assert all(map(close, advantages, expected))


def letters(completions, **kwargs):
    return [float(len(str(completion)) % 5) for completion in completions]


@pytest.mark.parametrize("kind", ["returns", pytest.param("rewards", marks=SLOW)])
def test_scores_of_a_turn_add_to_the_return_of_the_agent(model_folder, tmp_path, kind):
    agents = [AgentSpec("left", reward_funcs=letters), AgentSpec("right", reward_funcs=letters)]
    settings = {"advantage": "none", "credit": "per_step", "own_reward_weight": 0.25, "credit_kind": kind}
    ((rollout, rows),) = run(model_folder, tmp_path, GAME, agents, **settings)
    for episode, episode_rows in zip(rollout.episodes, rows, strict=True):
        for turn, row in zip(episode.turns, episode_rows, strict=True):
            counted = [turn]
            if kind == "rewards":  # from the turn on
                counted = [later for later in episode.turns if later.agent == turn.agent and later.index >= turn.index]
            score = sum(letters([later.text])[0] for later in counted)
            assert close(row.advantage, 0.25 * score + own(episode, turn.agent))


@pytest.mark.parametrize("credit", [pytest.param("counterfactual", marks=SLOW), "removed"])
@pytest.mark.parametrize("advantage", ["none", pytest.param("leave_one_out", marks=SLOW)])
def test_reruns_are_compared_by_the_return_of_the_turns_agent(model_folder, tmp_path, advantage, credit, monkeypatch):
    rerun_episodes, plain = [], EpisodeRunner.run

    def run_and_note(self, rows, answer=None, reruns=None, *args, **kwargs):
        episodes = plain(self, rows, answer, reruns, *args, **kwargs)
        rerun_episodes.extend(episodes if reruns is not None else ())
        return episodes

    monkeypatch.setattr(EpisodeRunner, "run", run_and_note)
    settings = {"advantage": advantage, "credit": credit}
    ((rollout, rows),) = run(model_folder, tmp_path, GAME, **settings)
    if credit == "removed":
        places = [k for episode in rollout.episodes for k in range(len(episode.turns))]
        assert all(again.turns[k].completion_ids == () for again, k in zip(rerun_episodes, places, strict=True))
    jobs = iter(rerun_episodes)
    credits = [
        [own(episode, turn.agent) - own(next(jobs), turn.agent) for turn in episode.turns]
        for episode in rollout.episodes
    ]
    assert any(map(any, credits)) and next(jobs, None) is None
    for index, episode_rows in enumerate(rows):
        for k, row in enumerate(episode_rows):
            expected = credits[index][k]
            if advantage == "leave_one_out":  # mean credit of the agent in each other episode of the prompt
                others = [other for other in range(index // 4 * 4, index // 4 * 4 + 4) if other != index]
                other_credits = [
                    [c for c, peer in zip(credits[o], rows[o], strict=True) if peer.agent == row.agent] for o in others
                ]
                expected -= statistics.fmean(map(statistics.fmean, other_credits))
            assert close(row.advantage, expected), (index, k)


def test_alternatives_are_compared_only_within_a_node():
    """Two nodes of one episode and one of another; turns without a score do not count."""
    nan = float("nan")
    episodes, nodes = torch.tensor([0, 0, 0, 0, 0, 1, 1]), torch.tensor([0, 0, 0, 1, 1, 0, 0])
    returns = torch.tensor([1.0, 2.0, 6.0, 10.0, nan, -1.0, 3.0])
    samples = TurnReturns(episodes, torch.zeros(7, dtype=torch.long), nodes, returns, group_size=1, num_agents=1)
    advantages = BASELINES["c3"].function(samples, "group").tolist()
    assert advantages == [1.0 - 4.0, 2.0 - 3.5, 6.0 - 1.5, 0.0, 0.0, -4.0, 4.0]


@pytest.mark.parametrize("rounds", [5, pytest.param(4, marks=SLOW)], ids=["left is last", "right is last"])
@pytest.mark.parametrize("how", ["best", pytest.param("sampled", marks=SLOW)])
def test_candidates_are_compared_by_the_return_of_their_agent(model_folder, tmp_path, rounds, how):
    """Candidates of the last turn end the game, so their returns are known; "best" is the best for their agent."""

    game = type("Game", (Alternating,), {"rounds": rounds})
    settings = {"advantage": "turn", "turn_candidates": 3, "continue_from": how, "num_generations": 2}
    ((rollout, rows),) = run(model_folder, tmp_path, EnvironmentLoop(game, turns="one"), **settings)
    last, sign = ("left", 1) if rounds == 5 else ("right", -1)
    for index, (episode, episode_rows) in enumerate(zip(rollout.episodes, rows, strict=True)):
        nodes = [node for node in rollout.nodes if node.episode == index]
        assert len(nodes) == rounds and len(episode_rows) == 3 * rounds
        node, before = nodes[-1], list(episode.turns[:-1])
        expected = [sign * worth([*before, turn]) for turn in node.turns]
        assert node.returns == pytest.approx(expected) and node.turns[0].agent == last
        if how == "best":
            assert own(episode, last) == max(expected)
        mean, spread = sum(expected) / 3, torch.tensor(expected).float().std().item()
        advantages = [row.advantage for row in episode_rows[-3:]]
        assert all(close(a, (e - mean) / (spread + 1e-4)) for a, e in zip(advantages, expected, strict=True))


@pytest.mark.parametrize("critic", [None, pytest.param("multi_head", marks=SLOW)])
def test_turns_that_call_tools_receive_the_return_of_their_agent(model_folder, tmp_path, critic):
    """The turn with the call and the turn after the result both get the whole return of their agent."""
    agents = [AgentSpec("left", tools=[add]), DUEL[1]]
    settings = {"advantage": "none", "max_completion_length": 64}
    if critic:
        settings |= {"advantage": "gae", "critic": critic, "gae_lambda": 1.0, "level": "action", "num_generations": 1}
    ((rollout, rows),) = run(model_folder, tmp_path, EnvironmentLoop(Duel), agents, **settings)
    calling = [episode for episode in rollout.episodes if episode.turns[0].tool_calls]
    assert [(len(episode.turns), episode.turns[1].agent) for episode in calling] == [(7, "left")] * 6
    assert any(own(episode, "left") for episode in calling)
    for episode, episode_rows in zip(rollout.episodes, rows, strict=True):
        for row in episode_rows:
            actual = row.value_targets.item() if critic else row.advantage
            assert close(actual, own(episode, row.agent))


# ---- Rewards that cancel and agents that no reward reaches raise an error or log a warning ----


class Nearly(Duel):
    def pay(self, is_done):
        paid = super().pay(is_done)
        return {**paid, "right": 0.8 * paid["right"]}


class OneSided(Duel):
    def pay(self, is_done):
        return {"left": super().pay(is_done)["left"]}


def duellists(model_folder, tmp_path, duel, **settings):
    team = {"agents": DUEL, "workflow": EnvironmentLoop(duel), "reward_funcs": None, "settings": settings}
    return team_trainer(model_folder, tmp_path, **team)


def warnings_with(caplog, words):
    return [record.message for record in caplog.records if words in record.message]


def test_opposed_rewards_that_cancel_are_an_error(model_folder, tmp_path):
    trainer = duellists(model_folder, tmp_path, Duel, returns="team")
    with pytest.raises(ValueError, match="agents 'left', 'right' sum to zero in all of the last .* episodes"):
        trainer.train()


@pytest.mark.slow
def test_opposed_rewards_that_nearly_cancel_log_one_warning_in_capitals(model_folder, tmp_path, caplog):
    duellists(model_folder, tmp_path, Nearly, returns="team").train()
    (warning,) = warnings_with(caplog, "ARE OPPOSED")
    assert "'left' AND 'right' ARE OPPOSED (correlation -1.00" in warning


def test_an_agent_that_no_reward_reaches_is_named(model_folder, tmp_path, caplog):
    def of_turn(completions, turn, **kwargs):
        return [None if own_turn.agent == "actor" else float(len(own_turn.text)) for own_turn in turn]

    agents = [replace(agent, reward_funcs=of_turn) for agent in tiny_agents()]
    settings = {"credit": "per_step", "max_steps": PATIENCE + 1, "learning_rate": 0.0}
    team_trainer(model_folder, tmp_path, agents=agents, settings=settings).train()
    (warning,) = warnings_with(caplog, "NO REWARD REACHES")
    assert "THE AGENT 'actor'" in warning


def test_an_agent_that_is_never_rewarded_by_name_is_named_at_the_first_batch(model_folder, tmp_path, caplog):
    duellists(model_folder, tmp_path, OneSided).train()
    (warning,) = warnings_with(caplog, "NO REWARD CAN REACH")
    assert "THE AGENT 'right'" in warning and "rewarded only 'left' by name" in warning


def test_warnings_of_the_reward_reach_checker_by_hand(caplog):
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
    reach.note_advantages({"a": True, "b": True})  # the count starts again
    for _ in range(PATIENCE - 1):
        reach.note_advantages({"a": True, "b": False})
        reach.note_advantages({"a": False, "b": False})  # no agent learned, so the batch does not count
    assert "NO REWARD" not in caplog.text
    for _ in range(2 * PATIENCE):
        reach.note_advantages({"a": True, "b": False})
    assert caplog.text.count("NO REWARD REACHES THE AGENT 'b'") == 1


def test_deviations_of_a_batch_are_those_of_each_agent():
    """Two agents whose returns differ only in scale have the same advantages."""
    places = {"episodes": torch.tensor([0, 0, 1, 1, 2, 2, 3, 3]), "agents": torch.tensor([0, 1] * 4)}
    returns = torch.tensor([0.0, 0.0, 1.0, 100.0, 3.0, 300.0, 5.0, 500.0])
    samples = TurnReturns(**places, nodes=torch.tensor([0, 1] * 4), returns=returns, group_size=2, num_agents=2)
    advantages = BASELINES["agent"].function(samples, "batch")
    assert torch.allclose(advantages[::2], advantages[1::2], rtol=1e-3) and advantages.abs().min() > 0.1


def test_rewards_that_cancelled_before_others_did_not_are_not_counted():
    reach = RewardReachChecker(["a", "b"])
    opposed, common = [{"a": 1.0, "b": -1.0}] * 6, [{"a": 1.0, "b": 1.0}]
    for _ in range(3):
        reach.check_opposed(opposed)
        reach.check_opposed(common)
    reach.check_opposed(opposed)
    with pytest.raises(ValueError, match="in all of the last 8 episodes"):
        reach.check_opposed(opposed[:2])
