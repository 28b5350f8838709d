# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Asynchronous reward functions from synchronous ones."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Sequence


def in_background(reward: Callable[..., Sequence[float | None]]) -> Callable[..., Awaitable[Sequence[float | None]]]:
    """
    Make a reward function asynchronous. It runs in a thread, and TRL runs it concurrently with other asynchronous
    reward functions: `reward_funcs=[in_background(code_reward), in_background(math_reward)]`.
    """

    @functools.wraps(reward)
    async def later(**kwargs):
        return await asyncio.to_thread(reward, **kwargs)

    return later
