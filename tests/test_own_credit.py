"""Own returns under every rule of credit: discounts over own turns, scored turns, re-runs, candidates, tools."""

from marft_trl import AgentSpec
from marft_trl.algorithms.baselines import BASELINES, TurnReturns
from marft_trl.workflows import EnvironmentLoop

import pytest
import torch

from .helpers import add
from .test_own_returns import DUEL, SLOW, Alternating, Duel, close, own, run, worth
from .test_tools import canned, tool_tokenizer


GAME = EnvironmentLoop(Alternating, turns="one")


@pytest.mark.parametrize("sees", [Duel, pytest.param(Alternating, marks=SLOW)])
def test_discounts_run_over_ones_own_turns(model_folder, tmp_path, sees):
    """The last own turn gets the whole return, the one before it half of it, and so on."""
    workflow = EnvironmentLoop(sees, turns="one" if sees is Alternating else "all")
    settings = {"advantage": "none", "credit": "step_discount", "credit_discount": 0.5}
    ((rollout, rows),) = run(model_folder, tmp_path, workflow, **settings)
    assert any(own(one, "left") for one in rollout.episodes)
    for episode, its in zip(rollout.episodes, rows, strict=True):
        for agent in ("left", "right"):
            found = [row.advantage for row in its if row.agent == agent]
            expected = [own(episode, agent) * 0.5**left for left in reversed(range(len(found)))]
            assert all(map(close, found, expected))


def letters(completions, **kwargs):
    return [float(len(str(one)) % 5) for one in completions]


@pytest.mark.parametrize("kind", ["returns", pytest.param("rewards", marks=SLOW)])
def test_scores_of_a_turn_come_on_top_of_what_its_agent_receives(model_folder, tmp_path, kind):
    agents = [AgentSpec("left", reward_funcs=letters), AgentSpec("right", reward_funcs=letters)]
    settings = {"advantage": "none", "credit": "per_step", "own_reward_weight": 0.25, "credit_kind": kind}
    ((rollout, rows),) = run(model_folder, tmp_path, GAME, agents, **settings)
    for episode, its in zip(rollout.episodes, rows, strict=True):
        for turn, row in zip(episode.turns, its, strict=True):
            counted = [turn]
            if kind == "rewards":  # from the turn on
                counted = [one for one in episode.turns if one.agent == turn.agent and one.index >= turn.index]
            score = sum(letters([one.text])[0] for one in counted)
            assert close(row.advantage, 0.25 * score + own(episode, turn.agent))


