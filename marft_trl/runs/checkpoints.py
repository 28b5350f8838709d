# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Save and load what the `Trainer` does not save: training rows, the best adapters, and other state of a run."""

from __future__ import annotations

import contextlib
import copy
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.trainer import TRAINER_STATE_NAME

from ..adapters.lora import load_adapter_weights, load_base_weights
from ..adapters.manifest import MANIFEST_NAME, TeamManifest
from ..adapters.policies import SHARED_POLICY, Policies, load_references, save_references
from ..algorithms.rows import Row, Slice
from ..config.team_setup import RunContext, TeamSetup
from ..episodes.images import digest_of, restore_image
from ..episodes.records import SampledBy
from ..learning.adapter_updates import Schedule
from ..seams.libraries import get_logger
from ..system.randomness import RandomStates, undisturbed
from . import run_folder
from .resume import RunSettings, check_same_team, check_structure, read_accepted, tunables
from .run_folder import CheckpointError, Commit, RunFolder


if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful

logger = get_logger(__name__)

ROLLOUTS_NAME = "marft_rollouts_{rank}"


def save_rollouts(
    folder: str | Path, rank: int, world_size: int, step: int, slices: Sequence[Slice] | None, extra: dict[str, Any]
) -> None:
    """Save the training rows, `None` if all were used, the number of micro-steps so far, and further state."""
    tensors: dict[str, torch.Tensor] = {}
    slice_data = []
    images: dict[str, Any] = {}  # by their content, so that each is saved once
    for s, slice_ in enumerate(slices or []):
        rows = []
        for r, row in enumerate(slice_.rows):
            row_data = dict(vars(row))
            for name in [name for name, value in row_data.items() if isinstance(value, torch.Tensor)]:
                tensors[f"{s}.{r}.{name}"] = row_data.pop(name).detach().cpu().contiguous()
            if row.images:
                row_data["images"] = [digest_of(image) for image in row.images]
                images |= zip(row_data["images"], row.images, strict=True)
            else:
                del row_data["images"]
            rows.append(row_data)
        slice_data.append({**vars(slice_), "rows": rows, "adapters": sorted(slice_.adapters)})
    stem = Path(folder) / ROLLOUTS_NAME.format(rank=rank)
    saved = slice_data if slices is not None else None
    state = {"world_size": world_size, "step": step, "slices": saved, "extra": extra}
    if images:
        for name, image in images.items():
            tensors[f"image.{name}"] = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
        state["images"] = {name: [image.mode, *image.size] for name, image in images.items()}
    save_file(tensors, stem.with_suffix(".safetensors"))
    stem.with_suffix(".json").write_text(json.dumps(state), encoding="utf-8")


def load_rollouts(
    folder: str | Path, rank: int, world_size: int, has_changes: bool = False
) -> tuple[int, list[Slice] | None, dict[str, Any]] | None:
    """
    Return step, slices and further state. Raises `ValueError` if another number of processes wrote them, unless the
    run `has_changes`: additional processes then load those of the first.
    """
    first_path = Path(folder) / (ROLLOUTS_NAME.format(rank=0) + ".json")
    if not first_path.is_file():
        return None
    saved_world_size = json.loads(first_path.read_text(encoding="utf-8"))["world_size"]
    if has_changes and rank >= saved_world_size:
        rank = 0
    if saved_world_size != world_size and not has_changes:
        raise ValueError(
            f"The checkpoint {folder} was written by {saved_world_size} processes, but there are {world_size}: rows "
            f"and random states cannot be redistributed. Resume with {saved_world_size} processes, or start a new run "
            "from the adapters of the checkpoint (`load_adapters`)."
        )
    stem = Path(folder) / ROLLOUTS_NAME.format(rank=rank)
    state = json.loads(stem.with_suffix(".json").read_text(encoding="utf-8"))
    tensors = load_file(stem.with_suffix(".safetensors"))
    images = {name: restore_image(kind, tensors[f"image.{name}"]) for name, kind in state.get("images", {}).items()}
    slices = []
    for s, slice_state in enumerate(state["slices"] or []):
        rows = []
        for r, row_state in enumerate(slice_state.pop("rows")):
            names = [field.name for field in fields(Row) if f"{s}.{r}.{field.name}" in tensors]
            if row_state.get("sampled_by") is not None:
                row_state["sampled_by"] = SampledBy(*row_state["sampled_by"])
            row_state["images"] = tuple(images[name] for name in row_state.get("images", ()))
            rows.append(Row(**row_state, **{name: tensors[f"{s}.{r}.{name}"] for name in names}))
        slices.append(Slice(rows, **{**slice_state, "adapters": frozenset(slice_state["adapters"])}))
    return state["step"], None if state["slices"] is None else slices, state.get("extra", {})


