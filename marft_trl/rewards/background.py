# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""A reward function as an asynchronous one."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Sequence


def in_background(reward: Callable[..., Sequence[float | None]]) -> Callable[..., Awaitable[Sequence[float | None]]]:
    """
    The reward function as a coroutine that runs in a thread of its own, so that TRL runs it beside the other
    asynchronous ones: `reward_funcs=[in_background(code_reward), in_background(math_reward)]`.
    """

    @functools.wraps(reward)
    async def later(**kwargs):
        return await asyncio.to_thread(reward, **kwargs)

    return later
