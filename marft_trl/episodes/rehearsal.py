# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""A workflow tried out with made-up turns, without a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from .collector import Request, collect
from .guard import EpisodeError, RunsEpisodes
from .records import Completion, EndOfEpisode, Episode, Messages, Seen, TeamContext
from .tools import ToolCall


class Rehearsed(RunsEpisodes, Protocol):
    """Interface of a workflow that is rehearsed."""

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
    Run a workflow on one prompt without a model. A function supplies the text of every turn.

    Args:
        workflow ([`Workflow`]):
            The workflow to try.
        agents (`Sequence[str]`):
            Names of the agents of the team.
        reply (`Callable`):
            Function `reply(agent, seen)` that returns the text of a turn, or its [`ToolCall`]s. `seen` contains the
            turns and the feedback shown to the agent.
        prompt (`str` or `list[dict]`, *optional*):
            The prompt of the episode.
        tools (`Mapping[str, Sequence[Callable]]`, *optional*):
            Functions that each agent may call, by agent name.
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

    def complete_request(request: Request) -> Completion | EndOfEpisode:
        try:
            answer = reply(request.agent, request.seen)
        except EndOfEpisode as end:  # as in training, an episode may be ended with the turns it has
            return end
        if isinstance(answer, str):
            return request.make_completion(answer)
        if not isinstance(answer, (ToolCall, Sequence)):
            raise TypeError(f"`reply(agent, seen)` must return the text of a turn, got {answer!r}.")
        calls = (answer,) if isinstance(answer, ToolCall) else tuple(answer)
        return request.make_completion(str(answer), tool_calls=calls if request.functions else ())

    if isinstance(workflow, type):
        raise TypeError(f"`rehearse` takes a workflow object. Write `{workflow.__name__}()`.")
    if isinstance(agents, str) or not callable(reply):
        raise TypeError(
            "`rehearse(workflow, agents, reply)` takes a list of names and a function `reply(agent, seen)`."
        )
    workflow.check(agents)
    context = TeamContext(tuple(agents), dict(tools or {}))
    try:
        (episode,) = collect(
            workflow,
            [{"prompt": prompt, **row}],
            context,
            lambda requests: [complete_request(request) for request in requests],
        )
    except EpisodeError as error:
        if isinstance(error.__cause__, Exception):
            raise error.__cause__ from None
        raise
    return episode