BEST_NAME = "marft_best.safetensors"


class BestAdapters:
    """CPU copies of the weights and optimizer states of all trained adapters. There may be no optimizer yet."""

    def __init__(self, policies: Policies, get_optimizer: Callable[[], Any]):
        self._policies, self._get_optimizer = policies, get_optimizer
        self._weights: dict[str, list[torch.Tensor]] = {}
        self._state_copies: dict[str, list[dict[str, Any]]] = {}
        self.num_restored = 0  # counts each restored adapter

    @property
    def adapters(self) -> list[str]:
        return list(self._weights)

    @property
    def _optimizer_states(self) -> Any:
        optimizer = self._get_optimizer()
        return getattr(optimizer, "optimizer", optimizer).state if optimizer is not None else {}

    def capture(self) -> None:
        for name in self._policies.trained:
            parameters = list(self._policies.parameters(name).values())
            self._weights[name] = [_copy_to_cpu(parameter) for parameter in parameters]
            self._state_copies[name] = [
                {key: _copy_to_cpu(value) for key, value in self._optimizer_states.get(parameter, {}).items()}
                for parameter in parameters
            ]

    @torch.no_grad()
    def restore(self, adapter: str) -> None:
        self.num_restored += 1
        parameters = list(self._policies.parameters(adapter).values())
        copies = zip(parameters, self._weights[adapter], self._state_copies[adapter], strict=True)
        for parameter, weight, state_copy in copies:
            parameter.data.copy_(weight)
            current = self._optimizer_states.get(parameter)
            if current is None:
                continue
            # The optimizer may keep its step count on the CPU
            devices = {key: value.device for key, value in current.items() if isinstance(value, torch.Tensor)}
            current.clear()
            for key, value in state_copy.items():
                is_tensor = isinstance(value, torch.Tensor)
                current[key] = value.to(devices.get(key, parameter.device), copy=True) if is_tensor else value

    def save(self, folder: str | Path) -> None:
        saved: dict[str, Any] = {}  # as in `load`
        for name, weights in self._weights.items():
            for position, (weight, state_copy) in enumerate(zip(weights, self._state_copies[name], strict=True)):
                saved[f"{name}.{position}"] = weight
                saved |= {f"{name}.{position}.{key}": value for key, value in state_copy.items()}
        tensors = {key: value.contiguous() for key, value in saved.items() if isinstance(value, torch.Tensor)}
        scalars = {key: value for key, value in saved.items() if key not in tensors}
        save_file(tensors, Path(folder) / BEST_NAME, metadata={"plain": json.dumps(scalars)})

    def load(self, folder: str | Path) -> None:
        """Load the copies from a checkpoint. Adapters that are not in the checkpoint are skipped."""
        path = Path(folder) / BEST_NAME
        self._weights, self._state_copies = {}, {}
        if not path.is_file():
            return
        with safe_open(path, "pt") as file:
            saved: dict[str, Any] = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            saved |= json.loads((file.metadata() or {}).get("plain", "{}"))
        for name in self._policies.trained:
            count = len(self._policies.parameters(name))
            if f"{name}.0" not in saved:
                continue
            self._weights[name] = [saved[f"{name}.{position}"] for position in range(count)]
            self._state_copies[name] = [
                {key.split(".", 2)[2]: value for key, value in saved.items() if key.startswith(f"{name}.{position}.")}
                for position in range(count)
            ]


