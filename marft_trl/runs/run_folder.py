# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""The output folder of a run: who uses it, when a checkpoint is complete, and which ones are deleted."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import logging
import os
import shutil
import socket
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ..system.files import sync_folder, write_atomically


logger = logging.getLogger(__name__)

COMMIT_NAME = "marft_commit.json"
OPEN_NAME = "marft_commit.json.open"  # the commit of a checkpoint that is being written or removed
FORMAT = 1


class DamagedCheckpoint(ValueError):
    """Raised for a checkpoint that is incomplete or damaged. The message names the file and what is wrong with it."""


class CheckpointError(RuntimeError):
    """Raised when a checkpoint cannot be written. The message says which checkpoint stands and how to go on."""


@dataclass(frozen=True)
class Commit:
    run: str  # id of the run that wrote the checkpoint
    step: int
    files: dict[str, list] = field(default_factory=dict)  # size in bytes and SHA-256, by path in the checkpoint
    settings: dict[str, Any] = field(default_factory=dict)  # what decides the results, see `RunSettings`


def begin(folder: Path, run: str, step: int) -> None:
    """Mark a new folder as a checkpoint that is being written. Without a commit, it is a remainder that may go."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / OPEN_NAME, _serialized(Commit(run, step)))


def commit(folder: Path, run: str, step: int, settings: Mapping[str, Any]) -> None:
    """Complete a checkpoint of all processes. Its files are made durable before the commit appears under its name."""
    files, commits = {}, {folder / COMMIT_NAME, folder / OPEN_NAME}
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path not in commits):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
        files[path.relative_to(folder).as_posix()] = [path.stat().st_size, _sha256(path)]
    for inner in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
        sync_folder(inner)
    write_atomically(folder / COMMIT_NAME, _serialized(Commit(run, step, files, json.loads(json.dumps(settings)))))
    (folder / OPEN_NAME).unlink(missing_ok=True)
    sync_folder(folder.parent)


def has_commit(folder: Path) -> bool:
    """`True` for a complete checkpoint, and for one that is being written or removed."""
    return (folder / COMMIT_NAME).exists() or (folder / OPEN_NAME).exists()


def verify(folder: Path) -> Commit:
    """Check every file of a checkpoint against its commit. Raises `DamagedCheckpoint`."""
    commit_ = read_commit(folder)
    try:
        for name, (size, digest) in commit_.files.items():
            path = folder / name
            if not path.is_file():
                raise DamagedCheckpoint(f"{folder}: {name} is missing.")
            actual = path.stat().st_size
            if actual != size:
                raise DamagedCheckpoint(f"{folder}: {name} has {actual} bytes, but {size} were written.")
            if _sha256(path) != digest:
                raise DamagedCheckpoint(f"{folder}: {name} has changed since it was written (its SHA-256 differs).")
    except OSError as error:
        raise DamagedCheckpoint(f"{folder}: a file cannot be read ({error}).") from error
    return commit_


def is_remainder(folder: Path, run: str) -> bool:
    """`True` for what a killed run has left of a checkpoint that it was writing or removing."""
    with contextlib.suppress(DamagedCheckpoint):
        return not (folder / COMMIT_NAME).exists() and read_commit(folder, OPEN_NAME).run == run
    return False


def remove(folder: Path) -> None:
    """Remove a checkpoint. Its commit goes first, so that a kill leaves a remainder, not a damaged checkpoint."""
    if (folder / COMMIT_NAME).exists():
        os.replace(folder / COMMIT_NAME, folder / OPEN_NAME)
        sync_folder(folder)
    for path in [path for path in folder.iterdir() if path.name != OPEN_NAME]:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    shutil.rmtree(folder)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _serialized(commit_: Commit) -> str:
    """JSON with a hash of itself. There is one way to write it, so any change of the file is seen."""
    content = asdict(commit_)
    digest = hashlib.sha256(_compact(content).encode()).hexdigest()
    return _compact({"format": FORMAT, "sha256": digest, "content": content})


def _compact(data: Any) -> str:
    return json.dumps(data, sort_keys=True, ensure_ascii=True, separators=(",", ":"))


def read_commit(folder: Path, name: str = COMMIT_NAME) -> Commit:
    """Read a commit, but no other file. Raises `DamagedCheckpoint` if there is none, or if it was changed."""
    path = folder / name
    try:
        text = path.read_bytes().decode("ascii")
        data = json.loads(text)
        if data["format"] != FORMAT:
            raise DamagedCheckpoint(
                f"{path} has format {data['format']!r}; this version of marft_trl reads format {FORMAT}. Resume with "
                "the version that wrote it."
            )
        content = data["content"]
        digest = hashlib.sha256(_compact(content).encode()).hexdigest()
        if data["sha256"] != digest or _compact(data) != text:
            raise DamagedCheckpoint(f"{path.parent}: {path.name} has changed since it was written.")
        return Commit(content["run"], content["step"], content["files"], content["settings"])
    except FileNotFoundError:
        raise DamagedCheckpoint(
            f"{path.parent} has no {COMMIT_NAME}: writing was interrupted, or the checkpoint was written without it."
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, DamagedCheckpoint):
            raise
        raise DamagedCheckpoint(f"{path.parent}: {path.name} cannot be read ({type(error).__name__}).") from error


RUN_NAME = "_marft_run.json"  # names that begin with `_` are not uploaded to the Hub
LOCK_NAME = "_marft_run.lock"
# Seconds after which a file that one node has written is seen by another, on slow network file systems
_SEEN_WITHIN = 10.0
_PREFIX = "checkpoint-"
# A checkpoint that is written again keeps the previous folder under this name until the new one is complete
_KEPT = "_previous-checkpoint-"
_ASIDE = "_aside-"  # a checkpoint after the step that the run has resumed from


# A lock that is only a file would stay after a kill; versions of filelock that know of it can do without
_HAS_SOFT_LOCK = "fallback_to_soft" in inspect.signature(FileLock.__init__).parameters
_WITHOUT_SOFT_LOCK: dict[str, Any] = {"fallback_to_soft": False} if _HAS_SOFT_LOCK else {}


class RunFolder:
    """The output folder of a run. Checkpoints belong to the run whose id they bear."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.run = ""  # `start` and `continue_run` set it
        self._lock: FileLock | None = None
        self._held: tuple[int, int] | None = None  # device and inode of the locked file

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Lock the folder within the context, for one run. The system unlocks it when the process ends."""
        self.probe()
        self._take_lock()
        try:
            yield
        finally:
            self._release_lock()

    def _take_lock(self) -> None:
        self._lock = FileLock(str(self.path / LOCK_NAME), **_WITHOUT_SOFT_LOCK)
        try:
            self._lock.acquire(timeout=0)
            self._held = self._locked_file()
        except Timeout:
            facts = self._facts()
            holder = f"process {facts.get('pid')} on {facts.get('host')}, since {facts.get('since')}"
            raise CheckpointError(
                f"{self.path} is in use by another run ({holder if facts else 'unknown'}). Two runs in one folder "
                "would overwrite each other's checkpoints: wait for it, end it, or set another `output_dir`."
            ) from None
        except (OSError, NotImplementedError) as error:  # a file system without locks
            logger.warning(f"Could not lock {self.path} ({error}). Make sure that no other run writes into it.")

    def _release_lock(self) -> None:
        with contextlib.suppress(OSError):
            if self._lock is not None:
                self._lock.release()
        self._lock = self._held = None

    def _locked_file(self) -> tuple[int, int] | None:
        with contextlib.suppress(OSError):
            status = os.stat(self.path / LOCK_NAME)
            return status.st_dev, status.st_ino
        return None

    def _check_lock(self) -> None:
        """Lock the folder again if it was removed during the run, and the lock with it."""
        if self._held is None or self._locked_file() == self._held:
            return
        self._release_lock()
        self.probe()
        self._take_lock()
        what = "" if self.checkpoints() else ", together with all checkpoints so far"
        logger.warning(
            f"{self.path} or the {LOCK_NAME} in it was removed during the run{what}. The run continues and saves into "
            "the folder that has this name now."
        )

    def probe(self) -> None:
        """Write, rename and remove a file like a checkpoint, before training. Raises `CheckpointError`."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.path, prefix="_marft_probe", delete=False) as file:
                file.write(b"x")
                file.flush()
                os.fsync(file.fileno())
            renamed = Path(file.name + ".renamed")
            os.replace(file.name, renamed)
            renamed.unlink()
        except OSError as error:
            raise CheckpointError(
                f"The output folder {self.path} cannot be written to: {error}. Nothing has been trained. Free "
                "disk space, or set another `output_dir`."
            ) from error

    @contextlib.contextmanager
    def marked(self) -> Iterator[str]:
        """Keep a file in the folder within the context, and yield its name."""
        with tempfile.NamedTemporaryFile(dir=self.path, prefix="_marft_probe") as file:
            yield Path(file.name).name

    def check_mark(self, name: str) -> None:
        """Raise `CheckpointError` unless this process sees the file that another one has made with `marked`."""
        end = time.monotonic() + _SEEN_WITHIN
        while not any(entry.name == name for entry in self.path.glob("_marft_probe*")):
            if time.monotonic() > end:
                raise CheckpointError(
                    f"The output folder {self.path} on {socket.gethostname()} is not the one that the first process "
                    "of the run writes to. All processes write their part of a checkpoint into one folder: set "
                    "`output_dir` to a file system that all nodes share."
                )
            time.sleep(0.1)

    def check_space(self, needed: int) -> None:
        """Warn if the disk has no room for two checkpoints of `needed` bytes: one that stands and a new one."""
        free = shutil.disk_usage(self.path).free
        if free < 2 * needed:
            logger.warning(
                f"{self.path} has {free / 1e6:.0f} MB left, and a checkpoint needs about {needed / 1e6:.0f} MB. "
                "Saving may fail. Free disk space, or set `output_dir` to a folder on a larger disk."
            )

    def start(self, is_intended: bool = True) -> None:
        """Begin a new run, as the user asked (`is_intended`) or because there was nothing to resume from."""
        others = [folder.name for folder in self.checkpoints()]
        if others and is_intended:
            logger.warning(
                f"{self.path} has checkpoints of an earlier run ({', '.join(others)}). Training starts at step 1 and "
                "replaces checkpoints of the same steps. Call `train(resume_from_checkpoint=True)` to resume from "
                "them, or set another `output_dir` to keep them."
            )
        self.run = uuid.uuid4().hex
        self._write_facts(self.known_run())  # the folder is the new run's when it has a checkpoint

    def continue_run(self, run: str, step: int | None = None) -> None:
        """Continue the run with this id. Its checkpoints after `step`, which may be damaged, are renamed."""
        self.run = run
        self._write_facts(run)
        for folder in self.checkpoints() if step is not None else []:
            if (_parse_step(folder) or 0) > (step or 0) and self._is_own(folder):
                aside = folder.with_name(f"{_ASIDE}{folder.name}")
                shutil.rmtree(aside, ignore_errors=True)
                os.replace(folder, aside)
                logger.warning(f"Renamed {folder.name} to {aside.name}, because the run resumes from step {step}.")

    def _write_facts(self, run: str | None) -> None:
        facts = {"id": run, "host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%F %T")}
        write_atomically(self.path / RUN_NAME, json.dumps(facts) + "\n")

    def known_run(self) -> str | None:
        return self._facts().get("id")

    def _facts(self) -> dict[str, Any]:
        try:
            facts = json.loads((self.path / RUN_NAME).read_text(encoding="utf-8"))
            return facts if isinstance(facts, dict) else {}
        except (OSError, ValueError):
            return {}

    def checkpoints(self) -> list[Path]:
        """Folders of checkpoints, complete or not, in the order of their steps."""
        folders = [path for path in self.path.glob(f"{_PREFIX}*") if path.is_dir() and _parse_step(path) is not None]
        return sorted(folders, key=lambda folder: _parse_step(folder) or 0)

    def newest(self) -> tuple[Path, Commit] | None:
        """The newest intact checkpoint of the run that used the folder last. A line tells which ones are skipped."""
        self._put_back()
        run = self.known_run()
        for folder in reversed(self.checkpoints()):
            try:
                commit_ = verify(folder)
            except DamagedCheckpoint as problem:
                logger.warning(f"Skipped: {problem}")
                continue
            if run is not None and commit_.run != run:
                logger.warning(f"Skipped: {folder} belongs to another run. Pass its path to resume from it.")
                continue
            if commit_.step != _parse_step(folder):
                logger.warning(f"Skipped: {folder} holds step {commit_.step}; it was renamed or copied.")
                continue
            return folder, commit_
        return None

    def _put_back(self) -> None:
        """Restore the previous folder of a checkpoint that was being written again when the run was killed."""
        for kept in self.path.glob(f"{_KEPT}*"):
            folder = kept.with_name(kept.name.replace(_KEPT, _PREFIX, 1))
            try:
                verify(folder)
                shutil.rmtree(kept, ignore_errors=True)
            except DamagedCheckpoint:
                shutil.rmtree(folder, ignore_errors=True)
                os.replace(kept, folder)

    def open(self, step: int) -> Path:
        """Begin to write the checkpoint of a step. An older folder of this step is kept until it is complete."""
        self._check_lock()
        folder = self.path / f"{_PREFIX}{step}"
        kept = self.path / f"{_KEPT}{step}"
        shutil.rmtree(kept, ignore_errors=True)
        if is_remainder(folder, self.run):
            shutil.rmtree(folder)
        elif folder.exists():
            os.replace(folder, kept)
        try:
            begin(folder, self.run, step)
        except OSError:
            self.abandon(folder)
            raise
        return folder

    def close(self, folder: Path, settings: dict[str, Any]) -> None:
        step = _parse_step(folder)
        if step is None:
            raise ValueError(f"{folder} is not the folder of a checkpoint.")
        commit(folder, self.run, step, settings)
        if self.path.is_dir() and self.known_run() != self.run:
            self._write_facts(self.run)
        shutil.rmtree(self.path / f"{_KEPT}{step}", ignore_errors=True)

    def abandon(self, folder: Path) -> None:
        """Remove what a failed save has left, and put the folder of before back."""
        shutil.rmtree(folder, ignore_errors=True)
        kept = folder.with_name(folder.name.replace(_PREFIX, _KEPT, 1))
        if kept.exists():
            with contextlib.suppress(OSError):
                os.replace(kept, folder)

    def newest_complete(self) -> Path | None:
        """The newest complete checkpoint of this run, by its commit alone."""
        return next((folder for folder in reversed(self.checkpoints()) if self._is_own(folder)), None)

    def _is_own(self, folder: Path) -> bool:
        with contextlib.suppress(DamagedCheckpoint):
            return read_commit(folder).run == self.run
        return False

    def rotate(self, limit: int | None, best: str | Path | None = None) -> None:
        """Remove remainders, and the oldest checkpoints of this run but for `limit`, the best and the newest."""
        for folder in self.checkpoints():
            if is_remainder(folder, self.run):
                shutil.rmtree(folder, ignore_errors=True)
        if not limit or limit < 0:
            return
        own = [folder for folder in self.checkpoints() if self._is_own(folder)]
        kept = {folder for folder in own if best and folder.resolve() == Path(best).resolve()} | {*own[-1:]}
        spare = [folder for folder in own if folder not in kept]
        for folder in spare[: max(len(spare) - max(limit - len(kept), 0), 0)]:
            logger.info(f"Removing {folder}: `save_total_limit` is {limit}.")
            remove(folder)


def _parse_step(folder: Path) -> int | None:
    number = folder.name.removeprefix(_PREFIX)
    return int(number) if number.isdigit() and number.isascii() else None
