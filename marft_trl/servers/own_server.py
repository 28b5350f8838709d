# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""A vLLM server that a training process starts for itself, on the device that it trains on."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ..system.event_loop import run_coroutine
from ..system.keeper import keep, kill_group, let_go
from .server import EngineDownError, ServerDownError, VLLMServer


# Variables by which launchers tell a process its place. The server is no process of the run.
_OF_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
_PREFIXES = ("TORCHELASTIC_", "ROLE_", "ACCELERATE_", "FSDP_")
# Packages of the interpreter that trains are not those of the server's
_OF_PYTHON = ("PYTHONPATH", "PYTHONHOME")
# Seconds that it has to say whether it is well
_LOOK = 5.0
# Characters of the log that are shown if the server does not start
_MOST_SHOWN = 2000


class OwnServer:
    """
    A server of this process. It ends when this process does, in whatever way.

    Args:
        flags (`Callable`): `flags(port)` returns the arguments of vLLM's server.
        python (`str`): interpreter of an environment with vLLM.
        log (`Path`): file that the server's output is appended to.
        variables (`Mapping[str, str]`, *optional*): environment variables of the server.

    Attributes:
        url (`str`): its address, on this machine only.
        key (`str`): its API key, without which it answers nobody.
    """

    def __init__(
        self,
        flags: Callable[[int], Sequence[str]],
        python: str,
        log: Path,
        variables: Mapping[str, str] | None = None,
    ):
        port = _free_port()
        self.url, self.key, self._log = f"http://127.0.0.1:{port}", secrets.token_hex(16), log
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "ab") as output:
            self._process = subprocess.Popen(  # noqa: S603
                [python, *flags(port)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**_inherited(), **(variables or {}), "VLLM_API_KEY": self.key},
                start_new_session=True,
            )
        keep(f"server-{self._process.pid}", self._process.pid)
        self.close = weakref.finalize(self, _end, self._process)

    def wait(self, seconds: float) -> None:
        """
        Wait until it answers.

        Raises:
            EngineDownError: it has ended, or needs longer.
        """
        end = time.monotonic() + seconds
        while not run_coroutine(self._is_well):
            status = self._process.poll()
            if status is None and time.monotonic() < end:
                time.sleep(0.5)
                continue
            what = f"needed more than {seconds:g} seconds to start" if status is None else f"ended with {status}"
            self.close()
            raise EngineDownError(
                f"The vLLM server of this process (`vllm_mode='colocate'`) {what}. Its output is in {self._log} and "
                f"ends with:\n{self._end_of_log()}"
            )

    async def _is_well(self) -> bool:
        from aiohttp import ClientSession

        async with ClientSession() as session:
            try:
                await VLLMServer(self.url, session, _LOOK, self.key).check_health(_LOOK)
            except ServerDownError:
                return False
            return True

    def _end_of_log(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")[-_MOST_SHOWN:]


def _free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return opened.getsockname()[1]


def _inherited() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if name not in (*_OF_LAUNCHERS, *_OF_PYTHON) and not name.startswith(_PREFIXES)
    }


def _end(server: subprocess.Popen) -> None:
    """End a server, and engines of it that outlive it."""
    kill_group(server.pid)
    server.wait()
    let_go(f"server-{server.pid}")
