# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Several workflows in one run: a column of the dataset says which one runs on a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..episodes.live import LiveEpisode
from ..system.hints import did_you_mean
from .base import Workflow, rebuild


class ByColumn(Workflow):
    """
    Runs the workflow that a column of the dataset row names. `environment_factory={"shop": Shop, "maze": Maze}` of the
    trainer is short for `ByColumn({"shop": EnvironmentLoop(Shop), "maze": EnvironmentLoop(Maze)})`.

    Args:
        workflows (`dict[str, Workflow]`):
            The workflows, by the value of the column.
        column (`str`, *optional*, defaults to `"environment"`):
            Name of the column.
    """

    def __init__(self, workflows: Mapping[str, Workflow], column: str = "environment"):
        if not isinstance(workflows, Mapping) or not workflows:
            raise ValueError(
                f"`workflows` of `ByColumn` must map values of the column to workflows, got {workflows!r}."
            )
        for name, workflow in workflows.items():
            if not isinstance(workflow, Workflow):
                raise TypeError(f"`workflows` of `ByColumn` has no `Workflow` object for {name!r}, got {workflow!r}.")
        self.workflows, self.column = dict(workflows), column
        self.functions = [function for one in self.workflows.values() for function in one.functions]
        limits = [one.holds_up for one in self.workflows.values() if one.holds_up is not None]
        self.holds_up = min(limits, default=None)
        self.acts_outside = any(one.acts_outside for one in self.workflows.values())
        self.earns = any(one.earns for one in self.workflows.values())

    @property
    def uses_tools(self) -> bool:
        return any(one.uses_tools for one in self.workflows.values())

    async def run(self, episode: LiveEpisode) -> None:
        await self.of(episode.row.get(self.column)).run(episode)

    def of(self, value: Any) -> Workflow:
        """
        The workflow for a value of the column.

        Raises:
            ValueError: there is none.
        """
        if value not in self.workflows:
            known = ", ".join(map(repr, self.workflows))
            raise ValueError(
                f"The column {self.column!r} of a row is {value!r}, for which there is no workflow, but for "
                f"{known}.{did_you_mean(str(value), list(self.workflows))}"
            )
        return self.workflows[value]

    def check(self, agents: Sequence[str]) -> None:
        for workflow in self.workflows.values():
            workflow.check(agents)

    def named_agents(self) -> list[str]:
        return list(dict.fromkeys(name for one in self.workflows.values() for name in one.named_agents()))

    def links(self, agents: Sequence[str]) -> list[tuple[str, str]]:
        return list(dict.fromkeys(pair for one in self.workflows.values() for pair in one.links(agents)))

    @classmethod
    def from_description(cls, arguments: Mapping[str, Any], environment_factory: Any = None) -> ByColumn:
        factories = environment_factory if isinstance(environment_factory, Mapping) else {}
        workflows = {name: rebuild(one, factories.get(name)) for name, one in arguments["workflows"].items()}
        return cls(workflows, arguments["column"])

    def describe(self) -> dict:
        return {
            "class": self.class_name,
            "column": self.column,
            "workflows": {name: one.describe() for name, one in self.workflows.items()},
        }
