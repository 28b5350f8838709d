# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Exploitability in games that can be solved by hand, and the game of `examples/kuhn.py`."""

import importlib
import math
import random
import re
from pathlib import Path

from marft_trl.extras.tasks import (
    Chance,
    Decision,
    End,
    average_policy,
    best_return,
    expected_returns,
    exploitability,
    find_information_sets,
)
from marft_trl.tiny import tiny_model, tiny_tokenizer

import pytest

from .test_tools import TRL_GENERATION


@pytest.fixture
def kuhn(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "examples"))
    return importlib.import_module("kuhn")


def policy_of(kuhn, aggressive):
    """A policy from the probability to bet or call: `aggressive(card, moves)`, with 0, 1 and 2 for the cards."""
    policy = {}
    for index, card in enumerate(kuhn.CARDS):
        for moves, (passive, active) in kuhn.MOVES.items():
            chance = aggressive(index, moves)
            policy[kuhn.shown(card, moves)] = {passive: 1 - chance, active: chance}
    return policy


def equilibrium(kuhn, alpha):
    """The equilibria of Kuhn poker (1950): the first player bets the jack with `alpha`, from 0 to 1/3."""
    chances = {
        "": (alpha, 0, 3 * alpha),
        "check bet": (0, alpha + 1 / 3, 1),
        "check": (1 / 3, 0, 1),
        "bet": (0, 1 / 3, 1),
    }
    return policy_of(kuhn, lambda card, moves: chances[moves][card])


def pennies(first_wins=1.0):
    """Matching pennies: the second player does not see the first one's side."""
    sides = {
        side: Decision(
            1, "second", {guess: End((first_wins, -1.0) if guess == side else (-1.0, 1.0)) for guess in "ht"}
        )
        for side in "ht"
    }
    return Decision(0, "first", sides)


def test_players_of_kuhn_poker(kuhn):
    """By hand: the coin 11/24; of players who bet and call always, 1/3: fold the jack, show the king."""
    game = kuhn.KUHN
    assert len(find_information_sets(game)) == 12
    coin = policy_of(kuhn, lambda card, moves: 0.5)
    assert exploitability(game, coin) == pytest.approx(11 / 24)
    assert expected_returns(game, coin) == pytest.approx((1 / 8, -1 / 8))
    assert exploitability(game, policy_of(kuhn, lambda card, moves: 1.0)) == pytest.approx(1 / 3)
    assert exploitability(game, policy_of(kuhn, lambda card, moves: 0.0)) == pytest.approx(1.0)  # a bet wins the pot


@pytest.mark.parametrize("alpha", [0, 0.1, 1 / 3])
def test_equilibria_of_kuhn_poker(kuhn, alpha):
    game, policy = kuhn.KUHN, equilibrium(kuhn, alpha)
    assert exploitability(game, policy) == pytest.approx(0, abs=1e-12)
    assert expected_returns(game, policy) == pytest.approx((-1 / 18, 1 / 18))


def test_the_player_with_one_wrong_move_is_exploited(kuhn):
    """
    By hand, against a second player that never calls with a queen: bets gain 1 from a jack and a queen, and lose 2
    to a king. The first player bets each card: jack (1 - 2) / 2, queen (1 - 2) / 2, king 1; or checks the queen, folds
    it against a bet, and gains ((2/3) * 1 - 1/3 - 1) / 2 = -1/3, or calls, ((2/3) * 1 + (1/3) * 2 - 2) / 2 = -1/3;
    or checks the king and calls: ((2/3) * 1 + (1/3) * 2 + 1) / 2 = 7/6. Jack: checking loses 1. The best of each card:
    -1/2, -1/3 and 7/6, on average 1/9.
    """
    policy = equilibrium(kuhn, 0)
    policy[kuhn.shown("queen", "bet")] = {"fold": 1.0, "call": 0.0}
    assert best_return(kuhn.KUHN, policy, 0) == pytest.approx(1 / 9)
    assert best_return(kuhn.KUHN, policy, 1) == pytest.approx(1 / 18)
    assert exploitability(kuhn.KUHN, policy) == pytest.approx((1 / 9 + 1 / 18) / 2)


