# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Reference policies: moving them towards the policies (`sync_ref_model`), saving and loading them."""

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
    Callback that implements `sync_ref_model` for agents with adapters. Every `ref_model_sync_steps` steps, it moves
    the reference of each trained adapter towards the policy by `ref_model_mixup_alpha`. TRL's `SyncRefModelCallback`
    does the same with whole models. The base does not change.

    Args:
        policies ([`Policies`]): the policies. They hold the references of all adapters.

    Source: TR-DPO (2404.09656), soft update.
    """

    def __init__(self, policies: Policies):
        self._policies = policies

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % args.ref_model_sync_steps == 0:
            self._policies.mix_references(args.ref_model_mixup_alpha)


def _references(policies: Policies, ref_model: nn.Module | None) -> dict[str, torch.Tensor]:
    """References by name: those of the adapters, or the weights of TRL's reference model."""
    if ref_model is None:
        return policies.references()
    return {name: parameter.detach() for name, parameter in ref_model.named_parameters()}


def save_references(policies: Policies, ref_model: nn.Module | None, folder: str | Path) -> None:
    """Write the references into a checkpoint. Otherwise, a resumed run would take the loaded weights as references."""
    tensors = {name: tensor.cpu().contiguous() for name, tensor in _references(policies, ref_model).items()}
    save_file(tensors, Path(folder) / REFERENCES_NAME)


@torch.no_grad()
def load_references(policies: Policies, ref_model: nn.Module | None, folder: str | Path) -> None:
    """
    Load what [`save_references`] wrote, in place.

    Raises:
        ValueError: the checkpoint has no references, or those of other adapters.
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
