"""
Estimators that claim to be unbiased, on chains, parallel turns, graphs, loops, orchestrated teams and games, also with
frozen agents: the mean gradient of many episodes against the exact one.
"""

import pytest
import torch

from .small_teams import Drawing, Team, Truth, key_of, make, value_of


TEAMS = ["chain", "parallel", "orchestrated", "game", "graph", "loop"]
C3 = {"advantage": "c3", "turn_candidates": 2, "num_generations": 1}
ESTIMATORS = {
    "removed": {"advantage": "none", "credit": "removed"},
    "removed, leave one out": {"advantage": "leave_one_out", "credit": "removed", "num_generations": 2},
    "c3": C3,
    "c3, completions": {**C3, "candidate_samples": 2},
}


def drawing(folder, name, seed, frozen=(), **settings):
    """A team whose turns are drawn from its policies, and its exact values."""
    team = Team(name, seed)
    world = make(team, folder, frozen, per_device_train_batch_size=64, **settings)
    world.trainer.parts.runner.generator.generate = Drawing(world, seed=seed + 1)
    return team, world, Truth(team, world)


def estimated(folder, name, settings, episodes, frozen=()):
    """Per episode, the gradient with respect to the logits of the policies; and the exact one."""
    settings = {"num_generations": 2, **settings}
    team, world, truth = drawing(folder, name, 1, frozen, **settings)
    trainer = world.trainer
    trainer.args.per_device_train_batch_size = episodes
    trainer.model.train()
    (slice_,) = trainer.parts.batch_maker.for_training([{"prompt": "a"}] * episodes)
    gradients = torch.zeros(episodes, len(truth.gradient()))
    copies = settings.get("turn_candidates", 1)
    for row in slice_.rows:
        if row.is_trained:
            key, turn = key_of(row, world)
            gradients[row.episode] += value_of(row) * truth.score(key, turn) / copies
    exact, trained = truth.gradient(), truth.of_agents([agent for agent in team.names if agent not in frozen])
    size = settings["num_generations"]  # the episodes of a group are not independent
    return gradients.view(-1, size, gradients.size(1)).mean(dim=1), exact * trained


def agrees(gradients, exact):
    """Whether the mean is the exact gradient within its standard error, which is small enough to tell."""
    error = gradients.std(dim=0) / len(gradients) ** 0.5
    assert error.norm() < 0.25 * exact.norm(), "too few episodes"
    return bool(((gradients.mean(dim=0) - exact).abs() <= 4.5 * error + 1e-6).all())


FAST = [("orchestrated", "removed")]  # with fewer episodes, so with less power
CASES = [(team, estimator) for team in TEAMS for estimator in ESTIMATORS]
# Every team with half of the estimators, and every estimator with half of the teams
PER_COMMIT = [(t, e) for i, t in enumerate(TEAMS) for j, e in enumerate(ESTIMATORS) if (i + j) % 2 == 0]


@pytest.mark.parametrize(
    ("team", "estimator", "episodes"),
    [
        *((*case, 500) for case in FAST),
        *(pytest.param(*case, 3000, marks=pytest.mark.slow) for case in PER_COMMIT),
        *(pytest.param(*case, 3000, marks=pytest.mark.exhaustive) for case in CASES if case not in PER_COMMIT),
    ],
)
def test_the_mean_gradient_is_exact(tmp_path, team, estimator, episodes):
    assert agrees(*estimated(tmp_path, team, ESTIMATORS[estimator], episodes))


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["removed", "c3"])
@pytest.mark.parametrize(("team", "frozen"), [("chain", ["one"]), ("graph", ["two"]), ("orchestrated", ["left"])])
def test_frozen_agents_are_part_of_the_team(tmp_path, team, frozen, estimator):
    gradients, exact = estimated(tmp_path, team, ESTIMATORS[estimator], 3000, frozen)
    assert agrees(gradients, exact)
    assert not gradients[:, exact == 0].any()


def test_a_biased_estimator_is_detected(tmp_path):
    """Shows that the tests above can fail: the first turn gets almost none of its reward."""
    settings = {"advantage": "none", "credit": "step_discount", "credit_discount": 0.01}
    gradients, exact = estimated(tmp_path, "chain", settings, 500)
    assert not agrees(gradients, exact)


@pytest.mark.slow
def test_more_completions_of_a_candidate_are_closer_to_its_value(tmp_path):
    """The return of a candidate is a mean over n completions: its variance is 1/n of that of a single completion."""
    spreads = []
    for samples in (1, 9):
        _, world, _ = drawing(tmp_path / str(samples), "chain", 3, **C3, candidate_samples=samples)
        rollout = world.trainer.parts.rollouts.run([{"prompt": "a"}] * 400, training=True)
        values = {}
        for node in rollout.nodes:
            for turn, worth in zip(node.turns, node.returns, strict=True):
                if turn.agent == "one":
                    values.setdefault(tuple(turn.completion_ids), []).append(worth)
        spreads.append(
            {turn: torch.tensor(returns).var().item() for turn, returns in values.items() if len(returns) > 20}
        )
    assert spreads[0] and spreads[0].keys() == spreads[1].keys()
    for turn, variance in spreads[0].items():
        assert spreads[1][turn] == pytest.approx(variance / 9, rel=0.5)
