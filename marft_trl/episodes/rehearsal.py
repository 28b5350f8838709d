# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""A workflow tried out with made-up turns, without a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from ..tools import ToolCall
from .collector import EpisodeError, Request, Runs, collect
from .live import Setting
from .records import Completion, EndOfEpisode, Episode, Messages, Seen


class Rehearsed(Runs, Protocol):
    """What can be rehearsed: a workflow."""

    def check(self, agents: Sequence[str]) -> None:
        """Raise if it cannot run with these agents."""


def rehearse(
    workflow: Rehearsed,
    agents: Sequence[str],
    reply: Callable[[str, Sequence[Seen]], str | ToolCall | Sequence[ToolCall]],
    prompt: str | Messages = "",
    tools: Mapping[str, Sequence[Callable]] | None = None,
    **row,
) -> Episode:
    """
    Run a workflow on one prompt with canned replies, without a model.

    Args:
        workflow ([`Workflow`]):
            The workflow to try.
        agents (`Sequence[str]`):
            Names of the agents of the team.
        reply (`Callable`):
            `reply(agent, seen)` returns the text that the agent says, given the turns and the feedback it was shown,
            or the [`ToolCall`]s that it makes.
        prompt (`str` or `list[dict]`, *optional*):
            The prompt of the episode.
        tools (`Mapping[str, Sequence[Callable]]`, *optional*):
            For each agent, functions that it may call.
        row:
            Other columns of the dataset row.

    Returns: the finished [`Episode`].

    Example:

    ```python
    >>> episode = rehearse(Redraft(), ["writer", "critic"], lambda agent, seen: "OK")
    >>> [turn.agent for turn in episode.turns]
    ['writer', 'critic']
    ```
    """

    def completed(request: Request) -> Completion | EndOfEpisode:
        try:
            said = reply(request.agent, request.seen)
        except EndOfEpisode as end:  # as in training, an episode may be ended with the turns it has
            return end
        if isinstance(said, str):
            return request.completed(said)
        calls = (said,) if isinstance(said, ToolCall) else tuple(said)
        return request.completed(str(said), tool_calls=calls if request.functions else ())

    workflow.check(agents)
    setting = Setting(tuple(agents), dict(tools or {}))
    try:
        (episode,) = collect(
            workflow, [{"prompt": prompt, **row}], setting, lambda requests: [completed(one) for one in requests]
        )
    except EpisodeError as error:
        if isinstance(error.__cause__, Exception):
            raise error.__cause__ from None
        raise
    return episode
