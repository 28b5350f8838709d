# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""References that follow their policies."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import TrainerCallback

from .policies import Policies


REFERENCES_NAME = "marft_references.safetensors"


class SyncReferences(TrainerCallback):
    """
    `sync_ref_model` for agents with adapters: every `ref_model_sync_steps` steps the reference of each trained adapter
    moves towards its policy by `ref_model_mixup_alpha`, as TRL's `SyncRefModelCallback` does with whole models. The
    base is not part of it.

    Args:
        policies ([`Policies`]): the policies, which keep the references of all adapters.

    Source: TR-DPO (2404.09656), soft update.
    """

    def __init__(self, policies: Policies):
        self._policies = policies

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % args.ref_model_sync_steps == 0:
            self._policies.mix_references(args.ref_model_mixup_alpha)


def _references(policies: Policies, ref_model: nn.Module | None) -> dict[str, torch.Tensor]:
    """The references: of adapters, or TRL's reference model, each of whose weights is named once."""
    if ref_model is None:
        return policies.references()
    return {name: parameter.detach() for name, parameter in ref_model.named_parameters()}


def save_references(policies: Policies, ref_model: nn.Module | None, folder: str | Path) -> None:
    """Write the references beside a checkpoint: a resumed run must not take the loaded weights for them."""
    tensors = {name: tensor.cpu().contiguous() for name, tensor in _references(policies, ref_model).items()}
    save_file(tensors, Path(folder) / REFERENCES_NAME)


@torch.no_grad()
def load_references(policies: Policies, ref_model: nn.Module | None, folder: str | Path) -> None:
    """
    Load what [`save_references`] wrote, in place.

    Raises:
        ValueError: the checkpoint has none, or those of other adapters.
    """
    path = Path(folder) / REFERENCES_NAME
    saved = load_file(path) if path.is_file() else {}
    present = _references(policies, ref_model)
    if {k: v.shape for k, v in saved.items()} != {k: v.shape for k, v in present.items()}:
        raise ValueError(
            f"The checkpoint {folder} has no references ({REFERENCES_NAME}) of these policies, but "
            "`sync_ref_model=True` goes on from them. Resume with the settings that it was written with."
        )
    for name, tensor in present.items():
        tensor.copy_(saved[name])
