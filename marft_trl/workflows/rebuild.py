# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Creation of a workflow from its description in a team manifest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .base import Workflow
from .by_column import ByColumn
from .environment import EnvironmentLoop
from .graph import Graph
from .orchestrated import Orchestrated
from .ready_made import Debate, MixtureOfAgents, UntilApproved
from .sequential import Sequential


_READY_MADE: dict[str, type[Workflow]] = {
    kind.__name__: kind
    for kind in (ByColumn, Debate, EnvironmentLoop, Graph, MixtureOfAgents, Orchestrated, Sequential, UntilApproved)
}


def rebuild(
    description: Mapping[str, Any], environment_factory: Callable | Mapping[str, Callable] | None = None
) -> Workflow:
    """
    Create a workflow from its description.

    Args:
        description (`Mapping[str, Any]`): description, as returned by [`Workflow.describe`].
        environment_factory (`Callable`, *optional*): function that creates the environment of an [`EnvironmentLoop`],
            or several by name.

    Raises:
        ValueError: The workflow is your own class, or it needs a function that a description cannot contain.
    """
    name = str(description["class"])
    if name not in _READY_MADE:
        raise ValueError(f"The workflow `{name}` of the team is your own code: pass it as `workflow=`.")
    function = description.get("approves_function") or description.get("vote_function")
    if function:
        raise ValueError(
            f"The workflow `{name}` of the team asks the function `{function}`: pass the workflow as `workflow=`."
        )
    arguments = {key: value for key, value in description.items() if key != "class" and value is not None}
    if name == ByColumn.__name__:
        factories = environment_factory if isinstance(environment_factory, Mapping) else {}
        its = {key: rebuild(one, factories.get(key)) for key, one in description["workflows"].items()}
        return ByColumn(its, description["column"])
    if name == EnvironmentLoop.__name__:
        environment = arguments.pop("environment", None)
        if environment_factory is None:
            raise ValueError(
                f"The team plays in the environment `{environment}`: pass what makes it as `environment_factory=` (a "
                "class or a function), or pass the whole workflow as `workflow=`."
            )
        arguments["environment"] = environment_factory
    elif environment_factory is not None:
        raise ValueError(f"`environment_factory` was passed, but the workflow `{name}` of the team has none.")
    try:
        return _READY_MADE[name](**arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"The workflow `{name}` of the team cannot be made anew from its manifest: {error}"
        ) from error
