# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Small games as trees, and how far players are from an equilibrium, computed exactly."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple


# Probability of each move by information set
Policy = Mapping[str, Mapping[str, float]]


class End(NamedTuple):
    """
    The end of a game.

    Args:
        returns (`tuple[float, ...]`): what each player gains.
    """

    returns: tuple[float, ...]


class Chance(NamedTuple):
    """
    A random event, such as dealing cards.

    Args:
        outcomes (`Sequence[tuple[float, Node]]`): the probability of each outcome, and what follows it.
    """

    outcomes: Sequence[tuple[float, Node]]


class Decision(NamedTuple):
    """
    A position in which a player moves.

    Args:
        player (`int`): position of the player in `End.returns`.
        information_set (`str`): label of everything the player knows. Positions that it cannot tell apart share
            it, and they have the same moves.
        moves (`dict[str, Node]`): what follows each move.
    """

    player: int
    information_set: str
    moves: Mapping[str, Node]


Node = End | Chance | Decision


def find_information_sets(game: Node) -> dict[str, Decision]:
    """
    The information sets of a game, each with its first position.

    Raises:
        ValueError: positions of an information set differ in the player, in the moves, or in what the player did
            before (perfect recall), or the probabilities of a random event do not sum to 1.
    """
    return _find_with_past(game)[0]


def _find_with_past(game: Node) -> tuple[dict[str, Decision], dict[str, tuple[tuple[str, str], ...]]]:
    """The information sets, and for each of them those of the same player before, with its moves there."""
    positions: dict[str, Decision] = {}
    past: dict[str, tuple[tuple[str, str], ...]] = {}

    def walk(node: Node, done: Mapping[int, tuple[tuple[str, str], ...]]) -> None:
        if isinstance(node, Chance):
            _check_sum([probability for probability, _ in node.outcomes], "a random event")
            for _, following in node.outcomes:
                walk(following, done)
        elif isinstance(node, Decision):
            name, own = node.information_set, done.get(node.player, ())
            first = positions.setdefault(name, node)
            if (first.player, set(first.moves)) != (node.player, set(node.moves)):
                raise ValueError(
                    f"All positions of the information set {name!r} need the same player and the same moves, got "
                    f"player {first.player} with {sorted(first.moves)} and player {node.player} with "
                    f"{sorted(node.moves)}. Name them differently."
                )
            if past.setdefault(name, own) != own:
                raise ValueError(
                    f"A player must know in the information set {name!r} what it saw and did before, got "
                    f"{list(past[name])} and {list(own)}. Name the positions differently."
                )
            for move, following in node.moves.items():
                walk(following, {**done, node.player: (*own, (name, move))})

    walk(game, {})
    return positions, past


def expected_returns(game: Node, policy: Policy) -> tuple[float, ...]:
    """
    What each player gains on average if all of them follow a policy.

    Args:
        game (`Node`): root of the tree.
        policy (`dict[str, dict[str, float]]`): probability of each move by information set.
    """
    if isinstance(game, End):
        return game.returns
    if isinstance(game, Chance):
        branches = list(game.outcomes)
    else:
        branches = [(policy[game.information_set][move], following) for move, following in game.moves.items()]
    weighted = [(weight, expected_returns(following, policy)) for weight, following in branches]
    players = range(len(weighted[0][1]))
    return tuple(math.fsum(weight * gains[player] for weight, gains in weighted) for player in players)


def best_return(game: Node, policy: Policy, player: int) -> float:
    """
    What a player gains on average with the best response to the policy of the others. The player must have perfect
    recall: an information set tells what the player saw and did before.

    Args:
        game (`Node`): root of the tree.
        policy (`dict[str, dict[str, float]]`): probability of each move by information set. That of `player` is not
            used.
        player (`int`): position of the player in `End.returns`.
    """
    positions: dict[str, list[tuple[float, Decision]]] = {}  # with the probability that the others lead there

    def walk(node: Node, weight: float) -> None:
        if isinstance(node, Chance):
            for probability, following in node.outcomes:
                walk(following, weight * probability)
        elif isinstance(node, Decision):
            if node.player == player:
                positions.setdefault(node.information_set, []).append((weight, node))
            for move, following in node.moves.items():
                walk(following, weight if node.player == player else weight * policy[node.information_set][move])

    @functools.cache
    def best_move(information_set: str) -> str:
        reached = positions[information_set]
        gains = {
            move: math.fsum(weight * gain(node.moves[move]) for weight, node in reached)
            for move in reached[0][1].moves
        }
        return max(gains, key=gains.__getitem__)

    def gain(node: Node) -> float:
        if isinstance(node, End):
            return node.returns[player]
        if isinstance(node, Chance):
            return math.fsum(probability * gain(following) for probability, following in node.outcomes)
        if node.player == player:
            return gain(node.moves[best_move(node.information_set)])
        probabilities = policy[node.information_set]
        return math.fsum(probabilities[move] * gain(following) for move, following in node.moves.items())

    walk(game, 1.0)
    return gain(game)


def exploitability(game: Node, policy: Policy) -> float:
    """
    How much a player gains on average by changing to the best response while the others keep their policy: the mean
    over players. It is 0 in a Nash equilibrium and positive otherwise: half of "NashConv" (1711.00832) for two.

    Args:
        game (`Node`): root of the tree, in which each player remembers what it saw and did.
        policy (`dict[str, dict[str, float]]`): probability of each move by information set.

    Raises:
        ValueError: an information set has no probabilities, or they are not those of its moves, or the tree is not
            that of a game.
    """
    for name, position in find_information_sets(game).items():
        probabilities = policy.get(name)
        if probabilities is None or set(probabilities) != set(position.moves):
            raise ValueError(
                f"`policy` must have a probability for each of the moves {sorted(position.moves)} of the information "
                f"set {name!r}, got {None if probabilities is None else sorted(probabilities)}."
            )
        _check_sum(list(probabilities.values()), f"the information set {name!r}")
    returns = expected_returns(game, policy)
    return math.fsum(best_return(game, policy, player) - gain for player, gain in enumerate(returns)) / len(returns)


def average_policy(game: Node, policies: Sequence[Policy]) -> dict[str, dict[str, float]]:
    """
    The policy of players who draw one of several policies before each game and follow it to the end, as fictitious
    play averages past policies. A policy counts in an information set as often as its player gets there with it.

    Args:
        game (`Node`): root of the tree, in which each player remembers what it saw and did.
        policies (`Sequence[dict[str, dict[str, float]]]`): the policies to average, such as those of earlier steps.
    """
    if not policies:
        raise ValueError("`policies` must not be empty.")
    averaged = {}
    positions, past = _find_with_past(game)
    for name, position in positions.items():
        reach = [math.prod(policy[place][move] for place, move in past[name]) for policy in policies]
        weights = reach if sum(reach) else [1.0] * len(policies)
        averaged[name] = {
            move: math.fsum(w * policy[name][move] for w, policy in zip(weights, policies, strict=True)) / sum(weights)
            for move in position.moves
        }
    return averaged


def _check_sum(probabilities: Sequence[float], place: str) -> None:
    if any(not 0 <= value <= 1 for value in probabilities) or abs(math.fsum(probabilities) - 1) > 1e-6:
        raise ValueError(f"The probabilities of {place} must be from 0 to 1 and sum to 1, got {list(probabilities)}.")
