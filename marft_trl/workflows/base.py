# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""A workflow: the program that decides who acts next and what each agent sees."""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import re
import textwrap
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

from ..agents import AgentSpec
from ..episodes.collector import rehearse
from ..episodes.live import LiveEpisode
from ..episodes.records import EndOfEpisode, Seen, Turn, unknown_agent
from ..system.files import read_source
from ..system.hints import brief, did_you_mean
from ..system.json_fields import check_fields


_LONGEST_PICTURE = 24  # turns in the flowchart of a loop
KINDS = ("numbered", "none")  # of anonymity
# Names of speakers that are no agents. Prompts quote them in the text of agents, so that none can pretend to be one
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

    One workflow object runs many episodes at once, so keep the state of an episode in local variables of `run`.

    Attributes:
        reward_funcs (`Callable` or `Sequence[Callable]`, *optional*):
            Reward functions for the turns of agents without their own `reward_funcs`, used with `credit="per_step"`.
        earns (`bool`, defaults to `False`):
            `True` if turns earn rewards during an episode, through `episode.observe(..., reward=...)` or
            `episode.earn`. The trainer reports them as the reward function `environment_reward`.
        acts_outside (`bool`, defaults to `False`):
            `True` if an episode does something outside of this process. Such a workflow is not run for a picture of
            it in cards and checkpoints, but when a plan or a rehearsal is asked for.
        max_wait_for_episodes (`float`, *optional*):
            Seconds that an episode may hold up the requests of others, where all are sampled together. By default,
            they wait as long as it takes, so that results do not depend on timing.
        functions (`Sequence[Callable]`):
            Functions that the workflow passes as `episode.turn(..., tools=...)`, taken from an example episode. Before
            training, the trainer checks that they can be described to a model.
        described (`Mapping[str, Any]`):
            Fields of a ready-made workflow's description, with their types: the arguments of its constructor that a
            saved team may set.
    """

    reward_funcs: Callable | Sequence[Callable] | None = None
    earns: bool = False
    acts_outside: bool = False
    max_wait_for_episodes: float | None = None
    functions: Sequence[Callable] = ()
    described: ClassVar[Mapping[str, Any]] = {}

    @property
    def uses_tools(self) -> bool:
        """Whether agents are given tools besides those of their specs."""
        return bool(self.functions)

    @abstractmethod
    async def run(self, episode: LiveEpisode) -> None:
        """
        Run one episode: request turns with `await episode.turn(name, sees=[...])`, and set `episode.answer` to the
        turn that is the team's answer. By default, the last turn is the answer.
        """

    def check(self, agents: Sequence[str]) -> None:
        """
        Raise if this workflow cannot run with these agents. Called before the first generation.

        Raises:
            ValueError: the workflow names an agent that the team does not have.
        """
        if unknown := [name for name in self.named_agents() if name not in agents]:
            where = f"The workflow `{type(self).__name__}`"
            raise ValueError(" ".join(unknown_agent(name, agents, where) for name in unknown))

    def named_agents(self) -> list[str]:
        """
        Return the names of agents that are known to appear in this workflow. By default, these are the literal names
        in the source code (`episode.turn("writer")`). Names computed at run time are checked when a turn is requested.
        """
        try:
            tree = ast.parse(textwrap.dedent(read_source(type(self))))
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
        Return role prompts for agents whose role is defined by the workflow. They are used for agents without
        their own `system_prompt`.

        Args:
            agents (`Sequence[AgentSpec]`): the team.
            aliases (`Mapping[str, str]`, *optional*): names that agents are shown of one another, by agent name.
        """
        return {}

    def links(self, agents: Sequence[str]) -> list[tuple[str, str]]:
        """
        Return the links of the flowchart drawn by [`mermaid`], as pairs `(shown, sees)` of node names. The default
        runs the workflow with empty turns and omits links that follow from other links. A node is an agent, with a
        number if it has several turns. For a loop without an end, agents are not numbered, and links can lead back.
        """
        left = _LONGEST_PICTURE

        def reply(agent: str, seen: Sequence[Seen]) -> str:
            nonlocal left
            left -= 1
            if left < 0:  # a loop that waits for a certain text would never end
                raise EndOfEpisode("the flowchart has enough turns")
            return ""

        try:
            turns = rehearse(self, agents, reply).turns
        except Exception:  # the workflow needs dataset columns, an environment or real turns
            return []
        return turn_links(turns, numbered=left >= 0)

    def mermaid(self, agents: Sequence[str] = (), links: Sequence[tuple[str, str]] | None = None) -> str:
        """
        Return the workflow as a [Mermaid](https://mermaid.js.org) flowchart, which Markdown viewers can draw.

        Args:
            agents (`Sequence[str]`, *optional*): names of the team's agents. Defaults to [`named_agents`].
            links (`Sequence[tuple[str, str]]`, *optional*): links of the flowchart. Defaults to [`links`].
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
        Return the workflow as JSON-serializable data for the team's manifest: the `class` and, for a ready-made
        workflow, the arguments from which [`rebuild`] creates it again.
        """
        return {"class": self.class_name, **{name: getattr(self, name) for name in self.described}}

    @classmethod
    def from_description(cls, arguments: Mapping[str, Any], environment_factory: Any = None) -> Workflow:
        """
        Make the workflow from its description, see [`rebuild`].

        Args:
            arguments (`Mapping[str, Any]`): the description without the class.
            environment_factory (`Callable`, *optional*): function that creates environments.
        """
        if environment_factory is not None:
            raise ValueError(f"`environment_factory` was passed, but the team's `{cls.__name__}` has no environment.")
        return cls(**arguments)

    @property
    def class_name(self) -> str:
        """Name of the class. Your own classes include the module, to tell them from ready-made workflows."""
        own = type(self)
        return own.__name__ if _is_ready_made(own) else f"{own.__module__}.{own.__qualname__}"


