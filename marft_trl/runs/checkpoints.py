# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Checkpoints: what is saved next to the files of the `Trainer`, training rows, the best adapters, and resuming."""

from __future__ import annotations

import contextlib
import copy
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Protocol

import torch
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.trainer import TRAINER_STATE_NAME

from ..adapters.copies import PastCopies
from ..adapters.lora import load_adapter_weights
from ..adapters.manifest import MANIFEST_NAME, TeamManifest
from ..adapters.policies import Policies, load_references, save_references
from ..agents import AgentSpec
from ..algorithms.rows import Row, Slice
from ..config.team_setup import RunContext, TeamSetup
from ..episodes.records import SampledBy
from ..learning.adapter_updates import Schedule
from ..seams.libraries import get_logger
from ..system.processes import other_devices
from ..system.randomness import RandomStates, undisturbed
from . import run_folder as commits
from .resume import ResumeChanges, RunSettings, check_structure, tunables
from .run_folder import CheckpointError, Commit, RunFolder


logger = get_logger(__name__)

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
    slices = []
    for s, described in enumerate(state["slices"]):
        rows = []
        for r, plain in enumerate(described.pop("rows")):
            names = [field.name for field in fields(Row) if f"{s}.{r}.{field.name}" in tensors]
            if plain.get("sampled_by") is not None:
                plain["sampled_by"] = SampledBy(*plain["sampled_by"])
            rows.append(Row(**plain, **{name: tensors[f"{s}.{r}.{name}"] for name in names}))
        slices.append(Slice(**{**described, "rows": rows, "adapters": frozenset(described["adapters"])}))
    return state["step"], slices, state.get("extra", {})


BEST_NAME = "marft_best.safetensors"


class BestAdapters:
    """
    Copies of all trained adapters on the CPU.

    Args:
        optimizer (`Callable`): `optimizer()` returns the optimizer; `None` before there is one.
    """

    def __init__(self, policies: Policies, optimizer: Callable[[], Any]):
        self._policies, self._optimizer = policies, optimizer
        self._weights: dict[str, list[torch.Tensor]] = {}
        self._moments: dict[str, list[dict[str, Any]]] = {}
        self.restored = 0  # how often adapters have gone back

    @property
    def adapters(self) -> list[str]:
        """Adapters that there are copies of."""
        return list(self._weights)

    @property
    def _states(self) -> Any:
        """State of the optimizer by parameter."""
        optimizer = self._optimizer()
        return getattr(optimizer, "optimizer", optimizer).state if optimizer is not None else {}

    def take(self) -> None:
        """Copy all trained adapters as they are now."""
        for name in self._policies.trained:
            parameters = list(self._policies.parameters(name).values())
            self._weights[name] = [_copied(parameter.detach()) for parameter in parameters]
            self._moments[name] = [
                {key: _copied(value) for key, value in self._states.get(parameter, {}).items()}
                for parameter in parameters
            ]

    def weights(self, adapter: str) -> list[torch.Tensor]:
        """Weights of a copy, in the order and on the devices of the adapter's parameters."""
        parameters = self._policies.parameters(adapter).values()
        pairs = zip(self._weights[adapter], parameters, strict=True)
        return [tensor.to(parameter.device, parameter.dtype) for tensor, parameter in pairs]

    @torch.no_grad()
    def restore(self, adapter: str) -> None:
        """Give an adapter the weights of its copy, and its optimizer the state of that time, in place."""
        self.restored += 1
        own = list(self._policies.parameters(adapter).values())
        for parameter, tensor, moments in zip(own, self.weights(adapter), self._moments[adapter], strict=True):
            parameter.data.copy_(tensor)
            now = self._states.get(parameter)
            if now is None:
                continue
            for key in [key for key in now if key not in moments]:
                del now[key]
            for key, value in moments.items():
                is_tensor = isinstance(value, torch.Tensor)
                # Steps may be counted on the CPU
                device = now[key].device if isinstance(now.get(key), torch.Tensor) else parameter.device
                now[key] = value.to(device, copy=True) if is_tensor else value

    # ---- Saving ----

    def save(self, folder: str | Path) -> None:
        """Write the copies into a checkpoint."""
        tensors, plain = {}, {}
        for name, item in self._weights.items():
            for position, (weight, moments) in enumerate(zip(item, self._moments[name], strict=True)):
                tensors[f"{name}.{position}"] = weight.contiguous()
                for key, value in moments.items():
                    if isinstance(value, torch.Tensor):
                        tensors[f"{name}.{position}.{key}"] = value.contiguous()
                    else:
                        plain[f"{name}.{position}.{key}"] = value
        save_file(tensors, Path(folder) / BEST_NAME, metadata={"plain": json.dumps(plain)})

    def load(self, folder: str | Path, source_of: Callable[[str], str | None] | None = None) -> None:
        """Load what [`~BestAdapters.save`] wrote. Adapters that the checkpoint does not have are left out."""
        path, named = Path(folder) / BEST_NAME, source_of or (lambda name: name)
        self._weights, self._moments = {}, {}
        if not path.is_file():
            return
        with safe_open(path, "pt") as opened:
            saved: dict[str, Any] = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
            saved |= json.loads((opened.metadata() or {}).get("plain", "{}"))
        for name in self._policies.trained:
            then, count = named(name), len(self._policies.parameters(name))
            if then is None or f"{then}.0" not in saved:
                continue
            self._weights[name] = [saved[f"{then}.{position}"] for position in range(count)]
            self._moments[name] = [
                {key.split(".", 2)[2]: value for key, value in saved.items() if key.startswith(f"{then}.{position}.")}
                for position in range(count)
            ]


