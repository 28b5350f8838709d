# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""The interface of generators, what they sample, and turns that are followed while they are sampled."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from transformers import LogitsProcessor, StoppingCriteria

from ..episodes.records import SampledBy
from ..prompts.builder import Observation
from ..shared_prefix.decoding import draw


class SampledTurn(NamedTuple):
    ids: list[int]
    logps: list[float] | None = None  # of each token; without a server, only if they equal those that scoring computes
    sampled_by: SampledBy | None = None


def check_sampled(sampled: Sequence[SampledTurn], agents: Sequence[str], vocabulary: int) -> None:
    """Raise `ValueError` unless there are enough completions, of tokens that the model has, with all their `logps`."""
    if len(sampled) != len(agents):
        raise ValueError(f"The generator returned {len(sampled)} completions for {len(agents)} observations.")
    for agent, (ids, logps, _) in zip(agents, sampled, strict=True):
        if wrong := [index for index in ids if not 0 <= index < vocabulary]:
            raise ValueError(
                f"The generator returned the token id {wrong[0]} for a turn of {agent!r}; the model has {vocabulary} "
                "tokens. Generate with the tokenizer of the model."
            )
        if logps is not None and len(logps) != len(ids):
            raise ValueError(
                f"The generator made {len(logps)} log-probabilities for the {len(ids)} tokens of a turn of {agent!r}."
            )


@dataclass(eq=False)
class LiveTurn:
    """
    A turn that is followed while it is sampled. Its tokens depend on `seed` and not on other turns in the batch,
    `limit` can only lower the number of tokens, and `on_tokens` gets the newest tokens in the running event loop.
    Where the generator can constrain decoding, the turn follows the JSON `schema`.
    """

    seed: int
    limit: int | None = None
    on_tokens: Callable[[list[int]], None] | None = None
    schema: Mapping[str, Any] | None = None
    loop: asyncio.AbstractEventLoop = field(init=False, default_factory=asyncio.get_running_loop)
    is_gone: bool = field(init=False, default=False)  # set from any thread once nobody waits: the turn then ends


class Generator:
    """
    Base class of what samples the turns of a team. To add a generator, write the methods that raise here, and choose
    it in `_generator` of `trainer/parts.py`.
    """

    batches: bool = True  # whether all waiting episodes share a call; if not, no episode waits for another one

    @property
    def keeps_cache(self) -> bool:
        """Whether the keys and values of a call of [`~Generator.generate`] keep their memory for the next."""
        return False

    async def generate(
        self, observed: Sequence[Observation], greedy: bool = False, sampling: Mapping[str, float] | None = None
    ) -> list[SampledTurn]:
        """
        Sample a turn for each observation, up to and including its end token. Without `batches`, the observations are
        those of one episode. `sampling` replaces the agents' `temperature`, `top_p`, `top_k` and `min_p`.
        """
        raise NotImplementedError

    def holds_stop(self, agent: str, ids: Sequence[int]) -> bool:
        """`True` if the tokens of a turn of an agent hold one of its stop strings."""
        raise NotImplementedError

    def settings(self, agent: str) -> dict[str, Any]:
        """Settings of `generate` for an agent, which are saved with the team."""
        raise NotImplementedError

    def drop_cache(self) -> None:
        """Release memory that is kept from one call of [`~Generator.generate`] to the next."""

    # ---- Only for generators with their own copy of the weights ----

    def publish(self, alone: bool = False) -> None:
        """Let the present weights generate. Called on all processes between rollouts, or `alone` on one."""

    def close(self) -> None:
        """Remove the published weights from servers. The next [`~Generator.publish`] publishes all weights again."""

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        """Asynchronous context manager around all calls of [`~Generator.generate`] in an event loop."""
        yield


class LiveRows(StoppingCriteria):
    """The followed turns of a call of `generate`: a [`RowFollower`] of our loop, a stopping criterion elsewhere."""

    def __init__(
        self,
        turns: Sequence[LiveTurn],
        end_token_ids: Collection[int],
        longest: int,
        samples: bool,
        device: torch.device,
    ):
        self.other: StoppingCriteria | None = None  # what else ends turns, in the loop of transformers
        self.turns, self._end_token_ids = turns, frozenset(end_token_ids)
        self.limits = [min(longest, turn.limit or longest) for turn in turns]
        self.reads_tokens = min(self.limits) < longest or any(turn.on_tokens is not None for turn in turns)
        self._counts, self._over = [0] * len(turns), [False] * len(turns)
        self._width: int | None = None
        self.draws = torch.stack([_numbers(turn.seed, longest) for turn in turns]).to(device) if samples else None

    def look(self, rows: Sequence[int], tokens: Sequence[Sequence[int]], done: Sequence[bool]) -> list[bool]:
        """Pass new tokens on, and tell which rows end here, see [`RowFollower`]."""
        heard: dict[asyncio.AbstractEventLoop, list[tuple[LiveTurn, list[int]]]] = {}
        for row, value, is_done in zip(rows, tokens, done, strict=True):
            turn = self.turns[row]
            new = [] if self._over[row] else self._up_to_end(row, value)
            self._over[row] = self._over[row] or is_done or turn.is_gone
            if new and turn.on_tokens is not None and not turn.is_gone:
                heard.setdefault(turn.loop, []).append((turn, new))
        for loop, pairs in heard.items():
            with contextlib.suppress(RuntimeError):  # it is closed
                loop.call_soon_threadsafe(_tell, pairs)
        return [self._over[row] for row in rows]

    def _up_to_end(self, row: int, tokens: Sequence[int]) -> list[int]:
        new: list[int] = []
        for token in tokens[: self.limits[row] - self._counts[row]]:
            new.append(token)
            if token in self._end_token_ids:
                self._over[row] = True
                break
        self._counts[row] += len(new)
        self._over[row] = self._over[row] or self._counts[row] >= self.limits[row]
        return new

    def __call__(self, input_ids: torch.Tensor, scores, **kwargs) -> torch.Tensor:
        if self._width is None:  # the first call comes after the first token
            self._width = input_ids.size(1) - 1
        new, count = input_ids[:, self._width :].tolist(), len(self.turns)
        self._width = input_ids.size(1)
        done = [False] * count if self.other is None else self.other(input_ids, scores).tolist()
        return torch.tensor(self.look(range(count), new, done), device=input_ids.device)


class DrawnByRow(LogitsProcessor):
    """Draws tokens with the numbers `(B, T)` of [`LiveRows`] in the loop of transformers, as its last processor."""

    def __init__(self, draws: torch.Tensor):
        self._draws, self._step = draws, 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        chosen = draw(scores.softmax(dim=-1), self._draws[:, self._step].unsqueeze(1))
        self._step += 1
        return torch.full_like(scores, float("-inf")).scatter(1, chosen, 0.0)


def _numbers(seed: int, count: int) -> torch.Tensor:
    return torch.rand(count, dtype=torch.double, generator=torch.Generator().manual_seed(seed))


def _tell(pairs: Sequence[tuple[LiveTurn, list[int]]]) -> None:
    for turn, ids in pairs:
        if turn.on_tokens is not None and not turn.is_gone:
            turn.on_tokens(ids)
