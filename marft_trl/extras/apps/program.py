# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Applications that are programs: started for an episode, and terminated with all processes that they started."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import shutil
import signal
import string
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import psutil

from ...episodes.images import text_of
from ...system.child_processes import keep, kill_group, let_go, started_by
from ...system.redaction import for_log
from .session import AppEndpoint, folder_name


_KEPT = 20_000  # maximum number of characters that are kept of each output stream of a program, from its end
_TOLD = 1500  # maximum number of characters of a stream in messages
_OF_SHELLS = ("|", ">", ">>", "<", "&&", "||", ";", "&")  # tokens that have a meaning in shells only
# Seconds that a program has to end after SIGTERM, and that its output may arrive after its end
_GRACE, _LATE = 2.0, 0.2
# Variables of processes that a launcher started, which an application is not
_OF_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")
# Not inherited either: a credential that a client would send instead of the key, and a folder that is not its own
_NOT_INHERITED = (*_OF_LAUNCHERS, "ANTHROPIC_AUTH_TOKEN", "OLDPWD")


@dataclass(frozen=True)
class AppResult:
    """
    Result of an application in an episode.

    Args:
        output (`str`): end of the standard output.
        errors (`str`): end of the standard error stream.
        status (`int`, *optional*): exit status; negative if a signal terminated the program. `None` for a function.
        value (`Any`): what a function returned.
        left (`int`): number of processes that the program left running, which were terminated.
        cwd (`str`, *optional*): folder that a program ran in. A copy is removed together with this object.
    """

    output: str = ""
    errors: str = ""
    status: int | None = None
    value: Any = None
    left: int = 0
    cwd: str | None = None
    copy: Any = field(default=None, repr=False, compare=False)  # which keeps a copied folder

    @property
    def problem(self) -> str | None:
        """Why the episode failed; `None` if it did not."""
        if not self.status:
            return None
        name = signal.Signals(-self.status).name if self.status < 0 else ""
        how = f"was terminated by {name}" if self.status < 0 else f"exited with status {self.status}"
        return f"the application {how}" + (f". Output: {self.said}" if self.said else " without any output")

    @property
    def said(self) -> str:
        """The end of both output streams, without secrets and control characters."""
        return "\n".join(filter(None, (for_log(text).strip()[-_TOLD:] for text in (self.output, self.errors))))