def best_by_enumeration(game, policy, player):
    """The best return over all pure strategies of a player."""
    own = {name: list(place.moves) for name, place in find_information_sets(game).items() if place.player == player}
    names, best = list(own), -math.inf
    for code in range(math.prod(len(moves) for moves in own.values())):
        pure = {}
        for name in names:
            code, choice = divmod(code, len(own[name]))
            pure[name] = {move: float(index == choice) for index, move in enumerate(own[name])}
        best = max(best, expected_returns(game, {**policy, **pure})[player])
    return best


@pytest.mark.parametrize("seed", range(3))
def test_best_response_equals_the_best_of_all_pure_strategies(kuhn, seed):
    draw = random.Random(seed)
    policy = policy_of(kuhn, lambda card, moves: draw.random())
    for player in (0, 1):
        assert best_return(kuhn.KUHN, policy, player) == pytest.approx(best_by_enumeration(kuhn.KUHN, policy, player))


def test_a_player_that_moves_twice_responds_to_what_it_saw():
    """Two coins: the player is told the first one and may pay 0.25 to be told the second, then names the second."""
    told = {
        side: Decision(0, f"told {side}", {guess: End((float(guess == side) - 0.25,)) for guess in "ht"})
        for side in "ht"
    }
    blind = {side: Decision(0, "blind", {guess: End((float(guess == side),)) for guess in "ht"}) for side in "ht"}
    game = Chance([(0.5, Decision(0, "start", {"pay": told[side], "guess": blind[side]})) for side in "ht"])
    assert best_return(game, {}, 0) == pytest.approx(0.75)


def test_averages_count_as_often_as_a_player_gets_there(kuhn):
    """The first player checks the queen always or never, and then folds or calls: only the first policy gets there."""
    checks = equilibrium(kuhn, 0)
    bets = {**checks, kuhn.shown("queen", ""): {"check": 0.0, "bet": 1.0}}
    bets[kuhn.shown("queen", "check bet")] = {"fold": 0.0, "call": 1.0}
    averaged = average_policy(kuhn.KUHN, [checks, bets])
    assert averaged[kuhn.shown("queen", "")] == {"check": 0.5, "bet": 0.5}
    assert averaged[kuhn.shown("queen", "check bet")] == pytest.approx({"fold": 2 / 3, "call": 1 / 3})
    mixed = [
        sum(pair) / 2
        for pair in zip(expected_returns(kuhn.KUHN, checks), expected_returns(kuhn.KUHN, bets), strict=True)
    ]
    one_averages = {
        **averaged,
        **{name: checks[name] for name, place in find_information_sets(kuhn.KUHN).items() if place.player},
    }
    assert expected_returns(kuhn.KUHN, one_averages) == pytest.approx(mixed)


def test_exploitability_is_the_mean_over_players():
    policy = {"first": {"h": 1.0, "t": 0.0}, "second": {"h": 0.5, "t": 0.5}}
    assert exploitability(pennies(), policy) == pytest.approx(0.5)  # only the second player can gain: 1
    assert exploitability(pennies(), {**policy, "first": {"h": 0.5, "t": 0.5}}) == pytest.approx(0)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ({"first": {"h": 1.0, "t": 0.0}}, r"information set 'second', got None"),
        ({"first": {"h": 1.0}, "second": {"h": 0.5, "t": 0.5}}, r"information set 'first', got \['h'\]"),
        ({"first": {"h": 1.0, "t": 0.5}, "second": {"h": 0.5, "t": 0.5}}, r"information set 'first' must .* sum to 1"),
        ({"first": {"h": math.nan, "t": 0.5}, "second": {"h": 0.5, "t": 0.5}}, r"'first' must be from 0 to 1"),
    ],
)
def test_policies_that_do_not_fit(policy, message):
    with pytest.raises(ValueError, match=message):
        exploitability(pennies(), policy)


