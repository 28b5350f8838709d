"""Games: the expected gradient of each player against the exact gradient of its own return, over all episodes."""

import itertools
import random

from marft_trl import AgentSpec
from marft_trl.workflows import EnvironmentLoop

import pytest
import torch

from .enumeration import TEAM, World
from .helpers import in_turn
from .test_unbiased import assert_same


ORDER = ("one", "two", "one")  # uneven turns


def paid(history) -> dict[str, float]:
    """The reward of each player after a turn of either: neither zero-sum nor shared."""
    draw = random.Random(repr(history))
    return {name: draw.uniform(-1, 2) for name in TEAM}


class Three:
    def reset(self, **row):
        self.history = []

    def whose_turn(self):
        return ORDER[len(self.history) % 3]

    def step(self, turns):
        self.history.append(tuple(turns[0].completion_ids))
        return None, paid(self.history), len(self.history) == 3


class Game(World):
    def __init__(self, folder, is_shared, **settings):
        agents = [AgentSpec("one"), AgentSpec("two", adapter="one" if is_shared else None)]
        workflow = EnvironmentLoop(Three, turns="one", horizon=3)
        super().__init__(folder, 1, workflow, agents=agents, reward_funcs=[], **settings)
        self.episodes = list(itertools.product(self.turns, repeat=3))

    def log_probs_of(self, episode) -> list[torch.Tensor]:
        seen = [tuple(token for turn in episode[:number] for token in turn) for number in range(3)]
        return [self.log_prob(*arguments) for arguments in zip(ORDER, seen, episode, strict=True)]

    def exact(self) -> torch.Tensor:
        """The gradient of each player's expected return by that player's own turns, all adapters in one vector."""
        self.trainer.model.zero_grad()
        total = torch.zeros(())
        for episode in self.episodes:
            log_probs = self.log_probs_of(episode)
            rewards = [paid(list(episode[: number + 1])) for number in range(3)]
            returns = {name: sum(reward[name] for reward in rewards) for name in TEAM}
            chance = sum(log_probs).exp().detach()
            total = total + chance * sum(returns[name] * logp for name, logp in zip(ORDER, log_probs, strict=True))
        total.backward()
        return self._gradient(dict.fromkeys(TEAM, 1.0))

    def of_groups(self, size: int) -> torch.Tensor:
        with torch.no_grad():
            chance = {episode: sum(self.log_probs_of(episode)).exp().item() for episode in self.episodes}
        return self.expected_of_groups(chance, size)


PPO = {"advantage": "gae", "num_generations": 1, "gae_lambda": 1.0, "normalize_advantages": "none"}
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("settings", "size", "factor", "is_shared"),
    [
        *in_turn(
            [
                ({"advantage": "none", "num_generations": 1}, 1, 1.0),
                ({**PPO, "critic": "shared", "level": "token"}, 1, 1.0),
            ],
            *(False, True),
        ),
        *(
            pytest.param(*case, is_shared, marks=SLOW)
            for is_shared in (False, True)
            for case in (
                ({"advantage": "none", "num_generations": 1, "credit_kind": "rewards"}, 1, 1.0),
                ({"advantage": "rae", "num_generations": 1}, 1, 1.0),
                ({"advantage": "none", "level": "action", "num_generations": 1}, 1, 1.0),
                ({"advantage": "leave_one_out"}, 2, 1.0),
                ({"advantage": "leave_one_out", "credit_kind": "rewards"}, 2, 1.0),
                # the mean of a group of 2 holds half of the episode's own return
                ({"advantage": "group", "scale_rewards": "none"}, 2, 0.5),
                ({"advantage": "agent", "scale_rewards": "none"}, 2, 0.5),
                ({**PPO, "critic": "shared", "level": "action", "critic_sees": "history"}, 1, 1.0),
                ({**PPO, "critic": "per_agent", "level": "token"}, 1, 1.0),
                ({**PPO, "critic": "multi_head", "level": "action"}, 1, 1.0),
                ({**PPO, "critic": "frozen", "level": "action"}, 1, 1.0),
            )
        ),
    ],
    ids=str,
)
def test_players_follow_their_own_returns_without_bias(tmp_path, is_shared, settings, size, factor):
    world = Game(tmp_path, is_shared, **{"level": "token", **settings})
    if settings["advantage"] == "rae":  # a baseline of earlier batches
        world.trainer.parts.checkpoints.stateful["running_baselines"].load_state_dict(
            {"one/": [1.5, 3], "two/": [-1, 3]}
        )
    assert_same(world.of_groups(size), world.exact(), factor)


@pytest.mark.slow
def test_returns_of_the_team_are_another_gradient(tmp_path):
    """The check can fail: players that learn from the sum of all rewards have a different gradient."""
    world = Game(tmp_path, False, advantage="none", num_generations=1, returns="team")
    got, exact = world.of_groups(1), world.exact()
    assert (got - exact).norm() > 0.2 * exact.norm()
