# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""The team's manifest: what a folder of adapters has to say so that the team can be run and trained again."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .agents import AgentSpec, check_name, check_team


MANIFEST_NAME = "marft_team.json"
FORMAT = 2
# Format 1 (version 0.1) says neither how agents sampled nor what the base was.
_READABLE = (1, FORMAT)
_PACKAGES = ("marft-trl", "trl", "transformers", "peft", "torch")


_DAMAGES = (KeyError, TypeError, AttributeError, RecursionError, UnicodeDecodeError)


@dataclass(frozen=True)
class BaseModel:
    """
    The model that a team's adapters lie on, and what was tokenized with.

    Args:
        name (`str`): Hub id, or the last part of the path of a local model.
        is_local (`bool`): whether it was loaded from a local folder, or built.
        revision (`str`, *optional*): commit, branch or tag on the Hub.
        dtype (`str`, *optional*): precision of its weights, e.g. `"bfloat16"`.
        quantization (`dict`, *optional*): its quantization config.
        config_hash (`str`): SHA-256 of its config, without paths, versions and precision.
        tokenizer_hash (`str`): SHA-256 of the tokenizer's vocabulary and special tokens.
        chat_template_hash (`str`, *optional*): SHA-256 of the chat template.
    """

    name: str
    is_local: bool
    revision: str | None = None
    dtype: str | None = None
    quantization: dict[str, Any] | None = None
    config_hash: str = ""
    tokenizer_hash: str = ""
    chat_template_hash: str | None = None


@dataclass(frozen=True)
class Inference:
    """
    How a team's episodes are run, beyond its agents and its workflow.

    Args:
        sampling (`dict[str, dict]`): for each agent the settings that it samples by, its own and the trainer's.
        generation (`dict`): settings of `generate` that all agents have in common.
        share_prefixes (`bool`): whether what prompts have in common is computed once.
        mixed_precision (`str`): `"no"`, `"bf16"` or `"fp16"`: what the model computes in.
        chat_template_kwargs (`dict`): passed on to the chat template.
        context_overflow (`str`): what happens where the model's window is too short.
        tools (`dict[str, list[str]]`): names of the tools of each agent that has some.
        tool_limits (`dict`): what calls of tools may cost, see [`~marft_trl.tools.ToolLimits`].
        view (`str`, *optional*): name of the function that shows agents what they see, where it is not the default.
        agent_views (`dict[str, str]`): the same for agents with a view of their own.
        workflow_timeout (`float`, *optional*): seconds that a workflow may wait.
    """

    sampling: dict[str, dict[str, Any]] = field(default_factory=dict)
    generation: dict[str, Any] = field(default_factory=dict)
    share_prefixes: bool = True
    mixed_precision: str = "no"
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    context_overflow: str = "raise"
    tools: dict[str, list[str]] = field(default_factory=dict)
    tool_limits: dict[str, Any] = field(default_factory=dict)
    view: str | None = None
    agent_views: dict[str, str] = field(default_factory=dict)
    workflow_timeout: float | None = None


