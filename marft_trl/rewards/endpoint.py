# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""A model behind an OpenAI-compatible endpoint, as a function of messages."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from ..system.redaction import for_log, without_secrets


if TYPE_CHECKING:
    import aiohttp


# Statuses after which a request is tried again: too many requests, conflicts, and faults of the server
_AGAIN = (408, 409, 425, 429, 500, 502, 503, 504)
_LONGEST_WAIT = 30.0  # seconds before a further try
_MOST_BYTES = 16 << 20  # of an answer
# Why an answer is truncated, by `finish_reason`
_CUT = {
    "length": "was truncated at the maximum length",
    "content_filter": "was truncated by the server's content filter",
}


class EndpointError(RuntimeError):
    """Raised if an endpoint does not answer, or answers without a text."""


class EndpointReply:
    """Asks a model for the next message of a conversation. [`endpoint_reply`] documents the arguments."""

    def __init__(
        self,
        base_url: str,
        model: str,
        api_key: str | None,
        timeout: float,
        tries: int,
        at_once: int,
        allow_cut: bool,
        settings: dict[str, Any],
    ):
        if not isinstance(base_url, str) or not base_url.startswith(("http://", "https://")):
            raise ValueError(f"`base_url` must begin with http:// or https://, got {base_url!r}.")
        if tries < 1 or at_once < 1 or not timeout > 0:
            raise ValueError(f"`tries`, `at_once` and `timeout` must be above 0, got {tries}, {at_once}, {timeout}.")
        self.base_url, self.model = base_url.rstrip("/"), model
        self._key, self._timeout, self._tries, self._settings = api_key, timeout, tries, settings
        self._at_once, self._allow_cut = at_once, allow_cut
        self._places: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()
        self.__name__ = "endpoint_reply"

    def __repr__(self) -> str:
        return f"endpoint_reply({without_secrets(self.base_url)!r}, {self.model!r})"

    def __deepcopy__(self, memo: dict) -> EndpointReply:
        return self  # it has no state but connections

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_places": None, "_key": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _places=WeakKeyDictionary())

    async def __call__(self, messages: Sequence[dict[str, Any]]) -> str:
        """Request the text of the next message. Raises `EndpointError` if the server rejects it or all tries fail."""
        import aiohttp

        loop = asyncio.get_running_loop()
        key = self._key or os.environ.get("OPENAI_API_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        body = {"model": self.model, "messages": list(messages), **self._settings}
        url, limit, why = f"{self.base_url}/chat/completions", aiohttp.ClientTimeout(total=self._timeout), ""
        async with self._places.setdefault(loop, asyncio.Semaphore(self._at_once)):
            for number in range(self._tries):
                wait = min(0.5 * 2**number, _LONGEST_WAIT)
                try:
                    async with (
                        aiohttp.ClientSession(headers=headers, timeout=limit) as session,
                        session.post(url, json=body, allow_redirects=False) as response,
                    ):
                        content = await self._read_content(response)
                        if response.status == 200:
                            return self._read_reply(json.loads(content))
                        if 300 <= response.status < 400:  # the messages and the key are for nobody else
                            to = response.headers.get("Location", "nowhere")
                            raise EndpointError(f"{self!r} redirects to {for_log(to, key)[:300]!r}. Set `base_url`.")
                        text = for_log(content[:4000].decode(errors="replace"), key)[:300]
                        why = f"status {response.status}: {text}"
                        if response.status not in _AGAIN:
                            break
                        wait = _seconds(response.headers.get("Retry-After"), wait)
                except (aiohttp.ClientError, TimeoutError, ValueError, RecursionError) as error:
                    why = f"{type(error).__name__}: {error}".rstrip(": ")
                if number + 1 < self._tries:
                    await asyncio.sleep(wait)
        raise EndpointError(f"{self!r} did not answer after {number + 1} tries. Last error: {for_log(why, key)}.")

    async def _read_content(self, response: aiohttp.ClientResponse) -> bytes:
        content = bytearray()
        async for part in response.content.iter_any():
            content += part
            if len(content) > _MOST_BYTES:
                raise EndpointError(f"{self!r} answered with more than {_MOST_BYTES} bytes.")
        return bytes(content)

    def _read_reply(self, answer: Any) -> str:
        try:
            choice = answer["choices"][0]
            text, end = choice["message"]["content"], choice.get("finish_reason")
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise EndpointError(f"{self!r} answered without a message: {for_log(str(answer)[:4000])[:300]}") from error
        if end in _CUT and not (end == "length" and self._allow_cut):
            fix = " Increase `max_tokens`, or set `allow_cut=True`." if end == "length" else ""
            raise EndpointError(f"The answer of {self!r} {_CUT[end]} (`finish_reason` {end!r}).{fix}")
        if not isinstance(text, str):
            raise EndpointError(f"{self!r} answered with {text!r} instead of a string.")
        return text


def endpoint_reply(
    base_url: str,
    model: str,
    api_key: str | None = None,
    timeout: float = 120.0,
    tries: int = 4,
    at_once: int = 16,
    allow_cut: bool = False,
    **settings: Any,
) -> EndpointReply:
    """
    A function that writes turns with a model behind an OpenAI-compatible endpoint, for `AgentSpec(reply=...)`: a
    frozen teammate, an opponent or a judge on another server.

    ```python
    AgentSpec("critic", reply=endpoint_reply("http://127.0.0.1:8000/v1", "Qwen/Qwen2.5-7B-Instruct", temperature=0))
    ```

    Args:
        base_url (`str`): base URL of the API, ending in `/v1` with most servers.
        model (`str`): name of the model.
        api_key (`str`, *optional*): key. Defaults to the environment variable `OPENAI_API_KEY`. It is neither saved
            nor logged.
        timeout (`float`, *optional*, defaults to `120.0`): seconds of a try.
        tries (`int`, *optional*, defaults to `4`): number of tries, with waits that double, or as long as the server
            asks for (`Retry-After`).
        at_once (`int`, *optional*, defaults to `16`): largest number of requests at a time.
        allow_cut (`bool`, *optional*, defaults to `False`): whether answers that are cut at `max_tokens`, or at the
            window of the model, are turns. They are errors otherwise, as are answers that a filter has cut.
        settings: further fields of requests, such as `temperature` and `max_tokens`.
    """
    return EndpointReply(base_url, model, api_key, timeout, tries, at_once, allow_cut, settings)


def _seconds(header: str | None, otherwise: float) -> float:
    try:
        return min(max(float(header or ""), 0.0), _LONGEST_WAIT)
    except ValueError:
        return otherwise