@dataclass(frozen=True)
class Program:
    """
    A command, with a folder, environment variables or standard input for its process:
    `ExternalApp(Program("my-harness --task={prompt}", cwd="task"))`.

    Args:
        command (`str` or `Sequence[str]`):
            The program and its arguments. `{column}` is a value of the row, `{base_url}` and `{api_key}` are those of
            the endpoint, and `{cwd}` is the folder that the program runs in. No shell parses it.
        cwd (`str`, *optional*):
            Folder of the program. Each episode runs in its own copy, so that no episode finds what another one wrote.
            The copy is `AppResult.cwd` for reward functions, and removed afterwards. Without `cwd`, all episodes run
            in the current folder of the trainer.
        copy_cwd (`bool`, *optional*, defaults to `True`):
            Whether each episode runs in a copy of `cwd`, or all of them in `cwd` itself.
        env (`Mapping[str, str]`, *optional*):
            Further environment variables, filled in like the command: `{"HOME": "{cwd}"}`.
        stdin_columns (`Sequence[str]`, *optional*):
            Columns of the row that the program finds as a JSON object on its standard input, which is empty by
            default: many programs append it to what they send to a model. Do not list columns that only rewards need.
    """

    command: str | Sequence[str]
    cwd: str | os.PathLike | None = None
    copy_cwd: bool = True
    env: Mapping[str, str] = field(default_factory=dict)
    stdin_columns: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.command, (str, list, tuple)) or not all(isinstance(part, str) for part in self.command):
            raise TypeError(f"`command` of `Program` must be a string or a list of strings, got {self.command!r}.")
        split_command(self.command)
        if self.cwd is not None and not (isinstance(self.cwd, (str, os.PathLike)) and os.path.isdir(self.cwd)):
            raise ValueError(f"`cwd` of `Program` must be an existing folder, got {str(self.cwd)!r}.")
        if not isinstance(self.env, Mapping) or not all(isinstance(text, str) for text in self.env.values()):
            raise TypeError(f"`env` of `Program` must have strings by name, got {self.env!r}.")
        columns = self.stdin_columns or []
        if isinstance(columns, str) or not all(isinstance(column, str) for column in columns):
            raise TypeError(f"`stdin_columns` of `Program` must have strings, got {columns!r}.")

    async def run(self, row: Mapping[str, Any], endpoint: AppEndpoint) -> AppResult:
        """Run the command for an episode. Cancellation terminates it."""
        return await run_program(await asyncio.to_thread(self.prepare, row, endpoint), endpoint)  # may copy a folder

    def prepare(self, row: Mapping[str, Any], endpoint: AppEndpoint) -> Launch:
        """Fill in the command and the variables. A copy of the folder exists for as long as the returned object."""
        prompt = row["prompt"]
        if isinstance(prompt, list) and prompt and isinstance(prompt[-1], dict):
            prompt = text_of(prompt[-1].get("content"))
        if "cwd" in row and any("{cwd}" in text for text in (*split_command(self.command), *self.env.values())):
            raise ValueError("`{cwd}` is the folder of the program, and the dataset has a column `cwd`. Rename it.")
        folder = os.fspath(self.cwd) if self.cwd is not None else os.getcwd()
        copy = _FolderCopy(folder, folder_name(endpoint.api_key)) if self.cwd is not None and self.copy_cwd else None
        cwd = copy.path if copy is not None else folder
        values = {**row, "prompt": prompt, "base_url": endpoint.base_url, "api_key": endpoint.api_key, "cwd": cwd}
        texts = {name: v if isinstance(v, str) else json.dumps(v, default=str) for name, v in values.items()}
        plain = {name: text.replace("\0", "") for name, text in texts.items()}
        text = ""
        try:
            arguments = [_Plain().vformat(part, (), plain) for part in split_command(self.command)]
            variables = {name: _Plain().vformat(text, (), plain) for name, text in self.env.items()}
            if self.stdin_columns is not None:
                text = json.dumps({name: row[name] for name in self.stdin_columns}, default=str)
        except KeyError as error:
            known = ", ".join(map(repr, row))
            raise ValueError(
                f"The command, `env` or `stdin_columns` contains {error.args[0]!r}, which is not a column of the row. "
                f"Use one of {known}, or in the command and `env` `base_url`, `api_key` or `cwd`. Write `{{{{` and "
                "`}}` for braces."
            ) from error
        return Launch(arguments, {**endpoint.variables, **variables}, cwd, text, copy)


class _FolderCopy:
    """A temporary copy of a folder, which is removed with this object, or when the process ends."""

    def __init__(self, source: str, name: str):
        top = os.path.join(tempfile.gettempdir(), name)
        os.mkdir(top, 0o700)
        self.path = os.path.join(top, os.path.basename(os.path.abspath(source)) or "cwd")
        weakref.finalize(self, shutil.rmtree, top, ignore_errors=True)
        shutil.copytree(source, self.path, symlinks=True, ignore=_not_copied)


def _not_copied(folder: str, names: list[str]) -> list[str]:
    """Sockets and pipes, which belong to other programs, and the copies themselves."""

    def is_left_out(path: str) -> bool:
        is_copy = os.path.realpath(path).startswith(os.path.join(os.path.realpath(tempfile.gettempdir()), "marftapp"))
        return is_copy or not (os.path.islink(path) or os.path.isfile(path) or os.path.isdir(path))

    return [name for name in names if is_left_out(os.path.join(folder, name))]


@dataclass(frozen=True)
class Launch:
    """A program that is about to start: arguments, further variables, folder, and text of its standard input."""

    arguments: Sequence[str]
    variables: Mapping[str, str]
    cwd: str
    stdin: str = ""
    copy: _FolderCopy | None = None