def test_players_must_remember_what_they_did():
    """The player sees a coin, and has forgotten it and its move afterwards."""
    blind = {side: Decision(0, "blind", {guess: End((float(guess == side),)) for guess in "ht"}) for side in "ht"}
    game = Chance([(0.5, Decision(0, f"sees {side}", {"go": blind[side]})) for side in "ht"])
    with pytest.raises(ValueError, match="must know in the information set 'blind' what it saw and did before"):
        find_information_sets(game)


def test_invalid_games():
    with pytest.raises(ValueError, match="a random event must be from 0 to 1 and sum to 1"):
        exploitability(Chance([(0.5, End((1.0, -1.0)))]), {})
    game = Chance([(0.5, Decision(0, "a", {"x": End((1.0,))})), (0.5, Decision(0, "a", {"y": End((0.0,))}))])
    with pytest.raises(ValueError, match="information set 'a' need the same player and the same moves"):
        find_information_sets(game)
    with pytest.raises(ValueError, match="must not be empty"):
        average_policy(pennies(), [])


def test_the_environment_plays_the_tree(kuhn):
    """Every way through the tree, played in the environment, ends with its returns."""

    class Turn:
        def __init__(self, agent, text):
            self.agent, self.text = agent, text

    def play(cards, node, moves):
        if isinstance(node, End):
            game = kuhn.Kuhn()
            game.reset(" ".join(cards), "", "first second")
            for move in moves:
                agent = game.whose_turn()
                told, reward, over = game.step([Turn(agent, move)])
            assert over and (reward["first"], reward["second"]) == node.returns
            return 1
        game = kuhn.Kuhn()
        told = game.reset(" ".join(cards), " ".join(moves), "first second")
        assert told == {kuhn.SEATS[node.player]: node.information_set}
        return sum(play(cards, following, [*moves, move]) for move, following in node.moves.items())

    for (_, node), cards in zip(kuhn.KUHN.outcomes, kuhn.DEALS, strict=True):
        assert play(cards, node, []) == 5


@pytest.mark.parametrize("players", ["own", "one", "copies"])
def test_policies_are_read_where_the_games_are_played(kuhn, monkeypatch, tmp_path, players):
    """The prompts of the twelve information sets are those of turns in games, and of the agent that learns there."""
    words = [*kuhn.CARDS, "check", "bet", "fold", "call", "start", "or", "Kuhn", "poker", "environment"]
    tokenizer = tiny_tokenizer(words)
    tokenizer.chat_template = kuhn.TEMPLATE
    model = tiny_model(len(tokenizer))
    for thing in (model, tokenizer):
        thing.save_pretrained(tmp_path / "model")
    trainer = kuhn.make_trainer(str(tmp_path / "model"), tmp_path / "out", players)
    draw = random.Random(0)

    def generate(prompts, *_, **__):
        pairs = [re.search(r"(\w+) or (\w+)", tokenizer.decode(prompt)).groups() for prompt in prompts]
        return [tokenizer(draw.choice(pair))["input_ids"] for pair in pairs], None

    reader = kuhn.PolicyReader(trainer, players)
    policy, legal = reader.read()
    assert set(policy) == set(find_information_sets(kuhn.KUHN)) and 0 < legal < 1
    with monkeypatch.context() as patch:
        patch.setattr(trainer, TRL_GENERATION, generate)
        episodes = trainer.team.run(kuhn.games(200, players, seed=0))
    seen = {(turn.agent, turn.prompt_ids) for episode in episodes for turn in episode.turns}
    read = set(zip(reader.agents, map(tuple, reader.prompts), strict=True))
    assert read <= {(agent, tuple(prompt)) for agent, prompt in seen}
    assert {agent for agent, _ in read} == ({"first"} if players == "copies" else {"first", "second"})
