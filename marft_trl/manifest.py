# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""The team's manifest: what a folder of adapters has to say so that the team can be run and trained again."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .agents import AgentSpec, check_name, check_team


MANIFEST_NAME = "marft_team.json"
FORMAT = 1
_PACKAGES = ("marft-trl", "trl", "transformers", "peft", "torch")


@dataclass
class TeamManifest:
    """
    Args:
        agents (`list[AgentSpec]`):
            The agents in order.
        workflow (`dict`):
            [`Workflow.describe`] of the workflow.
        adapters (`dict[str, dict]`):
            For each adapter its `folder` and whether it was `trained`. Empty where the team shares one fully trained
            policy, whose weights lie beside the manifest.
        base_model (`str`, *optional*):
            Hub id of the base; `None` for a local one.
        base_model_revision (`str`, *optional*):
            Its revision.
        versions (`dict[str, str]`):
            Versions of the packages that wrote it.
        anonymous (`str`, *optional*):
            `"numbered"` or `"none"` where agents know one another as `agent_1`, `agent_2`, ...
    """

    agents: list[AgentSpec]
    workflow: dict[str, Any]
    adapters: dict[str, dict[str, Any]]
    base_model: str | None = None
    base_model_revision: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    anonymous: str | None = None

    @classmethod
    def load(cls, folder: str | os.PathLike) -> TeamManifest:
        """
        Read the manifest of a folder.

        Raises:
            FileNotFoundError: there is none.
            ValueError: it is damaged, of an unknown format, or names a file outside the folder.
        """
        path = Path(folder) / MANIFEST_NAME
        if not path.is_file():
            raise FileNotFoundError(f"There is no {MANIFEST_NAME} in {folder}: not a folder saved by MARFTTrainer.")
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data["format"] != FORMAT:
                raise ValueError(
                    f"{path} has format {data['format']!r}; this version of marft_trl reads format {FORMAT}."
                )
            agents = check_team([AgentSpec(**agent) for agent in data["agents"]])
            adapters = data["adapters"]
            for name, adapter in adapters.items():
                check_name(name, "an adapter")
                if adapter["folder"] != name:
                    raise ValueError(f"{path} puts the adapter {name!r} into the folder {adapter['folder']!r}.")
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is damaged: {type(error).__name__}: {error}.") from error
        return cls(
            agents=agents,
            workflow=data["workflow"],
            adapters=adapters,
            base_model=data["base_model"],
            base_model_revision=data["base_model_revision"],
            versions=data["versions"],
            anonymous=data.get("anonymous"),
        )

    def save(self, folder: str | os.PathLike) -> None:
        """Write the manifest into a folder."""
        data = {
            "format": FORMAT,
            "agents": [agent.to_dict() for agent in self.agents],
            "workflow": self.workflow,
            "adapters": self.adapters,
            "base_model": self.base_model,
            "base_model_revision": self.base_model_revision,
            "versions": {name: version(name) for name in _PACKAGES},
            **({"anonymous": self.anonymous} if self.anonymous else {}),
        }
        path = Path(folder) / MANIFEST_NAME
        path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
