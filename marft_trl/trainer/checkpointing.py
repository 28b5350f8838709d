# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Saving and loading a team: adapters by name, and the state that the Trainer forgets."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.logging import get_logger
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers.trainer import TRAINER_STATE_NAME
from trl.trainer.utils import RepeatSampler

from ..agents import AgentSpec
from ..manifest import TeamManifest
from .adapters import Policies, load_adapter_weights
from .batching import Row, Slice


logger = get_logger(__name__)

ROLLOUTS_NAME = "marft_rollouts_{rank}"

_ROW_TENSORS = (
    *("prompt_ids", "completion_ids", "old_per_token_logps", "ref_per_token_logps"),
    *("old_values", "value_targets", "features", "advantage"),
)


class EpochSampler(RepeatSampler):
    """
    TRL's `RepeatSampler` with an order that depends on the epoch alone, so that a resumed run finds the order of its
    epoch. An uninterrupted run gets the same order as with TRL's.
    """

    def set_epoch(self, epoch: int) -> None:
        """Forward to epoch `epoch`, counted from 0. accelerate calls it before each epoch."""
        if self.shuffle:
            self.generator.manual_seed(self.seed)
            for _ in range(epoch):
                torch.randperm(self.num_samples, generator=self.generator)


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
        ValueError: the checkpoint has another team, or one with other names.
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
    The newest checkpoint that was written to its end; `None` where there is none.

    The Trainer writes `trainer_state.json` last, so a checkpoint without a readable one was cut short.
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
    """Whether a checkpoint was written to its end."""
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
    Write the training rows in use and the position in them, so that a resumed run goes on with the same rows.

    Args:
        folder (`str` or `Path`): folder of the checkpoint.
        rank (`int`): index of this process.
        world_size (`int`): number of processes.
        step (`int`): forward and backward passes done so far.
        slices (`Sequence[Slice]`, *optional*): the slices of the present generation batch, unless it is used up.
        extra (`dict`, *optional*): further state, JSON-serializable.
    """
    tensors: dict[str, torch.Tensor] = {}
    described = []
    for s, slice_ in enumerate(slices or []):
        rows = []
        for r, row in enumerate(slice_.rows):
            plain = dict(vars(row))
            for name in _ROW_TENSORS:
                if isinstance(plain[name], torch.Tensor):
                    tensors[f"{s}.{r}.{name}"] = plain.pop(name).detach().cpu().contiguous()
            rows.append(plain)
        described.append(
            {
                "rows": rows,
                "rows_per_slice": slice_.rows_per_slice,
                "tokens_per_slice": slice_.tokens_per_slice,
                "tokens": slice_.tokens,
                "adapters": sorted(slice_.adapters),
                "value_targets": slice_.value_targets,
            }
        )
    stem = Path(folder) / ROLLOUTS_NAME.format(rank=rank)
    save_file(tensors, stem.with_suffix(".safetensors"))
    used = described if slices is not None else None
    state = {"world_size": world_size, "step": step, "slices": used, "extra": extra or {}}
    stem.with_suffix(".json").write_text(json.dumps(state), encoding="utf-8")


def load_rollouts(
    folder: str | Path, rank: int, world_size: int
) -> tuple[int, list[Slice] | None, dict[str, Any]] | None:
    """
    What [`save_rollouts`] wrote: the step, the slices and the further state; `None` where the checkpoint has none.

    Raises:
        ValueError: the checkpoint was written by another number of processes.
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
    slices = []
    for s, described in enumerate(state["slices"]):
        rows = []
        for r, plain in enumerate(described.pop("rows")):
            names = [name for name in _ROW_TENSORS if f"{s}.{r}.{name}" in tensors]
            rows.append(Row(**plain, **{name: tensors[f"{s}.{r}.{name}"] for name in names}))
        slices.append(Slice(**{**described, "rows": rows, "adapters": frozenset(described["adapters"])}))
    return state["step"], slices, state.get("extra", {})
