# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""A workflow: the program that decides who acts next and what each sees."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import textwrap
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from ..episodes.live import LiveEpisode
from ..episodes.records import EndOfEpisode, Seen, Turn, unknown_agent
from ..episodes.rehearsal import rehearse


if TYPE_CHECKING:
    from ..agents import AgentSpec


# Turns after which a picture of a loop is complete
_LONGEST_PICTURE = 24
# Names under which something other than an agent may speak: those that prompts keep agents from writing as their own.
SPEAKER_PATTERN = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,47}")


class Workflow(ABC):
    """
    Base class of workflows. Subclass it and write `run` as plain Python control flow:

    ```python
    class Redraft(Workflow):
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
        earns (`bool`, defaults to `False`):
            Whether turns earn rewards inside an episode, with `episode.observe(..., reward=...)` or `episode.earn`.
            The trainer then counts them as a reward function, `environment_reward`.
        functions (`Sequence[Callable]`):
            What `episode.turn(..., tools=...)` passes, from any one episode: the trainer checks before training that
            models can be told of it.
    """

    reward_funcs: Callable | Sequence[Callable] | None = None
    earns: bool = False
    functions: Sequence[Callable] = ()

    @abstractmethod
    async def run(self, episode: LiveEpisode) -> None:
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
        unknown = [name for name in self.named_agents() if name not in agents]
        if unknown:
            where = f"The workflow `{type(self).__name__}`"
            raise ValueError(" ".join(unknown_agent(name, agents, where) for name in unknown))

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

    def system_prompts(self, agents: Sequence[AgentSpec], aliases: Mapping[str, str] | None = None) -> dict[str, str]:
        """
        Role prompts for agents whose part follows from the workflow; they hold where the agent has none.

        Args:
            agents (`Sequence[AgentSpec]`): the team.
            aliases (`Mapping[str, str]`, *optional*): the names under which agents know one another.
        """
        return {}

    def links(self, agents: Sequence[str]) -> list[tuple[str, str]]:
        """
        Who is shown to whom, as pairs of node names, for [`mermaid`]. The default runs the workflow with empty replies
        and leaves out what follows from the rest; a node is an agent, numbered where it speaks more than once. In a
        loop that does not end by itself agents are not numbered, and links lead back.
        """
        left = _LONGEST_PICTURE

        def reply(agent: str, seen: Sequence[Seen]) -> str:
            nonlocal left
            left -= 1
            if left < 0:  # a loop that waits for certain words would never end
                raise EndOfEpisode("it is long enough for a picture")
            return ""

        try:
            turns = rehearse(self, agents, reply).turns
        except Exception:  # it needs columns, an environment or real replies
            return []
        return turn_links(turns, numbered=left >= 0)

    def mermaid(self, agents: Sequence[str] = (), links: Sequence[tuple[str, str]] | None = None) -> str:
        """
        The workflow as a [Mermaid](https://mermaid.js.org) flowchart, as Markdown viewers draw it.

        Args:
            agents (`Sequence[str]`, *optional*): names of the team's agents; those the workflow names unless given.
            links (`Sequence[tuple[str, str]]`, *optional*): who is shown to whom; [`links`] unless given.
        """
        names = list(agents) or self.named_agents()
        pairs = self.links(names) if links is None else list(links)
        nodes = list(dict.fromkeys([node for pair in pairs for node in pair] or names))
        keys = {node: f"n{index}" for index, node in enumerate(nodes)}
        boxes = [f'    {keys[node]}["{_label(node)}"]' for node in nodes]
        arrows = [f"    {keys[start]} --> {keys[end]}" for start, end in pairs]
        return "\n".join(["flowchart LR", *boxes, *arrows])

    def describe(self) -> dict:
        """
        The workflow as JSON-serializable data, for the team's manifest: its `class` and, for a ready-made workflow,
        the arguments that make it anew (see [`rebuild`]).
        """
        return {"class": self.class_name}

    @property
    def class_name(self) -> str:
        """Name of the class; with its module where it is a user's own, which may be named like a ready-made one."""
        own = type(self)
        is_ready_made = own.__module__.startswith(f"{__package__}.")
        return own.__name__ if is_ready_made else f"{own.__module__}.{own.__qualname__}"


def callable_name(function: Callable) -> str:
    """Name of a function, a class, or the class of an object that can be called."""
    return getattr(function, "__name__", type(function).__name__)


def _label(name: str) -> str:
    """A name that cannot end its box in a picture."""
    return "".join(char if char.isalnum() or char in " _-." else "_" for char in name)


def turn_links(turns: Sequence[Turn], numbered: bool = True) -> list[tuple[str, str]]:
    """
    Who is shown to whom among the turns of an episode, without links that a longer way makes plain.

    Args:
        turns (`Sequence[Turn]`): the turns.
        numbered (`bool`, *optional*, defaults to `True`): tell turns of one agent apart by numbers.
    """
    counts = Counter(turn.agent for turn in turns)
    spoken: Counter[str] = Counter()
    names: list[str] = []
    for turn in turns:
        spoken[turn.agent] += 1
        is_lone = counts[turn.agent] == 1 or not numbered
        names.append(turn.agent if is_lone else f"{turn.agent} {spoken[turn.agent]}")
    behind: list[set[int]] = []  # all that a turn depends on
    pairs: list[tuple[str, str]] = []
    for index, turn in enumerate(turns):
        around = set().union(*(behind[other] for other in turn.sees)) if turn.sees else set()
        pairs += [(names[other], names[index]) for other in turn.sees if other not in around]
        behind.append(around | set(turn.sees))
    return pairs if numbered else list(dict.fromkeys(pairs))


async def together(turns: Iterable[Awaitable[Turn]]) -> list[Turn]:
    """Let agents speak side by side: `await together(episode.turn(name, sees=[plan]) for name in names)`."""
    tasks = [asyncio.ensure_future(turn) for turn in turns]
    try:
        return [await task for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def check_names(field: str, names: object, workflow: Workflow) -> list[str]:
    """
    A list of agents' names.

    Raises:
        TypeError: not a list of strings.
        ValueError: empty.
    """
    where = f"`{field}` of `{type(workflow).__name__}`"
    if isinstance(names, str) or not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"{where} must be a list of names of agents, got {names!r}.")
    if not names:
        raise ValueError(f"{where} is empty; name at least one agent.")
    return list(names)


def check_count(field: str, count: object, workflow: Workflow) -> int:
    """
    A whole number of at least 1.

    Raises:
        ValueError: anything else.
    """
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        name = type(workflow).__name__
        raise ValueError(f"`{field}` of `{name}` must be an integer of at least 1, got {count!r}.")
    return count
