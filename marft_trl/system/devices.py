# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""The device of a process."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import TrainingArguments

from ..seams.logs import get_logger
from ..seams.runs import use_one_device


logger = get_logger(__name__)


def placement(device: torch.device) -> dict[str, Any]:
    """Arguments of `from_pretrained` that put a whole model on the device of a process, and none for the CPU."""
    return {} if device.type in ("cpu", "mps") else {"device_map": {"": device}}


def is_spread(model: nn.Module) -> bool:
    """`True` if a model was loaded onto several devices, such as by `device_map="auto"`."""
    return len(set(getattr(model, "hf_device_map", {}).values())) > 1


def other_devices(model: nn.Module, device: torch.device) -> list[torch.device]:
    """The devices that a spread model has layers on, besides that of the process."""
    if not is_spread(model):
        return []
    places = {one for one in model.hf_device_map.values() if one != "disk"}  # type: ignore[union-attr]
    found = {torch.device(device.type, one) if isinstance(one, int) else torch.device(one) for one in places}
    whole = {torch.device(one.type, one.index or 0) for one in found if one.type == device.type}
    return sorted(whole - {torch.device(device.type, device.index or 0)}, key=lambda one: one.index)


def take_one_device(args: TrainingArguments, model: nn.Module) -> None:
    """
    Let a process that was started alone on a machine with several GPUs use its own and no others. The Trainer would
    copy the model to all of them (`nn.DataParallel`), which `GRPOTrainer` (1.16) refuses. A model that the user has
    spread over several stays there.
    """
    device = args.device
    if args.n_gpu > 1 and not is_spread(model):
        logger.warning(
            f"This machine shows {args.n_gpu} devices, and the run has one process, which uses {device}. To use them "
            "all, start it with `accelerate launch`; to choose one, set CUDA_VISIBLE_DEVICES."
        )
        use_one_device(args)