@pytest.mark.parametrize("credit", [pytest.param("counterfactual", marks=SLOW), "removed"])
@pytest.mark.parametrize("advantage", ["none", pytest.param("leave_one_out", marks=SLOW)])
def test_reruns_are_compared_by_what_the_agent_of_the_turn_receives(
    model_folder, tmp_path, advantage, credit, monkeypatch
):
    from marft_trl.rollout.runner import EpisodeRunner

    done, plain = [], EpisodeRunner.run

    def run_and_note(self, rows, answer=None, reruns=None, *args, **kwargs):
        episodes = plain(self, rows, answer, reruns, *args, **kwargs)
        if reruns is not None:
            done.extend(episodes)
        return episodes

    monkeypatch.setattr(EpisodeRunner, "run", run_and_note)
    settings = {"advantage": advantage, "credit": credit}
    ((rollout, rows),) = run(model_folder, tmp_path, GAME, **settings)
    if credit == "removed":
        places = [k for episode in rollout.episodes for k in range(len(episode.turns))]
        assert all(again.turns[k].completion_ids == () for again, k in zip(done, places, strict=True))
    jobs = iter(done)
    credits = [
        [own(episode, turn.agent) - own(next(jobs), turn.agent) for turn in episode.turns]
        for episode in rollout.episodes
    ]
    assert any(any(its) for its in credits) and next(jobs, None) is None
    for index, its in enumerate(rows):
        for k, row in enumerate(its):
            expected = credits[index][k]
            if advantage == "leave_one_out":  # mean credit of the agent in each other episode of the prompt
                others = [other for other in range(index // 4 * 4, index // 4 * 4 + 4) if other != index]
                means = [
                    sum(c for c, one in zip(credits[o], rows[o], strict=True) if one.agent == row.agent)
                    / sum(one.agent == row.agent for one in rows[o])
                    for o in others
                ]
                expected -= sum(means) / len(means)
            assert close(row.advantage, expected), (index, k)


def test_alternatives_are_compared_with_one_another_alone():
    """Two nodes of an episode and one of another one; what nothing scored does not count."""
    nan = float("nan")
    episodes, nodes = torch.tensor([0, 0, 0, 0, 0, 1, 1]), torch.tensor([0, 0, 0, 1, 1, 0, 0])
    returns = torch.tensor([1.0, 2.0, 6.0, 10.0, nan, -1.0, 3.0])
    samples = TurnReturns(episodes, torch.zeros(7, dtype=torch.long), nodes, returns, group_size=1, num_agents=1)
    found = BASELINES["c3"].function(samples, "group").tolist()
    assert found == [1.0 - 4.0, 2.0 - 3.5, 6.0 - 1.5, 0.0, 0.0, -4.0, 4.0]


@pytest.mark.parametrize("rounds", [5, pytest.param(4, marks=SLOW)], ids=["left is last", "right is last"])
@pytest.mark.parametrize("how", ["best", pytest.param("sampled", marks=SLOW)])
def test_candidates_are_compared_by_what_their_agent_receives(model_folder, tmp_path, rounds, how):
    """Those of the last turn end the game, so their returns are known; the best one is the best for its agent."""

    class Game(Alternating):
        pass

    Game.rounds = rounds
    settings = {"advantage": "turn", "turn_candidates": 3, "continue_from": how, "num_generations": 2}
    ((rollout, rows),) = run(model_folder, tmp_path, EnvironmentLoop(Game, turns="one"), **settings)
    last, sign = ("left", 1) if rounds == 5 else ("right", -1)
    for index, (episode, its) in enumerate(zip(rollout.episodes, rows, strict=True)):
        nodes = [node for node in rollout.nodes if node.episode == index]
        assert len(nodes) == rounds and len(its) == 3 * rounds
        node, before = nodes[-1], list(episode.turns[:-1])
        expected = [sign * worth([*before, turn]) for turn in node.turns]
        assert node.returns == pytest.approx(expected) and node.turns[0].agent == last
        if how == "best":
            assert own(episode, last) == max(expected)
        mean, spread = sum(expected) / 3, torch.tensor(expected).float().std().item()
        found = [row.advantage for row in its[-3:]]
        assert all(close(a, (e - mean) / (spread + 1e-4)) for a, e in zip(found, expected, strict=True))


@pytest.mark.parametrize("critic", [None, pytest.param("multi_head", marks=SLOW)])
def test_turns_that_call_tools_receive_what_their_agent_receives(model_folder, tmp_path, critic, monkeypatch):
    """The turn with the call and the one that goes on from the result both get all that their agent receives."""
    from . import test_own_returns

    def with_tools(*arguments, **named):
        trainer = test_own_returns_trainer(*arguments, processing_class=tool_tokenizer(), **named)
        canned(trainer)
        return trainer

    test_own_returns_trainer = test_own_returns.team_trainer
    monkeypatch.setattr(test_own_returns, "team_trainer", with_tools)
    agents = [AgentSpec("left", tools=[add]), DUEL[1]]
    settings = {"advantage": "none", "max_completion_length": 64}
    if critic:
        settings |= {"advantage": "gae", "critic": critic, "gae_lambda": 1.0, "level": "action", "num_generations": 1}
    ((rollout, rows),) = run(model_folder, tmp_path, EnvironmentLoop(Duel), agents, **settings)
    calling = [one for one in rollout.episodes if one.turns[0].tool_calls]
    assert len(calling) == 6 and all(len(one.turns) == 7 and one.turns[1].agent == "left" for one in calling)
    assert any(own(one, "left") for one in calling)
    for episode, its in zip(rollout.episodes, rows, strict=True):
        for row in its:
            value = row.value_targets.item() if critic else row.advantage
            assert close(value, own(episode, row.agent))
