# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Exploitability in games that can be solved by hand, and the game of `examples/kuhn.py`."""

import importlib
import math
import random
import re
from pathlib import Path
from types import SimpleNamespace

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
    chances = {"": (alpha, 0, 3 * alpha), "check bet": (0, alpha + 1 / 3, 1)}
    chances |= {"check": (1 / 3, 0, 1), "bet": (0, 1 / 3, 1)}
    return policy_of(kuhn, lambda card, moves: chances[moves][card])


def pennies():
    ends = {True: End((1.0, -1.0)), False: End((-1.0, 1.0))}
    sides = {side: Decision(1, "second", {guess: ends[guess == side] for guess in "ht"}) for side in "ht"}
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


def best_by_enumeration(game, policy, player):
    legal = {name: list(place.moves) for name, place in find_information_sets(game).items() if place.player == player}
    names, best = list(legal), -math.inf
    for code in range(math.prod(len(moves) for moves in legal.values())):
        pure = {}
        for name in names:
            code, choice = divmod(code, len(legal[name]))
            pure[name] = {move: float(index == choice) for index, move in enumerate(legal[name])}
        best = max(best, expected_returns(game, {**policy, **pure})[player])
    return best


@pytest.mark.parametrize("seed", range(3))
def test_best_response_equals_the_best_of_all_pure_strategies(kuhn, seed):
    draw = random.Random(seed)
    policy = policy_of(kuhn, lambda card, moves: draw.random())
    for player in (0, 1):
        assert best_return(kuhn.KUHN, policy, player) == pytest.approx(best_by_enumeration(kuhn.KUHN, policy, player))


def test_a_player_that_moves_twice_responds_to_earlier_observations():
    """Two coins: the player sees the first, may pay 0.25 to see the second, and then guesses the second."""

    def named(side, information_set, cost=0.0):
        return Decision(0, information_set, {guess: End((float(guess == side) - cost,)) for guess in "ht"})

    starts = [{"pay": named(side, f"told {side}", 0.25), "guess": named(side, "blind")} for side in "ht"]
    game = Chance([(0.5, Decision(0, "start", moves)) for moves in starts])
    assert best_return(game, {}, 0) == pytest.approx(0.75)


def test_averages_count_as_often_as_a_player_gets_there(kuhn):
    """The first player checks the queen always or never, and then folds or calls: only the first policy gets there."""
    checks = equilibrium(kuhn, 0)
    bets = {**checks, kuhn.shown("queen", ""): {"check": 0.0, "bet": 1.0}}
    bets[kuhn.shown("queen", "check bet")] = {"fold": 0.0, "call": 1.0}
    averaged = average_policy(kuhn.KUHN, [checks, bets])
    assert averaged[kuhn.shown("queen", "")] == {"check": 0.5, "bet": 0.5}
    assert averaged[kuhn.shown("queen", "check bet")] == pytest.approx({"fold": 2 / 3, "call": 1 / 3})
    pairs = zip(*(expected_returns(kuhn.KUHN, policy) for policy in (checks, bets)), strict=True)
    others = {name: checks[name] for name, place in find_information_sets(kuhn.KUHN).items() if place.player}
    assert expected_returns(kuhn.KUHN, averaged | others) == pytest.approx([sum(pair) / 2 for pair in pairs])


HEADS, COIN = {"h": 1.0, "t": 0.0}, {"h": 0.5, "t": 0.5}


def test_exploitability_is_the_mean_over_players():
    assert exploitability(pennies(), {"first": HEADS, "second": COIN}) == pytest.approx(0.5)  # the second gains 1
    assert exploitability(pennies(), {"first": COIN, "second": COIN}) == pytest.approx(0)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ({"first": HEADS}, r"information set 'second', got None"),
        ({"first": {"h": 1.0}, "second": COIN}, r"information set 'first', got \['h'\]"),
        ({"first": {"h": 1.0, "t": 0.5}, "second": COIN}, r"information set 'first' must .* sum to 1"),
        ({"first": {"h": math.nan, "t": 0.5}, "second": COIN}, r"'first' must be from 0 to 1"),
    ],
)
def test_policies_that_do_not_fit(policy, message):
    with pytest.raises(ValueError, match=message):
        exploitability(pennies(), policy)


def test_invalid_games():
    end = End((1.0,))
    moves = [(0.5, Decision(0, "a", {move: end})) for move in "xy"]
    forgotten = [(0.5, Decision(0, f"sees {side}", {"go": Decision(0, "blind", {"x": end})})) for side in "ht"]
    for call, message in (
        (lambda: exploitability(Chance([(0.5, end)]), {}), "a random event must be from 0 to 1 and sum to 1"),
        (lambda: find_information_sets(Chance(moves)), "set 'a' need the same player and the same moves"),
        (lambda: find_information_sets(Chance(forgotten)), "know in the information set 'blind' what it saw and did"),
        (lambda: average_policy(pennies(), []), "must not be empty"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_the_environment_plays_the_tree(kuhn):
    def play(cards, node, moves):
        game = kuhn.Kuhn()
        if isinstance(node, End):
            game.reset(" ".join(cards), "", "first second")
            for move in moves:
                _, reward, over = game.step([SimpleNamespace(agent=game.whose_turn(), text=move)])
            assert over and (reward["first"], reward["second"]) == node.returns
            return 1
        observation = game.reset(" ".join(cards), " ".join(moves), "first second")
        assert observation == {kuhn.SEATS[node.player]: node.information_set}
        return sum(play(cards, following, [*moves, move]) for move, following in node.moves.items())

    for (_, node), cards in zip(kuhn.KUHN.outcomes, kuhn.DEALS, strict=True):
        assert play(cards, node, []) == 5


def test_moves_are_one_token_before_a_model_is_taught(kuhn, monkeypatch, tmp_path):
    """Special tokens at the beginning of a text do not count. Each folder belongs to one model and device."""

    def tokenizer(text, add_special_tokens=True):
        return {"input_ids": [0] * add_special_tokens + [len(text)]}

    assert kuhn.tokens_of_moves(tokenizer) == {"check": 5, "bet": 3, "fold": 4, "call": 4}
    tiny_tokenizer([*kuhn.CARDS, "check", "bet", "fold"]).save_pretrained(tmp_path / "base")  # without "call"
    with pytest.raises(SystemExit, match="tokens for 'call', not one"):
        kuhn.taught_model(str(tmp_path / "base"), tmp_path)  # there is no model to teach

    def teach(base, device="cpu"):
        return kuhn.taught_model(base, tmp_path, device=device)

    monkeypatch.setattr(kuhn.Path, "exists", lambda path: True)
    assert len({teach("a/base"), teach("b/base"), teach("b/base", "cuda")}) == 3


@pytest.mark.parametrize(
    "players", ["copies", *(pytest.param(name, marks=pytest.mark.slow) for name in ("own", "one"))]
)
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
    played = {(turn.agent, turn.prompt_ids) for episode in episodes for turn in episode.turns}
    read = set(zip(reader.agents, map(tuple, reader.prompts), strict=True))
    assert read <= {(agent, tuple(prompt)) for agent, prompt in played}
    assert {agent for agent, _ in read} == ({"first"} if players == "copies" else {"first", "second"})
