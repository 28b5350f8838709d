# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""The training rows in use, in a checkpoint: tensors in safetensors, the rest in JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from ..episodes.records import SampledBy
from ..rules.rows import Row, Slice


ROLLOUTS_NAME = "marft_rollouts_{rank}"


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
    folder: str | Path, rank: int, world_size: int, is_changed: bool = False
) -> tuple[int, list[Slice] | None, dict[str, Any]] | None:
    """
    Load what [`save_rollouts`] wrote.

    Args:
        folder (`str` or `Path`): folder of the checkpoint.
        rank (`int`): index of this process.
        world_size (`int`): number of processes.
        is_changed (`bool`): whether the run was changed on purpose. Then the number of processes may differ; a process
            that the checkpoint does not know goes on from the state of the first.

    Returns: the step, the slices and the further state, or `None` if the checkpoint has no rollouts.

    Raises:
        ValueError: the checkpoint was written by a different number of processes.
    """
    first = Path(folder) / (ROLLOUTS_NAME.format(rank=0) + ".json")
    if not first.is_file():
        return None
    saved = json.loads(first.read_text(encoding="utf-8"))["world_size"]
    if is_changed and rank >= saved:
        rank = 0
    if saved != world_size and not is_changed:
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
    if row.get("sampled_by") is not None:
        row["sampled_by"] = SampledBy(*row["sampled_by"])
    return row
