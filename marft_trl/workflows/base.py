# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""A workflow: the program that decides who acts next and what each sees."""

from __future__ import annotations

import ast
import asyncio
import inspect
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from ..episodes import Episode, Messages, Turn, unknown_agent


class Workflow(ABC):
    """
    Base class of workflows. Subclass it and write `run` as plain Python control flow:

    ```python
    class UntilApproved(Workflow):
        async def run(self, episode):
            draft = await episode.turn("writer")
            review = await episode.turn("critic", sees=[draft])
            if "OK" not in review.text:
                draft = await episode.turn("writer", sees=[draft, review])
            episode.answer = draft
    ```

    One object runs many episodes at once, so keep what belongs to an episode in local variables of `run`.

    Attributes:
        reward_funcs (`Callable` or `Sequence[Callable]`, *optional*):
            Score the turns of agents that bring no `reward_funcs` of their own, under `credit="per_step"`.
    """

    reward_funcs: Callable | Sequence[Callable] | None = None

    @abstractmethod
    async def run(self, episode: Episode) -> None:
        """
        Run one episode: let agents speak with `await episode.turn(name, sees=[...])` and set `episode.answer` to the
        turn that answers for the team (the last one unless set).
        """

    def check(self, agents: Sequence[str]) -> None:
        """
        Raise if this workflow cannot run with these agents. Called before the first generation.

        Raises:
            ValueError: the workflow names an agent that the team does not have.
        """
        for name in self.named_agents():
            if name not in agents:
                raise ValueError(unknown_agent(name, agents, f"The workflow `{type(self).__name__}`"))

    def named_agents(self) -> list[str]:
        """
        Names of agents known to appear in this workflow. The default reads the literal names out of the source of the
        methods (`episode.turn("writer")`); names computed at run time are checked when the turn is asked for.
        """
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(type(self))))
        except (OSError, TypeError, SyntaxError):  # no source at hand, e.g. a class typed into an interpreter
            return []
        calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
        firsts = [
            (call.args + [k.value for k in call.keywords if k.arg == "agent"])[:1]
            for call in calls
            if isinstance(call.func, ast.Attribute) and call.func.attr == "turn"
        ]
        names = [node.value for first in firsts for node in first if isinstance(node, ast.Constant)]
        return list(dict.fromkeys(name for name in names if isinstance(name, str)))

    def describe(self) -> dict:
        """The workflow as JSON-serializable data, for the team's manifest."""
        return {"class": type(self).__name__}


def rehearse(
    workflow: Workflow,
    agents: Sequence[str],
    reply: Callable[[str, Sequence[Turn]], str],
    prompt: str | Messages = "",
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
            `reply(agent, seen)` returns the text that the agent says, given the turns it was shown.
        prompt (`str` or `list[dict]`, *optional*):
            The prompt of the episode.
        row:
            Other columns of the dataset row.

    Returns: the finished [`Episode`].

    Example:

    ```python
    >>> episode = rehearse(UntilApproved(), ["writer", "critic"], lambda agent, seen: "OK")
    >>> [turn.agent for turn in episode.turns]
    ['writer', 'critic']
    ```
    """

    async def speak(episode: Episode, agent: str, seen: Sequence[Turn]) -> Turn:
        text = reply(agent, seen)
        turn = Turn(agent, text, index=len(episode.turns), sees=tuple(turn.index for turn in seen))
        episode.turns.append(turn)
        episode.asked.append(turn.sees)
        return turn

    workflow.check(agents)
    episode = Episode(prompt, {"prompt": prompt, **row}, 0, speak, tuple(agents))
    asyncio.run(workflow.run(episode))
    return episode
