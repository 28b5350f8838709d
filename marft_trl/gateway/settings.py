# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Address and limits of a gateway."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field


@dataclass(frozen=True)
class GatewaySettings:
    """
    Address and limits of a gateway.

    Args:
        name (`str`, *optional*, defaults to `"team"`): name of the team as a model.
        host (`str`, *optional*, defaults to `"127.0.0.1"`): address to listen at.
        port (`int`, *optional*, defaults to `8080`): port; 0 for any free one.
        api_key (`str`, *optional*): key that requests bring as `Authorization: Bearer ...`. Demanded unless the
            address is one of this machine alone.
        show_turns (`bool`, *optional*, defaults to `True`): whether answers have the turns of teammates.
        max_running (`int`, *optional*, defaults to `64`): largest number of answers that are written at a time.
        max_programs (`int`, *optional*, defaults to `8`): the same for a team whose answers start programs.
        max_waiting (`int`, *optional*, defaults to `256`): largest number of questions that wait for others to end.
            Further ones are refused with status 503.
        max_turns (`int`, *optional*, defaults to `64`): largest number of turns of an episode.
        timeout (`float`, *optional*, defaults to `600.0`): seconds after which a question is given up.
        max_body (`int`, *optional*, defaults to `1048576`): largest number of bytes of a request.
        grace (`float`, *optional*, defaults to `10.0`): seconds that questions have left when the gateway ends.

    Raises:
        ValueError: the address is reachable by others and there is no key, or a limit is out of range.
    """

    name: str = "team"
    host: str = "127.0.0.1"
    port: int = 8080
    api_key: str | None = field(default=None, repr=False)
    show_turns: bool = True
    max_running: int = 64
    max_programs: int = 8
    max_waiting: int = 256
    max_turns: int = 64
    timeout: float = 600.0
    max_body: int = 1 << 20
    grace: float = 10.0

    def __post_init__(self) -> None:
        if not self.is_loopback and not self.api_key:
            raise ValueError(
                f"`host={self.host!r}` can be reached by others, so an API key is needed: set the environment "
                "variable `MARFT_API_KEY`. Or leave `host` at '127.0.0.1', which only this machine reaches."
            )
        for name in ("max_running", "max_programs", "max_turns", "timeout", "max_body"):
            if not getattr(self, name) > 0:
                raise ValueError(f"`{name}` must be above 0, got {getattr(self, name)!r}.")
        for name in ("max_waiting", "grace"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"`{name}` must be at least 0, got {getattr(self, name)!r}.")
        if not 0 <= self.port < 65536:
            raise ValueError(f"`port` must be from 0 to 65535, got {self.port!r}.")

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the address."""
        return is_loopback(self.host)


def is_loopback(host: str | None) -> bool:
    """Whether a host is this machine, by its address or as `localhost`. Other names may mean anything."""
    try:
        return ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return host == "localhost"
