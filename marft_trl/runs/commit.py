# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""
The commit of a checkpoint: a file with the size and the SHA-256 of every other file, written last. A checkpoint
without a valid commit was cut short or damaged.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..system.files import sync_folder, write_atomically


COMMIT_NAME = "marft_commit.json"
# The commit of a checkpoint that is being written or removed
OPEN_NAME = "marft_commit.json.open"
FORMAT = 1
_CHUNK = 1 << 22


class DamagedCheckpoint(ValueError):
    """Raised for a checkpoint that is incomplete or damaged. The message names the file and what is wrong with it."""


class CheckpointError(RuntimeError):
    """Raised when a checkpoint cannot be written. The message says which checkpoint stands and how to go on."""


@dataclass(frozen=True)
class Commit:
    """
    Contents of the commit of a checkpoint.

    Args:
        run (`str`): id of the run that wrote the checkpoint.
        step (`int`): number of optimizer steps.
        files (`dict[str, list]`): size in bytes and SHA-256 of each file, by its path in the checkpoint.
        settings (`dict`): what decides the results of the run, see [`~marft_trl.runs.changes`].
    """

    run: str
    step: int
    files: dict[str, list] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)


def begin(folder: str | Path, run: str, step: int) -> None:
    """Mark a new folder as a checkpoint that is being written. Without a commit, it is a remainder that may go."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / OPEN_NAME, _serialized(Commit(run, step)))


def commit(folder: str | Path, run: str, step: int, settings: Mapping[str, Any]) -> Commit:
    """
    Complete a checkpoint. All its files are made durable before the commit appears under its name.

    Args:
        folder (`str` or `Path`): folder of the checkpoint, with all files of all processes.
        run (`str`): id of the run.
        step (`int`): number of optimizer steps.
        settings (`Mapping[str, Any]`): what decides the results; JSON-serializable.
    """
    folder = Path(folder)
    files = {}
    for path in _files_of(folder):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
        files[path.relative_to(folder).as_posix()] = [path.stat().st_size, _sha256(path)]
    for inner in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
        sync_folder(inner)
    done = Commit(run, step, files, json.loads(json.dumps(settings)))
    write_atomically(folder / COMMIT_NAME, _serialized(done))
    (folder / OPEN_NAME).unlink(missing_ok=True)
    sync_folder(folder.parent)
    return done


def read_commit(folder: str | Path) -> Commit:
    """
    Read the commit of a checkpoint, without a look at the other files.

    Raises:
        DamagedCheckpoint: there is no commit, or it was changed.
    """
    return _read(Path(folder) / COMMIT_NAME)


def verify(folder: str | Path) -> Commit:
    """
    Check every file of a checkpoint against its commit.

    Raises:
        DamagedCheckpoint: a file is missing or differs, or there is no commit.
    """
    folder = Path(folder)
    commit_ = read_commit(folder)
    try:
        _check_files(folder, commit_)
    except OSError as error:
        raise DamagedCheckpoint(f"{folder}: a file cannot be read ({error}).") from error
    return commit_


def _check_files(folder: Path, commit_: Commit) -> None:
    for name, (size, digest) in commit_.files.items():
        path = folder / name
        if not path.is_file():
            raise DamagedCheckpoint(f"{folder}: {name} is missing.")
        actual = path.stat().st_size
        if actual != size:
            raise DamagedCheckpoint(f"{folder}: {name} has {actual} bytes, but {size} were written.")
        if _sha256(path) != digest:
            raise DamagedCheckpoint(f"{folder}: {name} is not what was written (its SHA-256 differs).")


def is_remainder(folder: str | Path, run: str) -> bool:
    """`True` for what a killed run has left of a checkpoint that it was writing or removing."""
    folder = Path(folder)
    if (folder / COMMIT_NAME).exists():
        return False
    try:
        return _read(folder / OPEN_NAME).run == run
    except DamagedCheckpoint:
        return False


def remove(folder: str | Path) -> None:
    """Remove a checkpoint. Its commit goes first, so that a kill leaves a remainder, not a damaged checkpoint."""
    folder = Path(folder)
    if (folder / COMMIT_NAME).exists():
        os.replace(folder / COMMIT_NAME, folder / OPEN_NAME)
        sync_folder(folder)
    later = [path for path in folder.iterdir() if path.name != OPEN_NAME]
    for path in later:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    shutil.rmtree(folder)


def _files_of(folder: Path) -> list[Path]:
    own = {folder / COMMIT_NAME, folder / OPEN_NAME}
    return sorted(path for path in folder.rglob("*") if path.is_file() and path not in own)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        read: Callable[[], bytes] = lambda: file.read(_CHUNK)  # noqa: E731
        for chunk in iter(read, b""):
            digest.update(chunk)
    return digest.hexdigest()


def _serialized(commit_: Commit) -> str:
    """JSON with a hash of itself. There is one way to write it, so any change of the file is seen."""
    content = asdict(commit_)
    digest = hashlib.sha256(_compact(content).encode()).hexdigest()
    return _compact({"format": FORMAT, "sha256": digest, "content": content})


def _compact(data: Any) -> str:
    return json.dumps(data, sort_keys=True, ensure_ascii=True, separators=(",", ":"))


def _read(path: Path) -> Commit:
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
            raise DamagedCheckpoint(f"{path.parent}: {path.name} is not what was written.")
        return Commit(content["run"], content["step"], content["files"], content["settings"])
    except FileNotFoundError:
        raise DamagedCheckpoint(
            f"{path.parent} has no {COMMIT_NAME}: it was cut short while it was written, or written without one."
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, DamagedCheckpoint):
            raise
        raise DamagedCheckpoint(f"{path.parent}: {path.name} cannot be read ({type(error).__name__}).") from error