def _copy_to_cpu(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value


class Checkpoints:
    """Writes checkpoints that are valid only if they are complete, and loads what the `Trainer` does not save."""

    def __init__(
        self,
        team: TeamSetup,
        run: RunContext,
        stateful: Mapping[str, Stateful],
        schedule: Schedule,
        devices: Sequence[torch.device],  # with random states, other than the device of the process
        ref_model: nn.Module | None,
        settings: RunSettings,
        best: BestAdapters | None,
    ):
        self.best = best
        self.stateful = dict(stateful)
        self.folder = RunFolder(run.args.output_dir or ".")
        self.accepted = read_accepted(run.args.resume_changes)
        self._state, self._schedule, self._args, self._processes = run.state, schedule, run.args, run.processes
        self._ref_model, self._policies, self._critic = ref_model, team.policies, team.critic
        self._agents, self._anonymous, self._settings = team.agents, team.anonymous, settings
        self._random = RandomStates(run.processes.device, others=devices)
        self._recorded_step: dict[str, Any] | None = None
        self._log_window: dict[str, Any] | None = None

    @contextlib.contextmanager
    def saving(self, folder: Path) -> Iterator[None]:
        """Save a checkpoint within the context. It is valid once all processes have written their files."""
        run_folder = self.folder if folder.parent == self.folder.path else RunFolder(folder.parent)
        run_folder.run = self.folder.run or "unnamed"
        is_open = False
        try:
            with self._processes.failing_together():
                self._check_weights()
                if self._args.should_save:
                    run_folder.open(int(folder.name.rpartition("-")[2]))
                    is_open = True
            with self._processes.failing_together(), undisturbed():
                yield
            with self._processes.failing_together():
                if self._args.should_save:
                    run_folder.close(folder, self._settings.collect())
        except Exception as error:
            if is_open:
                run_folder.abandon(folder)
            newest_complete = run_folder.newest_complete()
            next_start = "No checkpoint of this run is complete, so the run starts from the beginning"
            if newest_complete is not None:
                next_start = f"The run resumes from {newest_complete}"
            removed = " The incomplete checkpoint was removed." if is_open else ""
            raise CheckpointError(
                f"Could not write {folder}: {type(error).__name__}: {error}. {next_start} if you start the same "
                f"command again with `resume_from_checkpoint=True`.{removed}"
            ) from error
        try:
            if self._args.should_save:
                run_folder.rotate(self._args.save_total_limit, self._state.best_checkpoint)
        except OSError as error:  # the new checkpoint is complete
            logger.warning(f"Could not remove an older checkpoint: {error}.")

    def _check_weights(self) -> None:
        for name in self._policies.trained:
            parameters = self._policies.parameters(name).items()
            not_finite = next((key for key, value in parameters if not value.detach().isfinite().all()), None)
            if not_finite is not None:
                raise FloatingPointError(
                    f"The weights of {name!r} are not finite ({not_finite}), so no checkpoint is saved. Lower the "
                    "learning rate and resume from an earlier checkpoint."
                )

    def save(self, folder: str | Path) -> None:
        """Save the state of this process to a checkpoint. Collective."""
        rank, world_size = self._args.process_index, self._args.world_size
        state = self._collect_state()
        save_rollouts(folder, rank, world_size, state["micro_step"], state["slices"], state["extra"])
        if self._args.sync_ref_model and self._args.should_save:
            save_references(self._policies, self._ref_model, folder)
        if self.best is not None and self.best.adapters and self._args.should_save:
            self.best.save(folder)

    def _collect_state(self) -> dict[str, Any]:
        is_used_up = self._schedule.is_due(self._state.micro_step)  # the next step samples new rows
        extra = {name: owner.state_dict() for name, owner in self.stateful.items()}
        extra["window"] = self._state.capture_log_window()
        slices = None if is_used_up else self._state.slices
        return {"micro_step": self._state.micro_step, "slices": slices, "extra": extra}

    def record_step(self) -> None:
        """Record the state, but not weights and optimizer, which do not change before the next update."""
        with undisturbed():
            state = self._collect_state()
            # Not copied, because they are large and never modified
            shared = (self._state.slices, state["extra"].get("user_randomness"))
            self._recorded_step = {
                "step": self._state.optimizer_step,
                "random": self._random.capture(),
                "tokens": self._state.num_tokens_seen,
                "entropy": self._state.entropy,
                "num_restored": self._num_restored,
                **copy.deepcopy(state, {id(value): value for value in shared}),
            }

    @property
    def _num_restored(self) -> int:
        return self.best.num_restored if self.best is not None else 0

    def record_after_log(self) -> None:
        if self._recorded_step is not None and self._recorded_step["step"] == self._state.optimizer_step:
            self.record_step()

    @property
    def step(self) -> int:
        return self._state.optimizer_step

    def has_current_checkpoint(self) -> bool:
        """`True` on all processes if there is a complete checkpoint of the current step."""
        newest_complete = self._processes.broadcast(self.folder.newest_complete() if self._args.should_save else None)
        return newest_complete is not None and newest_complete.name == f"checkpoint-{self._state.optimizer_step}"

    def discard_recorded_step(self) -> None:
        self._recorded_step = None

    def save_recorded_step(self, save: Callable[[], None]) -> bool:
        """Save the last complete step after a failure in the next. Returns whether it has a checkpoint."""
        recorded = self._recorded_step
        if recorded is None:
            return False
        if (recorded["step"], recorded["num_restored"]) != (self._state.optimizer_step, self._num_restored):
            return False  # the weights have changed since
        if self.has_current_checkpoint():
            return True
        self._random.restore(recorded["random"])
        self._state.micro_step, self._state.slices = recorded["micro_step"], recorded["slices"]
        self._state.count_tokens(recorded["tokens"] - self._state.num_tokens_seen)
        self._state.set_entropy(*recorded["entropy"])
        self._load_stateful(recorded["extra"])
        self.restore_log_window()
        save()
        return True

    def choose(self, resume_from_checkpoint: str | bool | Path | None) -> str | None:
        """Choose the checkpoint (`True`: the newest complete one), the same everywhere. Raises if it does not fit."""
        with self._processes.failing_together():
            for owner in self.stateful.values():
                owner.state_dict()  # fail before the first generation if a state cannot be saved
            chosen = self._choose(resume_from_checkpoint) if self._args.should_save else None
        chosen, self.accepted = self._processes.broadcast((chosen, self.accepted))
        return chosen

    def _choose(self, resume_from_checkpoint: str | bool | Path | None) -> str | None:
        if not resume_from_checkpoint:
            self.folder.start()
            return None
        if resume_from_checkpoint is True:
            newest = self.folder.newest()
            if newest is None:
                logger.warning(
                    f"Training starts from the beginning: there is no complete checkpoint in {self.folder.path}."
                )
                self.folder.start(is_intended=False)
                return None
            folder, commit = newest
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
                    f"The checkpoint {folder} does not exist. Pass `True` for the newest checkpoint in "
                    f"{self.folder.path}, or the path of a `checkpoint-<step>` folder."
                )
            if run_folder.has_commit(folder):
                commit = run_folder.verify(folder)
            else:
                commit = Commit("", -1)
                logger.warning(
                    f"{folder} has no {run_folder.COMMIT_NAME}, like checkpoints of earlier versions, so its files "
                    "cannot be verified."
                )
        self.check_settings(commit, folder)
        is_own = folder.resolve().parent == self.folder.path.resolve()
        if is_own and commit.run:
            self.folder.continue_run(commit.run, commit.step)
        else:
            self.folder.start()
        return str(folder)

    def check_settings(self, commit: Commit, folder: Path) -> None:
        """Raise if the structure of the run has changed since a checkpoint, and warn about all other changes."""
        saved, current = commit.settings, self._settings.collect()
        if not saved:
            return
        names, new_names = ({*part.get("agents", {}), *part.get("adapters", {})} for part in (saved, current))
        check_same_team(names, new_names, folder)
        with contextlib.suppress(ValueError):
            if self.accepted:
                check_structure(saved, current, (), "")  # raises if anything differs
                logger.warning(f"{folder.name} already has the changes in `resume_changes`, so they are ignored.")
                self.accepted = ()
        for line in check_structure(saved, current, self.accepted, folder):
            logger.warning(f"Changed since {folder.name}: {line}. The resumed run will not be bit-exact.")
        for name, old, now in tunables(saved, current):
            logger.warning(f"Changed since {folder.name}: `{name}` from {old} to {now}. The new value is used.")

    def load(self, folder: str | Path) -> None:
        if self._args.sync_ref_model:
            load_references(self._policies, self._ref_model, folder)
        if self.best is not None:
            self.best.load(folder)
        has_changes = bool(self.accepted)
        restored = load_rollouts(folder, self._args.process_index, self._args.world_size, has_changes)
        if restored is None:
            return
        self._state.micro_step, slices, extra = restored
        self._state.slices = None if has_changes else slices  # a changed run samples new rows
        self._load_stateful(extra)

    def _load_stateful(self, extra: dict[str, Any]) -> None:
        for name, owner in self.stateful.items():
            if name in extra:
                owner.load_state_dict(extra[name])
        self._log_window = extra.get("window")

    def restore_log_window(self) -> None:
        """Restore the metrics since the last log, which the `Trainer` clears after [`load`]."""
        if self._log_window is not None:
            self._state.restore_log_window(self._log_window)
            self._log_window = None

    def load_weights(self, folder: str | Path) -> None:
        """Load all adapters, in place. Raises `ValueError` if the team differs, or weights are not finite."""
        manifest, policies = TeamManifest.load(folder), self._policies
        if manifest.anonymous != self._anonymous:
            raise ValueError(
                f"The checkpoint {folder} was written with `anonymous={manifest.anonymous or False!r}`, but the "
                f"trainer has `anonymous={self._anonymous or False!r}`. Resume with the same value."
            )
        saved = {agent.name for agent in manifest.agents} | set(manifest.adapters)
        names = {agent.name for agent in self._agents} | set(policies.names) - {SHARED_POLICY}
        check_same_team(saved, names, folder)
        for name in policies.names:
            model = policies.models[name]
            if isinstance(model, PeftModel):
                load_adapter_weights(model, name, Path(folder) / name)
            elif model in policies.further:  # the Trainer has loaded the first base, if that is trained itself
                load_base_weights(model, name, Path(folder) / name)
            if not all(torch.isfinite(value.detach()).all() for value in policies.parameters(name).values()):
                raise ValueError(
                    f"The weights of the adapter {name!r} in {folder} are not finite. Resume from an earlier "
                    "checkpoint."
                )
        policies.restore_requires_grad()
        if self._critic is not None:
            self._critic.load(folder)


