# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Connections of clients: accepted up to the limit on open files, also while silent ones are held open."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import socket
import time
from collections.abc import Iterator
from typing import Any

from ...system.files import spare_files
from .session import logger


BACKLOG = 1024
# Open files that are left to the rest of the process, and connections that are accepted in any case
_RESERVE, _FEWEST = 64, 24
# Seconds between two looks for room for a further connection, and before a further try where files are missing
_PAUSE, _AGAIN = 0.01, 0.2
_SILENT = 1.0  # seconds after which a connection without a valid request may have to make room


def files_to_use() -> int:
    """Number of files that connections, and what answers them, may open."""
    return (spare := spare_files()) - max(_RESERVE, spare // 8)


class Connections:
    """Accepts connections. The oldest silent one makes room for the next; servers of asyncio have no limit."""

    def __init__(self) -> None:
        self._most = max(_FEWEST, files_to_use() // 2)
        self._silent_since: dict[Any, float] = {}  # by transport; infinite while a request is answered

    async def accept(self, listening: socket.socket, server: Any) -> None:
        """Accept connections of a listening socket until canceled."""
        loop = asyncio.get_running_loop()
        listening.setblocking(False)
        while True:
            try:
                connection, _ = await loop.sock_accept(listening)
                transport, _ = await loop.connect_accepted_socket(server, connection)
            except OSError:
                logger.exception("Failed to accept a connection.")
                await asyncio.sleep(_AGAIN)
                continue
            self._silent_since[transport] = time.monotonic()
            while len(self._open()) > self._most:
                oldest = min(self._silent_since, key=self._silent_since.__getitem__)
                if time.monotonic() - self._silent_since[oldest] > _SILENT:
                    oldest.abort()
                else:  # further clients wait in the backlog
                    await asyncio.sleep(_PAUSE)

    def _open(self) -> dict[Any, float]:
        for closed in [connection for connection in self._silent_since if connection.is_closing()]:
            del self._silent_since[closed]
        return self._silent_since

    @contextlib.contextmanager
    def answering(self, transport: Any) -> Iterator[None]:
        """Mark a connection as active within the context."""
        if transport in self._silent_since:  # else its client is gone already
            self._silent_since[transport] = math.inf
        try:
            yield
        finally:
            if transport in self._silent_since:
                self._silent_since[transport] = time.monotonic()  # until its client has closed it


async def listen(host: str, port: int) -> list[socket.socket]:
    """Listen on all addresses of a host."""
    hints: dict[str, Any] = {"type": socket.SOCK_STREAM, "flags": socket.AI_PASSIVE}
    infos = await asyncio.get_running_loop().getaddrinfo(host, port, **hints)
    sockets: list[socket.socket] = []
    missing: OSError | None = None
    with contextlib.ExitStack() as opened:
        for family, address in dict.fromkeys((family, address) for family, _, _, _, address in infos):
            if sockets and port == 0:  # a free port of the first address
                break
            try:
                listening = socket.create_server(address[:2], family=family, backlog=BACKLOG)
                sockets.append(opened.enter_context(listening))
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):  # a machine without IPv6
                    raise
                missing = error
        opened.pop_all()  # they stay open
    if missing is not None and not sockets:
        raise missing
    return sockets