@dataclass
class TeamManifest:
    """
    Args:
        agents (`list[AgentSpec]`):
            The agents in order, as they were given to the trainer; `inference` has what they leave to it.
        workflow (`dict`):
            [`Workflow.describe`] of the workflow.
        adapters (`dict[str, dict]`):
            For each adapter its `folder` and whether it was `trained`. Empty where the team shares one fully trained
            policy, whose weights lie beside the manifest.
        base ([`BaseModel`], *optional*):
            The base; `None` in manifests of version 0.1.
        inference ([`Inference`], *optional*):
            How episodes are run; `None` in manifests of version 0.1.
        versions (`dict[str, str]`):
            Versions of the packages that wrote it.
        anonymous (`str`, *optional*):
            `"numbered"` or `"none"` where agents know one another as `agent_1`, `agent_2`, ...
    """

    agents: list[AgentSpec]
    workflow: dict[str, Any]
    adapters: dict[str, dict[str, Any]]
    base: BaseModel | None = None
    inference: Inference | None = None
    versions: dict[str, str] = field(default_factory=dict)
    anonymous: str | None = None

    @property
    def base_model(self) -> str | None:
        """Hub id of the base; `None` for a local one."""
        return self.base.name if self.base is not None and not self.base.is_local else None

    @property
    def base_model_revision(self) -> str | None:
        """Revision of the base on the Hub."""
        return self.base.revision if self.base is not None else None

    @property
    def base_name(self) -> str | None:
        """Name of the base for messages, also that of a local one."""
        return self.base.name if self.base is not None else None

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
            if data["format"] not in _READABLE:
                raise ValueError(
                    f"{path} has format {data['format']!r}; this version of marft_trl reads the formats "
                    f"{', '.join(map(str, _READABLE))}."
                )
            return cls._of(data, path)
        except (
            KeyError,
            TypeError,
            AttributeError,
            RecursionError,
            UnicodeDecodeError,
            json.JSONDecodeError,
        ) as error:
            raise ValueError(f"{path} is damaged: {type(error).__name__}: {error}.") from error

    @classmethod
    def _of(cls, data: dict[str, Any], path: Path) -> TeamManifest:
        agents = check_team([AgentSpec(**agent) for agent in data["agents"]])
        adapters = dict(data["adapters"])
        for name, adapter in adapters.items():
            check_name(name, "an adapter")
            if adapter["folder"] != name:
                raise ValueError(f"{path} puts the adapter {name!r} into the folder {adapter['folder']!r}.")
        unsaved = sorted({agent.adapter for agent in agents} - set(adapters)) if adapters else []
        if unsaved:
            raise KeyError(f"no adapter {unsaved[0]!r}")
        workflow = data["workflow"]
        if not isinstance(workflow, dict) or not isinstance(workflow["class"], str):
            raise TypeError("the workflow is not a mapping with a class")
        if data["format"] == 1:
            hub_id = data["base_model"]
            base = BaseModel(str(hub_id), is_local=False, revision=data["base_model_revision"]) if hub_id else None
            inference = None
        else:
            base = _read(BaseModel, data["base"])
            inference = _read(Inference, data["inference"])
        anonymous = data.get("anonymous")
        if anonymous not in (None, "numbered", "none"):
            raise TypeError(f"'anonymous' is {anonymous!r}")
        return cls(agents, workflow, adapters, base, inference, dict(data["versions"]), anonymous)

    def save(self, folder: str | os.PathLike) -> None:
        """Write the manifest into a folder."""
        data = {
            "format": FORMAT,
            "agents": [agent.to_dict() for agent in self.agents],
            "workflow": self.workflow,
            "adapters": self.adapters,
            "base": asdict(self.base) if self.base is not None else None,
            "inference": asdict(self.inference) if self.inference is not None else None,
            "versions": {name: version(name) for name in _PACKAGES},
            **({"anonymous": self.anonymous} if self.anonymous else {}),
        }
        path = Path(folder) / MANIFEST_NAME
        path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _read(kind: type, data: Any) -> Any:
    """
    A part of the manifest; fields of a later version are left out.

    Raises:
        TypeError: a field is of another kind than it should be.
    """
    if data is None:
        return None
    part = kind(**{item.name: data[item.name] for item in fields(kind) if item.name in data})
    for item in fields(kind):
        value, (wanted, of) = getattr(part, item.name), _KINDS[str(item.type).replace(" | None", "")]
        is_open = value is None and "None" in str(item.type)
        if not is_open and not isinstance(value, wanted):
            raise TypeError(f"{item.name!r} is {value!r}")
        for inner in value.values() if of is not object and not is_open else ():
            texts = [] if not isinstance(inner, list) else inner
            if not isinstance(inner, of) or not all(isinstance(one, str) for one in texts):
                raise TypeError(f"{item.name!r} holds {inner!r}")
    return part


# What a field may hold, and what the values of a mapping
_KINDS: dict[str, tuple[Any, type]] = {
    "str": (str, object),
    "bool": (bool, object),
    "float": ((int, float), object),
    "dict[str, Any]": (Mapping, object),
    "dict[str, str]": (Mapping, str),
    "dict[str, list[str]]": (Mapping, list),
    "dict[str, dict[str, Any]]": (Mapping, Mapping),
}