def raise_failed_push(jobs: Sequence[Any], repo: str | None, folder: str | None) -> None:
    """Raise if the upload of a checkpoint failed in the background."""
    for job in jobs:
        if job.done() and job.exception() is not None:
            raise RuntimeError(
                f"A checkpoint could not be pushed to {repo}: {job.exception()}. The files are in {folder}; push them "
                "again with `trainer.push_to_hub()`."
            ) from job.exception()


def _check_is_checkpoint(folder: Path) -> None:
    """Raise if a folder is a run folder or a saved team, neither of which has a state to resume from."""
    if not folder.is_dir() or (folder / TRAINER_STATE_NAME).exists():
        return
    checkpoints = sorted(folder.glob("checkpoint-*"), key=lambda path: (len(path.name), path.name))
    if checkpoints:
        raise ValueError(
            f"{folder} is the output folder of a run, not a checkpoint. Pass `True` for the newest checkpoint, or the "
            f"path of a checkpoint, such as {checkpoints[-1]}."
        )
    if (folder / MANIFEST_NAME).exists() and not run_folder.has_commit(folder):
        raise ValueError(
            f"{folder} is a saved team without an optimizer state, so it cannot be resumed. Start a new run from its "
            f"adapters: `model=load_adapters(base, {str(folder)!r})`."
        )