def split_command(command: str | Sequence[str]) -> list[str]:
    """Split a command into arguments, and check that it needs no shell and that its fields are valid."""
    try:
        parts = shlex.split(command) if isinstance(command, str) else list(command)
        for part in parts:
            list(string.Formatter().parse(part))
    except ValueError as error:
        raise ValueError(f"The command {command!r} cannot be parsed: {error}.") from error
    shells = [part for part in parts if part in _OF_SHELLS or part.startswith("$")] if isinstance(command, str) else []
    if shells or not parts:
        problem = f"is not run by a shell, so {shells[0]!r} would be an argument" if shells else "is empty"
        raise ValueError(
            f"The command {command!r} {problem}. Pass a program and its arguments, or `['bash', '-c', '...']`, which "
            "runs values of the row as code."
        )
    # No value of a row may be parsed as an option, or name the program, whatever it starts with
    are_values = False  # after `--`
    for number, part in enumerate(parts):
        before, column, *_ = next(iter(string.Formatter().parse(part)), ("", None))
        is_of_row = column is not None and column not in ("base_url", "api_key", "cwd")
        if is_of_row and not before.strip("-") and not are_values:
            option = parts[number - 1] if number and parts[number - 1].startswith("-") else f"--{column}"
            raise ValueError(
                f"An argument of the command {command!r} starts with {{{column}}}, so the program would parse a value "
                f"such as `--output=x` as an option. Write `{option}={part}`, put `--` before positional arguments, "
                f"or pass the value on standard input with `stdin_columns=[{column!r}]`."
            )
        are_values = part == "--" or (are_values and is_of_row)  # `--` of a launcher ends before its program
    return parts


class _Plain(string.Formatter):
    """Formatter with names only: `{prompt}`, not `{prompt.attribute}`."""

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> tuple[Any, str]:
        return kwargs[field_name], field_name


async def run_program(launch: Launch, endpoint: AppEndpoint) -> AppResult:
    """Run a program. Cancellation terminates it."""
    variables = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
    variables |= {"PWD": os.path.abspath(launch.cwd), **launch.variables}
    loop, options = asyncio.get_running_loop(), cast(Any, {"cwd": launch.cwd, "start_new_session": True})
    start = asyncio.ensure_future(loop.subprocess_exec(_Listener, *launch.arguments, env=variables, **options))
    try:
        transport, heard = await asyncio.shield(start)
    except asyncio.CancelledError:  # asyncio would kill the program alone, and nothing that it has started
        with contextlib.suppress(OSError):  # it did not start
            transport, heard = await start
            await _end(transport.get_pid(), heard, endpoint.api_key)
            transport.close()
        raise
    pid = transport.get_pid()
    keep(endpoint.api_key, pid)
    try:
        stdin: Any = transport.get_pipe_transport(0)
        stdin.write(launch.stdin.encode())  # which a program need not read
        stdin.write_eof()
        await heard.has_ended.wait()
        with contextlib.suppress(TimeoutError):  # others may have inherited its output
            async with asyncio.timeout(_LATE):
                await heard.is_silent.wait()
    finally:
        left = await _end(pid, heard, endpoint.api_key)
        let_go(endpoint.api_key)
        transport.close()
    status, copy = transport.get_returncode(), launch.copy
    return AppResult(heard.text(1), heard.text(2), status, left=left, cwd=launch.cwd, copy=copy)


class _Listener(asyncio.SubprocessProtocol):
    """Keeps the end of the output of a program, and records when it exits."""

    def __init__(self) -> None:
        self._kept = {1: b"", 2: b""}
        self._open = set(self._kept)
        # The exit of the program itself: `Process.wait` also waits for processes that inherited its output
        self.has_ended, self.is_silent = asyncio.Event(), asyncio.Event()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self._kept[fd] = (self._kept[fd] + data)[-4 * _KEPT :]

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        self._open.discard(fd)
        if not self._open:
            self.is_silent.set()

    def process_exited(self) -> None:
        self.has_ended.set()

    def text(self, fd: int) -> str:
        return self._kept[fd].decode("utf-8", "replace")[-_KEPT:]


async def _end(pid: int, heard: _Listener, secret: str) -> int:
    """Terminate a program and all processes with its key. Returns how many of them the program itself left running."""
    was_running = not heard.has_ended.is_set()
    left = await asyncio.to_thread(started_by, pid, secret)
    if was_running:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    if left:
        _, stubborn = await asyncio.to_thread(psutil.wait_procs, left, _GRACE)
        for process in stubborn:
            with contextlib.suppress(psutil.Error):
                process.kill()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_GRACE):
            await heard.has_ended.wait()
    kill_group(pid)
    await heard.has_ended.wait()
    return 0 if was_running else len(left)
