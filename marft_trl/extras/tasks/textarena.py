# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Games of TextArena: a workflow in which every player is an agent, or several that make its moves together."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

from ...episodes.live import LiveEpisode
from ...episodes.records import Feedback, Seen
from ...workflows.base import Workflow, check_count
from .environments import seed_in
from .reasoning_gym import load


class TextArena(Workflow):
    """
    A game of [TextArena](https://github.com/LeonGuertler/TextArena) with one to any number of players. The dataset has
    the column `seed`, see [`game_seeds`]. A game ends by its own rules, or after `max_moves` without rewards.

    Args:
        game (`str`):
            Name of the game, such as `"TicTacToe-v0"`.
        seats (`Sequence[str | Sequence[str]]`):
            For each player an agent, or agents that act one after the other and see one another's turns; the last one
            makes the move. An agent may have several seats; it then sees what all of them see, and receives their
            mean. Rewards of several players are each one's own, that of a single player is its team's.
        max_moves (`int`, *optional*, defaults to `100`):
            Largest number of moves.
        settings:
            As in `textarena.make`.
    """

    earns = True

    def __init__(self, game: str, seats: Sequence[str | Sequence[str]], max_moves: int = 100, **settings: Any):
        self.game, self.settings, self.max_moves = game, settings, check_count("max_moves", max_moves, self)
        if isinstance(seats, str) or not seats:
            raise ValueError(f"`seats` must list an agent, or a list of agents, for each player; got {seats!r}.")
        self.seats = [[seat] if isinstance(seat, str) else list(seat) for seat in seats]
        _Game(game, len(seats), settings, seed=0)  # raises before the first generation

    async def run(self, episode: LiveEpisode) -> None:
        seed = seed_in(episode.row, f"The game {self.game!r}")
        game = await episode.call(_Game, self.game, len(self.seats), self.settings, seed)
        for _ in range(self.max_moves):
            player, told = await episode.call(game.observe)
            seat = self.seats[player]
            for name in dict.fromkeys(seat):
                episode.observe({name: told}, source="game")
            turns = [await episode.turn(name, sees=self._seen(episode, seat, name)) for name in seat]
            if await episode.call(game.step, turns[-1].text):
                for name, reward in self._rewards(game.rewards()).items():
                    episode.earn(turns[-1], reward if len(self.seats) == 1 else {name: reward})
                return

    def _seen(self, episode: LiveEpisode, seat: Sequence[str], name: str) -> list[Seen]:
        visible = [seen for seen in episode.history if seen.audience in (None, name)]
        return [seen for seen in visible if isinstance(seen, Feedback) or seen.agent in seat]

    def _rewards(self, rewards: Mapping[int, float]) -> dict[str, float]:
        """Return the mean reward of the seats of each agent; with a single player, of the last agent for the team."""
        names = [self.seats[0][-1]] if len(self.seats) == 1 else dict.fromkeys(n for seat in self.seats for n in seat)
        places = {name: [player for player, seat in enumerate(self.seats) if name in seat] for name in names}
        return {name: sum(rewards[player] for player in place) / len(place) for name, place in places.items()}

    def named_agents(self) -> list[str]:
        return list(dict.fromkeys(name for seat in self.seats for name in seat))

    def links(self, agents: Sequence[str]) -> list[tuple[str, str]]:
        chains = [["game", *seat, "game"] for seat in self.seats]
        return [pair for chain in chains for pair in itertools.pairwise(chain)]

    def describe(self) -> dict:
        return {"class": self.class_name, "game": self.game, "seats": self.seats, "max_moves": self.max_moves}


class _Game:
    """One game. TextArena draws from Python's global generator, so each game restores its own state."""

    def __init__(self, game: str, players: int, settings: Mapping[str, Any], seed: int):
        arena = load("textarena", "textarena", f"The game {game!r}")
        self._name = game
        self._state = random.Random(seed).getstate()  # noqa: S311
        try:
            self._env = self._drawing(arena.make, game, **settings)
            self._drawing(self._env.reset, num_players=players, seed=seed)
        except Exception as error:
            raise ValueError(f"The game {game!r} of TextArena cannot start with {players} players: {error}") from error
        self._inner = self._env
        while hasattr(self._inner, "env"):
            self._inner = self._inner.env

    def _drawing(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        kept = random.getstate()
        random.setstate(self._state)
        try:
            return function(*args, **kwargs)
        finally:
            self._state = random.getstate()
            random.setstate(kept)

    def observe(self) -> tuple[int, str]:
        """Return the player to move, and all messages to it since its last move, except its own."""
        player, messages = self._drawing(self._inner.get_observation)
        names = self._inner.state.role_mapping
        told = [(names.get(sender, f"Player {sender}"), text) for sender, text, *_ in messages if sender != player]
        return player, "\n".join(f"[{name}] {text}" for name, text in told)

    def step(self, text: str) -> bool:
        return bool(self._drawing(self._env.step, text)[0])

    def rewards(self) -> Mapping[int, float]:
        rewards = self._drawing(self._env.close)[0]
        if not rewards or not all(isinstance(reward, (int, float)) for reward in rewards.values()):
            raise ValueError(f"The game {self._name!r} must end with rewards that are numbers, got {rewards!r}.")
        return rewards
