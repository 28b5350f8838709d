# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Saving and loading a team: the adapters, and the training state that the `Trainer` does not save."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate.logging import get_logger
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.trainer import TRAINER_STATE_NAME

from ..agents import AgentSpec
from ..configs import MARFTConfig
from ..learning.critic import Critic
from ..learning.data import Row, Slice
from ..learning.schedules import Schedule
from ..manifest import TeamManifest
from ..weights.adapters import load_adapter_weights
from ..weights.policies import Policies
from ..weights.references import load_references, save_references
from .trl_seams import TrlState


logger = get_logger(__name__)

ROLLOUTS_NAME = "marft_rollouts_{rank}"


class Stateful(Protocol):
    """An object with state that a resumed run goes on with."""

    def state_dict(self) -> dict[str, Any]:
        """The state, JSON-serializable."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a [`state_dict`]."""


class Checkpoints:
    """
    Saves and loads what a resumed run needs and the Trainer forgets: the training rows in use, the position in them,
    the references, and the state of every owner.

    Args:
        state ([`TrlState`]): position and training rows.
        owners (`Mapping[str, Stateful]`): objects with state, by the name they have in checkpoints.
        schedule ([`Schedule`]): when new episodes are due.
        model (`nn.Module`): the model with its adapters.
        ref_model (`nn.Module`, *optional*): TRL's reference model.
        policies ([`Policies`]): adapters and their references.
        critic ([`Critic`], *optional*): loaded beside the adapters.
        agents (`Sequence[AgentSpec]`): the team.
        anonymous (`str`, *optional*): kind of the anonymous ablation.
        args ([`MARFTConfig`]): index and number of processes, `sync_ref_model`.
    """

    def __init__(
        self,
        state: TrlState,
        owners: Mapping[str, Stateful],
        schedule: Schedule,
        model: Any,
        ref_model: nn.Module | None,
        policies: Policies,
        critic: Critic | None,
        agents: Sequence[AgentSpec],
        anonymous: str | None,
        args: MARFTConfig,
    ):
        self.owners = dict(owners)
        self._state, self._schedule = state, schedule
        self._model, self._ref_model, self._policies, self._critic = model, ref_model, policies, critic
        self._agents, self._anonymous, self._args = agents, anonymous, args

    def save(self, folder: str | Path) -> None:
        """Write the state of this process into a checkpoint. Every process calls it."""
        is_spent = self._state.micro_step % self._schedule.generate_every == 0  # new episodes are due anyway
        slices = None if is_spent else self._state.slices
        extra = {name: owner.state_dict() for name, owner in self.owners.items()}
        rank, world_size = self._args.process_index, self._args.world_size
        save_rollouts(folder, rank, world_size, self._state.micro_step, slices, extra)
        if self._args.sync_ref_model and self._args.should_save:
            save_references(self._policies, self._ref_model, folder)

    def load(self, folder: str | Path) -> None:
        """Go on from the state of this process in a checkpoint."""
        if self._args.sync_ref_model:
            load_references(self._policies, self._ref_model, folder)
        restored = load_rollouts(folder, self._args.process_index, self._args.world_size)
        if restored is None:
            return
        self._state.micro_step, self._state.slices, extra = restored
        if "entropy_control" in extra:  # of a version before 0.2
            extra["updates"] = {"entropy_control": extra["entropy_control"]}
        for name, owner in self.owners.items():
            if name in extra:
                owner.load_state_dict(extra[name])

    def load_weights(self, folder: str | Path) -> None:
        """Load the adapters of the team and the critic from a checkpoint, in place."""
        load_team_adapters(self._model, self._policies, self._agents, folder, self._anonymous)
        if self._critic is not None:
            self._critic.load(folder)

    def remove_incomplete(self, folder: Path) -> None:
        """Remove a checkpoint that a killed run left: old and new files must not mix."""
        if self._args.should_save and folder.exists() and not is_complete(folder):
            shutil.rmtree(folder)

    def choose(self, resume_from_checkpoint: str | bool | Path | None) -> str | bool | None:
        """
        The checkpoint to resume from. For `True` the parent takes the newest folder, also one that a killed run left
        half written, and needs one.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = newest_complete(self._args.output_dir or ".")
        return str(resume_from_checkpoint) if isinstance(resume_from_checkpoint, Path) else resume_from_checkpoint


def raise_failed_push(jobs: Sequence[Any], repo: str | None, folder: str | None) -> None:
    """
    Raise for an upload of a checkpoint that failed in the background.

    Raises:
        RuntimeError: names the repository and the folder with the files.
    """
    for job in jobs:
        if job.done() and job.exception() is not None:
            raise RuntimeError(
                f"A checkpoint could not be pushed to {repo}: {job.exception()}. The files are in {folder}; push them "
                "again with `trainer.push_to_hub()`."
            ) from job.exception()


def load_team_adapters(
    model: PeftModel,
    policies: Policies,
    agents: Sequence[AgentSpec],
    folder: str | Path,
    anonymous: str | None = None,
) -> None:
    """
    Load every adapter of the team from a checkpoint, in place.

    Raises:
        ValueError: the agents, the adapters or `anonymous` differ from those of the checkpoint.
    """
    manifest = TeamManifest.load(folder)
    if manifest.anonymous != anonymous:
        raise ValueError(
            f"The checkpoint {folder} was written with `anonymous={manifest.anonymous or False!r}`, but the trainer "
            f"has `anonymous={anonymous or False!r}`. Resume with the same."
        )
    saved = {agent.name: agent.adapter for agent in manifest.agents}
    present = {agent.name: agent.adapter for agent in agents}
    if saved != present or set(manifest.adapters) != set(policies.names):
        raise ValueError(
            f"The checkpoint {folder} has the agents and adapters {saved}, but the team is {present}. Resume with the "
            "team that the checkpoint was written with."
        )
    for name in policies.names:
        load_adapter_weights(model, name, Path(folder) / name)
    policies.release()


def newest_complete(output_dir: str | Path) -> Path | None:
    """
    The newest complete checkpoint, or `None` if there is none.

    The `Trainer` writes `trainer_state.json` last. A checkpoint in which this file is missing or cannot be read is
    incomplete.
    """
    folders = [
        path for path in Path(output_dir).glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdigit()
    ]
    folders.sort(key=lambda path: int(path.name.removeprefix("checkpoint-")), reverse=True)
    for folder in folders:
        if is_complete(folder):
            return folder
        logger.warning(f"{folder} was cut short while it was written; looking for an older checkpoint.")
    logger.warning(f"There is no complete checkpoint in {output_dir}: training starts from the beginning.")
    return None


def is_complete(folder: str | Path) -> bool:
    """Return `True` if a checkpoint is complete."""
    try:
        json.loads((Path(folder) / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True


def save_rollouts(
    folder: str | Path,
    rank: int,
    world_size: int,
    step: int,
    slices: Sequence[Slice] | None,
    extra: dict[str, Any] | None = None,
) -> None:
    """
    Write the training rows in use and the current position in them. A resumed run continues with the same rows.

    Args:
        folder (`str` or `Path`): folder of the checkpoint.
        rank (`int`): index of this process.
        world_size (`int`): number of processes.
        step (`int`): number of forward and backward passes so far.
        slices (`Sequence[Slice]`, *optional*): slices of the current generation batch; `None` if it is used up.
        extra (`dict`, *optional*): further state, JSON-serializable.
    """
    tensors: dict[str, torch.Tensor] = {}
    described = []
    for s, slice_ in enumerate(slices or []):
        rows = []
        for r, row in enumerate(slice_.rows):
            plain = dict(vars(row))
            for name in [name for name, value in plain.items() if isinstance(value, torch.Tensor)]:
                tensors[f"{s}.{r}.{name}"] = plain.pop(name).detach().cpu().contiguous()
            rows.append(plain)
        described.append({**vars(slice_), "rows": rows, "adapters": sorted(slice_.adapters)})
    stem = Path(folder) / ROLLOUTS_NAME.format(rank=rank)
    save_file(tensors, stem.with_suffix(".safetensors"))
    used = described if slices is not None else None
    state = {"world_size": world_size, "step": step, "slices": used, "extra": extra or {}}
    stem.with_suffix(".json").write_text(json.dumps(state), encoding="utf-8")


def load_rollouts(
    folder: str | Path, rank: int, world_size: int
) -> tuple[int, list[Slice] | None, dict[str, Any]] | None:
    """
    Load what [`save_rollouts`] wrote.

    Returns: the step, the slices and the further state, or `None` if the checkpoint has no rollouts.

    Raises:
        ValueError: the checkpoint was written by a different number of processes.
    """
    first = Path(folder) / (ROLLOUTS_NAME.format(rank=0) + ".json")
    if not first.is_file():
        return None
    saved = json.loads(first.read_text(encoding="utf-8"))["world_size"]
    if saved != world_size:
        raise ValueError(
            f"The checkpoint {folder} was written by {saved} processes, but there are {world_size}: the rows in use "
            f"and the random states cannot be divided anew. Resume with {saved} processes, or start a new run from "
            "the adapters of the checkpoint (`load_adapters`)."
        )
    stem = Path(folder) / ROLLOUTS_NAME.format(rank=rank)
    state = json.loads(stem.with_suffix(".json").read_text(encoding="utf-8"))
    if state["slices"] is None:
        return state["step"], None, state.get("extra", {})
    tensors = load_file(stem.with_suffix(".safetensors"))
    slices, number = [], 0
    for s, described in enumerate(state["slices"]):
        rows = []
        for r, plain in enumerate(described.pop("rows")):
            names = [field.name for field in fields(Row) if f"{s}.{r}.{field.name}" in tensors]
            saved = _of_this_version(plain, number)
            rows.append(Row(**saved, **{name: tensors[f"{s}.{r}.{name}"] for name in names}))
            number += 1
        slices.append(Slice(**{**described, "rows": rows, "adapters": frozenset(described["adapters"])}))
    return state["step"], slices, state.get("extra", {})


def _of_this_version(row: dict[str, Any], number: int) -> dict[str, Any]:
    """The fields of a saved row. Before version 0.2, rows had no number and another name for the joint action."""
    row.setdefault("number", number)
    if "round" in row:
        row["joint_action"] = row.pop("round")
    return row