def rebuild(
    description: Mapping[str, Any], environment_factory: Callable | Mapping[str, Callable] | None = None
) -> Workflow:
    """
    Create a ready-made workflow from its description.

    Args:
        description (`Mapping[str, Any]`): description, as returned by [`Workflow.describe`].
        environment_factory (`Callable`, *optional*): function that creates the environment of an [`EnvironmentLoop`],
            or several by name.

    Raises:
        ValueError: The workflow is your own class, needs a function that a description cannot contain, or has a field
            that [`Workflow.describe`] does not write. Descriptions come from strangers, too.
    """
    name = description.get("class")
    if not isinstance(name, str):
        raise ValueError(f"The workflow of the team has no name of a class as 'class', got {brief(repr(name), 80)}.")
    kind = _ready_made().get(name)
    if kind is None:
        raise ValueError(f"The workflow `{name}` of the team is custom code. Pass it as `workflow=`.")
    if function := description.get("approves_function") or description.get("vote_function"):
        raise ValueError(f"The workflow `{name}` of the team calls the function `{function}`. Pass it as `workflow=`.")
    arguments = {key: value for key, value in description.items() if key != "class" and value is not None}
    check_fields(arguments, kind.described, f"The workflow `{name}` of the team")
    try:
        return kind.from_description(arguments, environment_factory)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"The workflow `{name}` of the team cannot be rebuilt from the manifest: {error}") from error


def _ready_made() -> dict[str, type[Workflow]]:
    kinds: list[Any] = [Workflow]
    found: dict[str, type[Workflow]] = {}
    while kinds:
        kinds = [below for kind in kinds for below in kind.__subclasses__()]
        public = [kind for kind in kinds if _is_ready_made(kind) and not kind.__name__.startswith("_")]
        found |= {kind.__name__: kind for kind in public}
    return found


def _is_ready_made(kind: type[Workflow]) -> bool:
    return kind.__module__.startswith((f"{__package__}.", "marft_trl.extras.apps."))


def callable_name(function: Callable) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _label(name: str) -> str:
    """Replace characters that have a meaning in Mermaid labels."""
    return "".join(char if char.isalnum() or char in " _-." else "_" for char in name)


def turn_links(turns: Sequence[Turn], numbered: bool = True) -> list[tuple[str, str]]:
    """Return the pairs `(shown, sees)` of an episode's turns, without pairs that a longer path already implies."""
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


async def together(turns: Iterable[Awaitable[Turn]], *others: Any) -> list[Turn]:
    """Run turns in parallel: `await together(episode.turn(name, sees=[plan]) for name in names)`."""
    if others or not isinstance(turns, Iterable):
        raise TypeError("`together` takes one list of turns: `together([episode.turn('a'), episode.turn('b')])`.")
    tasks = [asyncio.ensure_future(turn) for turn in turns]
    try:
        return [await task for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def check_names(field: str, names: object, workflow: Workflow) -> list[str]:
    where = f"`{field}` of `{type(workflow).__name__}`"
    if isinstance(names, str) or not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"{where} must be a list of agent names, got {names!r}.")
    if not names:
        raise ValueError(f"{where} is empty; name at least one agent.")
    return list(names)


def check_count(field: str, count: object, workflow: Workflow) -> int:
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ValueError(f"`{field}` of `{type(workflow).__name__}` must be an integer of at least 1, got {count!r}.")
    return count


def anonymity(value: bool | str) -> str | None:
    """The kind that `anonymous=` selects: `"numbered"`, `"none"`, or `None` for named agents; else a `ValueError`."""
    if isinstance(value, bool):
        return "numbered" if value else None
    if value in KINDS:
        return value
    raise ValueError(
        f"`anonymous` must be False, True, 'numbered' or 'none'; got {value!r}.{did_you_mean(value, KINDS)}"
    )


def alias_names(agents: Sequence[AgentSpec]) -> dict[str, str]:
    return {agent.name: f"agent_{number}" for number, agent in enumerate(agents, start=1)}


def anonymize(agents: Sequence[AgentSpec], kind: str, needed: Mapping[str, str] | None = None) -> list[AgentSpec]:
    """
    Return the agents with generic role prompts. Of the kind `"numbered"`, they state the agent's number and the size
    of the team, as in the code of MARFT v2; of `"none"`, there are none, as in its README. Both keep prompts that the
    workflow cannot run without (`needed`), such as that of an orchestrator.
    """
    numbered = "You are agent {} of {} that solve the task together."
    prompts = {agent.name: numbered.format(number, len(agents)) for number, agent in enumerate(agents, start=1)}
    prompts = {**(prompts if kind == "numbered" else {}), **(needed or {})}
    return [dataclasses.replace(agent, system_prompt=prompts.get(agent.name)) for agent in agents]


def renamed(agent: AgentSpec, seen: Sequence[Seen], aliases: Mapping[str, str]) -> tuple[AgentSpec, list[Seen]]:
    """Return an agent, and the turns and feedback shown to it, with names replaced by aliases for the view."""
    shown = [
        dataclasses.replace(
            item, agent=aliases.get(item.agent, item.agent), audience=aliases.get(item.audience or "", item.audience)
        )
        for item in seen
    ]
    return dataclasses.replace(agent, name=aliases.get(agent.name, agent.name), adapter=agent.adapter), shown