def _copied(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value


class Stateful(Protocol):
    """An object with state that a resumed run goes on with."""

    def state_dict(self) -> dict[str, Any]:
        """The state, JSON-serializable."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a [`state_dict`]."""


class Checkpoints:
    """
    Writes checkpoints that count only when they are complete, and loads what a resumed run needs and the Trainer
    forgets: the training rows in use, the position in them, the references, and the state of every owner.

    Args:
        owners (`Mapping[str, Stateful]`): objects with state, by the name they have in checkpoints.
        ref_model (`nn.Module`, *optional*): TRL's reference model.
        settings ([`RunSettings`]): what decides the results of the run.
        best ([`BestAdapters`], *optional*): adapters at the team's best.
    """

    def __init__(
        self,
        team: TeamSetup,
        run: RunContext,
        owners: Mapping[str, Stateful],
        schedule: Schedule,
        model: Any,
        ref_model: nn.Module | None,
        settings: RunSettings,
        copies: PastCopies | None,
        best: BestAdapters | None,
    ):
        self.copies, self.best = copies, best
        self.owners = dict(owners)
        self.folder = RunFolder(run.args.output_dir or ".")
        self.changes = ResumeChanges.of(run.args.resume_changes)  # type: ignore[arg-type]
        self._state, self._schedule, self._args, self._processes = run.state, schedule, run.args, run.processes
        self._model, self._ref_model, self._policies, self._critic = model, ref_model, team.policies, team.critic
        self._agents, self._anonymous, self._settings = team.agents, team.anonymous, settings
        device = run.processes.device
        self._random = RandomStates(device, others=other_devices(model, device))
        self._remembered: dict[str, Any] | None = None
        self._window: dict[str, Any] | None = None

    # ---- Writing ----

    @contextlib.contextmanager
    def saving(self, folder: Path) -> Iterator[None]:
        """
        Context manager around the `Trainer`'s own saving: the checkpoint counts when all processes have written their
        files.

        Raises:
            CheckpointError: the checkpoint cannot be written, or holds weights that are not finite.
        """
        run_folder = self.folder if folder.parent == self.folder.path else RunFolder(folder.parent)
        run_folder.run = self.folder.run or "unnamed"
        is_open = False
        try:
            with self._processes.together():
                self._check_weights()
                if self._args.should_save:
                    run_folder.open(int(folder.name.rpartition("-")[2]))
                    is_open = True
            with self._processes.together(), undisturbed():
                yield
            with self._processes.together():
                if self._args.should_save:
                    run_folder.close(folder, self._settings.collect())
        except Exception as error:
            if is_open:
                run_folder.abandon(folder)
            raise self._failed(folder, run_folder, error) from error
        if self._args.should_save:
            self._rotate(run_folder)

    def _rotate(self, run_folder: RunFolder) -> None:
        try:
            run_folder.rotate(self._args.save_total_limit, self._state.best_checkpoint)
        except OSError as error:  # the new checkpoint stands
            logger.warning(f"An older checkpoint could not be removed: {error}.")

    def _failed(self, folder: Path, run_folder: RunFolder, error: Exception) -> CheckpointError:
        standing = run_folder.standing()
        left = (
            f"{standing} is complete, and the run goes on from it"
            if standing is not None
            else "No checkpoint of this run is complete, so the run starts from the beginning"
        )
        return CheckpointError(
            f"{folder} could not be written: {type(error).__name__}: {error}. {left} when the same command is started "
            "again with `resume_from_checkpoint=True`. What was written of the failed checkpoint was removed."
        )

    def _check_weights(self) -> None:
        for name in self._policies.trained:
            parameters = self._policies.parameters(name).items()
            broken = next((key for key, value in parameters if not value.detach().isfinite().all()), None)
            if broken is not None:
                raise FloatingPointError(
                    f"The weights of {name!r} are not finite ({broken}), so they are not saved. Lower the learning "
                    "rate and go on from an earlier checkpoint."
                )

    def save(self, folder: str | Path) -> None:
        """Write the state of this process into a checkpoint. Every process calls it."""
        rank, world_size = self._args.process_index, self._args.world_size
        own = self._own_state()
        save_rollouts(folder, rank, world_size, own["micro_step"], own["slices"], own["extra"])
        if self._args.sync_ref_model and self._args.should_save:
            save_references(self._policies, self._ref_model, folder)
        if self.copies is not None and self._args.should_save:
            self.copies.save(folder)
        if self.best is not None and self.best.adapters and self._args.should_save:
            self.best.save(folder)

    def _own_state(self) -> dict[str, Any]:
        is_spent = self._state.micro_step % self._schedule.generate_every == 0  # new episodes are due anyway
        extra = {name: owner.state_dict() for name, owner in self.owners.items()}
        return {
            "micro_step": self._state.micro_step,
            "slices": None if is_spent else self._state.slices,
            "extra": {**extra, "window": self._state.window()},
        }

    # ---- A checkpoint of the last complete step, after a failure in the next one ----

    def remember(self) -> None:
        """Keep what a checkpoint of this step would hold, besides weights and optimizer, which change at its end."""
        with undisturbed():
            self._remembered = {
                "step": self._state.optimizer_step,
                "random": self._random.capture(),
                "tokens": self._state.num_tokens_seen,
                "entropy": self._state.entropy,
                "restored": self._restored,
                **copy.deepcopy(self._own_state(), {id(self._state.slices): self._state.slices}),
            }

    @property
    def _restored(self) -> int:
        """How often adapters have gone back to their best."""
        return self.best.restored if self.best is not None else 0

    def remember_again(self) -> None:
        """Remember what a log of the present step has changed."""
        if self._remembered is not None and self._remembered["step"] == self._state.optimizer_step:
            self.remember()

    @property
    def step(self) -> int:
        """Number of optimizer steps so far."""
        return self._state.optimizer_step

    def has_this_step(self) -> bool:
        """`True` on all processes if a checkpoint of the present step stands."""
        standing = self._processes.broadcast(self.folder.standing() if self._args.should_save else None)
        return standing is not None and standing.name == f"checkpoint-{self._state.optimizer_step}"

    def forget(self) -> None:
        """The weights are about to change: what was remembered does not belong to them any more."""
        self._remembered = None

    def save_remembered(self, save: Callable[[], None]) -> bool:
        """
        Save the last complete step, after the next one has failed.

        Returns: whether a checkpoint of that step stands now.
        """
        kept = self._remembered
        if kept is None or (kept["step"], kept["restored"]) != (self._state.optimizer_step, self._restored):
            return False  # nothing was completed, or the failure came after the weights had changed
        if self.has_this_step():
            return True
        self._random.restore(kept["random"])
        self._state.micro_step, self._state.slices = kept["micro_step"], kept["slices"]
        self._state.see_tokens(kept["tokens"] - self._state.num_tokens_seen)
        self._state.note_entropy(*kept["entropy"])
        self._load_owners(kept["extra"])
        self.open_window()
        save()
        return True

    # ---- Resuming ----

    def choose(self, resume_from_checkpoint: str | bool | Path | None) -> str | None:
        """
        The checkpoint to resume from, the same on all processes, after its files and settings have been checked.

        Args:
            resume_from_checkpoint (`str`, `bool` or `Path`, *optional*): `True` for the newest complete one of this
                run, if there is one.

        Raises:
            DamagedCheckpoint: a checkpoint that was named is damaged.
            ValueError: the run differs from that of the checkpoint in a way that was not announced.
        """
        with self._processes.together():
            for owner in self.owners.values():
                owner.state_dict()  # what cannot be saved is known before the first generation
            chosen = self._choose(resume_from_checkpoint) if self._args.should_save else None
        chosen, self.changes = self._processes.broadcast((chosen, self.changes))
        return chosen

    def _choose(self, resume_from_checkpoint: str | bool | Path | None) -> str | None:
        if not resume_from_checkpoint:
            self.folder.start()
            return None
        if resume_from_checkpoint is True:
            found = self.folder.newest()
            if found is None:
                logger.warning(
                    f"Training starts from the beginning: there is no complete checkpoint in {self.folder.path}."
                )
                self.folder.start(is_meant=False)
                return None
            folder, commit = found
            logger.info(f"Resuming from {folder}.")
        else:
            if not isinstance(resume_from_checkpoint, (str, os.PathLike)):
                raise TypeError(
                    f"`resume_from_checkpoint` must be True or the path of a checkpoint, got "
                    f"{resume_from_checkpoint!r}."
                )
            folder = Path(resume_from_checkpoint)
            _check_is_checkpoint(folder)
            if not folder.is_dir():
                raise FileNotFoundError(
                    f"There is no checkpoint {folder}. Pass `True` for the newest one in {self.folder.path}, or the "
                    "path of a folder `checkpoint-<step>`."
                )
            commit = self._verified(folder)
        self.check_settings(commit, folder)
        is_own = folder.resolve().parent == self.folder.path.resolve()
        if is_own and commit.run:
            self.folder.go_on(commit.run, commit.step)
        else:
            self.folder.start()
        return str(folder)

    @staticmethod
    def _verified(folder: Path) -> Commit:
        if not (folder / commits.COMMIT_NAME).exists() and not (folder / commits.OPEN_NAME).exists():
            logger.warning(
                f"{folder} has no {commits.COMMIT_NAME}, as checkpoints written by earlier versions: its files cannot "
                "be verified."
            )
            return Commit("", -1)
        return commits.verify(folder)

    def check_settings(self, commit: Commit, folder: Path) -> None:
        """Refuse structural changes since a checkpoint, and announce the others."""
        saved, present = commit.settings, self._settings.collect()
        if not saved:
            return
        made = {*self.changes.add, *self.changes.rename.values()} <= _names_of(saved)
        if not self.changes.is_empty and made and _are_done(saved, present):
            logger.warning(f"The changes in `resume_changes` are part of {folder.name} already; nothing changes now.")
            self.changes = ResumeChanges()
        self.changes.check_names(_names_of(saved), _names_of(present))
        for line in check_structure(saved, present, self.changes, folder):
            logger.warning(f"Changed since {folder.name}: {line}. The resumed run is not bit for bit the one before.")
        for name, then, now in tunables(saved, present):
            logger.warning(f"Changed since {folder.name}, effective now: {name}: {then} -> {now}.")

    def load(self, folder: str | Path) -> None:
        """Go on from the state of this process in a checkpoint."""
        if self._args.sync_ref_model:
            load_references(self._policies, self._ref_model, folder)
        if self.copies is not None:
            self.copies.load(folder, self.source_of)
        if self.best is not None:
            self.best.load(folder, self.source_of)
        is_changed = not self.changes.is_empty
        restored = load_rollouts(folder, self._args.process_index, self._args.world_size, is_changed)
        if restored is None:
            return
        self._state.micro_step, slices, extra = restored
        self._state.slices = None if is_changed else slices  # rows of a changed run are sampled anew
        self._load_owners(extra)

    def _load_owners(self, extra: dict[str, Any]) -> None:
        for name, owner in self.owners.items():
            if name in extra:
                owner.load_state_dict(extra[name])
        self._window = extra.get("window")

    def open_window(self) -> None:
        """Go on with what was measured since the last log. The Trainer clears it after [`load`]."""
        if self._window is not None:
            self._state.open_window(self._window)
            self._window = None

    @property
    def source_of(self) -> Callable[[str], str | None] | None:
        """Name that an adapter has in the checkpoint, where the team was changed on purpose; else `None`."""
        return None if self.changes.is_empty else self.changes.source_of

    def load_best(self, folder: str | Path) -> None:
        """Go back to the weights of a checkpoint of this run."""
        self.load_weights(folder)
        if self.copies is not None:
            self.copies.go_back_to(folder)

    def load_weights(self, folder: str | Path) -> None:
        """Load the adapters of the team and the critic from a checkpoint, in place."""
        load_team_adapters(self._model, self._policies, self._agents, folder, self._anonymous, self.changes)
        if self._critic is not None:
            self._critic.load(folder)


def _are_done(saved: Mapping[str, Any], present: Mapping[str, Any]) -> bool:
    """`True` if a checkpoint has the structure of the run."""
    if _names_of(saved) != _names_of(present):
        return False
    try:
        check_structure(saved, present, ResumeChanges(), "")
    except ValueError:
        return False
    return True


def _names_of(settings: Mapping[str, Any]) -> set[str]:
    """Names of the agents and adapters in recorded settings."""
    return {*settings.get("agents", {}), *settings.get("adapters", {})}


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
    changes: ResumeChanges | None = None,
) -> None:
    """
    Load every adapter of the team from a checkpoint, in place.

    Raises:
        ValueError: the agents, the adapters or `anonymous` differ from those of the checkpoint, or weights are not
            finite.
    """
    changes = changes or ResumeChanges()
    manifest = TeamManifest.load(folder)
    if manifest.anonymous != anonymous:
        raise ValueError(
            f"The checkpoint {folder} was written with `anonymous={manifest.anonymous or False!r}`, but the trainer "
            f"has `anonymous={anonymous or False!r}`. Resume with the same."
        )
    saved = {agent.name for agent in manifest.agents} | set(manifest.adapters)
    changes.check_names(saved, {agent.name for agent in agents} | set(policies.names))
    for name in policies.names:
        source = changes.source_of(name)
        if source is not None:
            load_adapter_weights(model, name, Path(folder) / source)
            _check_finite(policies, name, folder)
    policies.release()


def _check_finite(policies: Policies, name: str, folder: str | Path) -> None:
    if not all(torch.isfinite(value.detach()).all() for value in policies.parameters(name).values()):
        raise ValueError(
            f"The weights of the adapter {name!r} in {folder} are not finite. Go on from an earlier checkpoint."
        )


def _check_is_checkpoint(folder: Path) -> None:
    """Raise if a folder is that of a run or of a saved team, which has no state to go on with."""
    if not folder.is_dir() or (folder / TRAINER_STATE_NAME).exists():
        return
    inside = sorted(folder.glob("checkpoint-*"), key=lambda one: (len(one.name), one.name))
    if inside:
        raise ValueError(
            f"{folder} is the folder of a run, not a checkpoint. Pass `True` for the newest one, or its path: "
            f"{inside[-1]}."
        )
    is_of_run = any((folder / name).exists() for name in (commits.COMMIT_NAME, commits.OPEN_NAME))
    if (folder / MANIFEST_NAME).exists() and not is_of_run:
        raise ValueError(
            f"{folder} is a saved team without the state of an optimizer, so a run cannot go on from it. Begin a new "
            f"one with its adapters: `model=load_adapters(base, {str(folder)!r})`."
        )
