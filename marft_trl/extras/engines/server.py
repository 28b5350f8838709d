# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""vLLM servers over HTTP: requests to one and what its answers mean, and how a team uses several."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...system.event_loop import run_coroutine
from ...system.hints import brief
from ...system.redaction import for_log, without_secrets


logger = logging.getLogger(__name__)

# Number of tokens whose log-probabilities are compared; more than 20 need a flag of the server
_MOST_LIKELY = 20
# Largest part of an error text of a server that is shown
_MOST_SHOWN = 500


class EngineDownError(RuntimeError):
    """No server works. The message has the addresses, and what each answered last."""


class ServerDownError(ConnectionError):
    """A server does not answer, or not as one that works. Another one may."""


class AnswerError(RuntimeError):
    """A server answered, but not with a whole turn."""


class UnknownAdapterError(LookupError):
    """A server does not have an adapter, for example because it was restarted."""


class RefusedError(ValueError):
    """A server refused a request, and would refuse it again."""

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status


class GeneratedTurn(NamedTuple):
    ids: list[int]  # up to and including the token that ends the turn
    logps: list[float]  # in the distribution that the tokens were sampled from


@dataclass(frozen=True)
class GenerateRequest:
    adapter: str  # its name on the server
    prompt_ids: Sequence[int]
    max_tokens: int
    settings: Mapping[str, Any]  # sampling settings under vLLM's names, with the seed

    def body(self) -> dict[str, Any]:
        """The request of vLLM's `/v1/completions`."""
        return {
            "model": self.adapter,
            "prompt": list(self.prompt_ids),
            "max_tokens": self.max_tokens,
            "logprobs": 0,
            "return_token_ids": True,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            **self.settings,
        }


class VLLMServer:
    """A vLLM server, within one event loop. Clients of others are subclasses, the `kind` of [`ServerSettings`]."""

    key_variable = "VLLM_API_KEY"  # environment variable with the API key

    def __init__(self, url: str, session: Any, timeout: float, key: str | None = None):
        # `url` is shown in messages and is recorded with turns, so it has no secrets
        self.url, self._address, self._session, self._timeout = without_secrets(url), url, session, timeout
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    async def generate(
        self, request: GenerateRequest, on_tokens: Callable[[list[int]], None] | None = None
    ) -> GeneratedTurn:
        """Generate a turn. Raises a `ServerDownError`, `AnswerError`, `UnknownAdapterError` or `RefusedError`."""
        try:
            if on_tokens is None:
                answer = await self._post("/v1/completions", request.body(), self._timeout)
            else:
                answer = await self._streamed(request.body(), on_tokens)
        except RefusedError as error:
            if error.status == 404:
                raise UnknownAdapterError(f"{self.url} does not have the adapter {request.adapter!r}.") from error
            raise
        return whole_turn(answer, request, self.url)

    async def next_token(
        self, adapter: str, prompt_ids: Sequence[int], temperature: float, timeout: float
    ) -> dict[int, float]:
        """
        Log-probabilities of the most likely next tokens after a prompt, by token id. `prompt_logprobs` would score
        whole texts, but on a CPU they end the engine (vLLM 0.32) if another request is computed at the same time.
        """
        body = {"model": adapter, "prompt": list(prompt_ids), "max_tokens": 1, "temperature": temperature, "seed": 0}
        limits = {"logprobs": _MOST_LIKELY, "return_tokens_as_token_ids": True, "top_p": 1.0, "top_k": 0}
        answer = await self._post("/v1/completions", {**body, **limits}, timeout)
        try:
            (texts,) = answer["choices"][0]["logprobs"]["top_logprobs"]
            logps = {int(token.removeprefix("token_id:")): float(value) for token, value in texts.items()}
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise AnswerError(f"{self.url} returned no log-probabilities: {_shown(str(answer))}") from error
        return dict(sorted(logps.items(), key=lambda pair: pair[1], reverse=True)[:_MOST_LIKELY])  # not the sampled

    async def load(self, name: str, folder: str, timeout: float) -> None:
        """Load an adapter from a folder. Raises a [`RefusedError`] if the server cannot load it."""
        try:  # what cannot be loaded is answered with 500
            await self._post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder}, timeout, down=501)
        except RefusedError as error:
            if "already been loaded" not in str(error):
                raise

    async def unload(self, name: str, timeout: float) -> None:
        """Forget the name of an adapter, if the server knows it."""
        with contextlib.suppress(RefusedError):
            await self._post("/v1/unload_lora_adapter", {"lora_name": name}, timeout)

    async def sleep(self, timeout: float) -> None:
        """Free the memory of the device. The weights of the base stay in main memory."""
        await self._request("POST", "/sleep?level=1", None, timeout)

    async def wake(self, timeout: float) -> None:
        await self._request("POST", "/wake_up", None, timeout)

    async def models(self, timeout: float) -> dict[str, dict[str, Any]]:
        """The base and the adapters that the server has, by name."""
        answer = await self._request("GET", "/v1/models", None, timeout)
        return {model["id"]: model for model in json.loads(answer)["data"]}

    async def max_loras(self, timeout: float) -> int | None:
        """Maximum number of adapters in a batch; `None` before the first request to an adapter."""
        for line in (await self._request("GET", "/metrics", None, timeout)).splitlines():
            if line.startswith("vllm:lora_requests_info{") and 'max_lora="' in line:
                return int(line.partition('max_lora="')[2].partition('"')[0])
        return None

    async def check_health(self, timeout: float) -> None:
        """Raise a [`ServerDownError`] unless the server responds that it is healthy."""
        await self._request("GET", "/health", None, timeout)

    async def _post(self, path: str, body: dict[str, Any], timeout: float, down: int = 500) -> dict[str, Any]:
        text = await self._request("POST", path, body, timeout, down)
        try:
            return json.loads(text)
        except ValueError:
            return {"message": text}

    async def _streamed(self, body: dict[str, Any], on_tokens: Callable[[list[int]], None]) -> dict[str, Any]:
        """Stream the tokens of an answer, and return it like an answer that arrives as a whole."""
        ids: list[int] = []
        logps: list[float] = []
        reason = None
        async with self._answer("POST", "/v1/completions", {**body, "stream": True}, self._timeout) as answer:
            async for line in answer.content:
                data = line.decode().strip().removeprefix("data:").strip()
                if not data or data == "[DONE]":
                    continue
                try:
                    part = json.loads(data)
                    if "error" in part:
                        raise AnswerError(f"{self.url} aborted a streamed turn: {_message(data)}")
                    for choice in part["choices"]:
                        new = choice["token_ids"] or []
                        logps += choice["logprobs"]["token_logprobs"] if new else []
                        ids, reason = ids + new, choice["finish_reason"] or reason
                        if new:
                            on_tokens(new)
                except (KeyError, TypeError, ValueError) as error:
                    raise AnswerError(f"{self.url} streamed an invalid turn: {_shown(data)}") from error
        return {"choices": [{"token_ids": ids, "logprobs": {"token_logprobs": logps}, "finish_reason": reason}]}

    async def _request(
        self, method: str, path: str, body: dict[str, Any] | None, timeout: float, down: int = 500
    ) -> str:
        """The text of an answer. A status of at least `down` is that of a server that does not work."""
        async with self._answer(method, path, body, timeout, down) as answer:
            return await answer.text()

    @contextlib.asynccontextmanager
    async def _answer(
        self, method: str, path: str, body: dict[str, Any] | None, timeout: float, down: int = 500
    ) -> AsyncIterator[Any]:
        """Send a request, and yield its answer, which has a status below 400."""
        from aiohttp import ClientError, ClientTimeout

        try:
            async with self._session.request(
                method, self._address + path, json=body, headers=self._headers, timeout=ClientTimeout(total=timeout)
            ) as answer:
                if answer.status >= 400:
                    problem = f"{self.url}{path} answered {answer.status}: {_message(await answer.text())}"
                    if answer.status >= down:
                        raise ServerDownError(problem)
                    if answer.status == 401:
                        problem = f"{self.url} needs an API key. Set the environment variable `{self.key_variable}`."
                    raise RefusedError(problem, answer.status)
                yield answer
        except ServerDownError:
            raise
        except TimeoutError as error:
            raise ServerDownError(f"{self.url}{path} did not answer within {timeout:g} seconds.") from error
        except (ClientError, OSError) as error:
            raise ServerDownError(f"{self.url}{path}: {type(error).__name__}: {for_log(str(error))}") from error


def whole_turn(answer: Mapping[str, Any], request: GenerateRequest, url: str) -> GeneratedTurn:
    """The turn in an answer of `/v1/completions`. Raises an `AnswerError` if it is incomplete or not finite."""
    try:
        (choice,) = answer["choices"]
        ids, logps, reason = choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["finish_reason"]
        generated = GeneratedTurn([int(index) for index in ids], [float(value) for value in logps])
    except (KeyError, TypeError, ValueError) as error:
        raise AnswerError(f"{url} returned no turn: {_shown(str(answer))}") from error
    wrong = None
    if reason not in ("stop", "length"):
        wrong = f"it has the finish reason {reason!r}"
    elif len(generated.ids) != len(generated.logps):
        wrong = f"it has {len(generated.ids)} tokens and {len(generated.logps)} log-probabilities"
    elif not all(map(math.isfinite, generated.logps)):
        wrong = "it has a log-probability that is not a number"
    elif reason == "length" and len(generated.ids) != request.max_tokens:
        wrong = (
            f"it ended after {len(generated.ids)} of {request.max_tokens} tokens, because the "
            f"{len(request.prompt_ids)} tokens of the prompt leave too little room in the server's `--max-model-len`"
        )
    elif not generated.ids:
        wrong = "it has no tokens"
    if wrong is not None:
        raise AnswerError(f"{url} returned an incomplete turn for the adapter {request.adapter!r}: {wrong}.")
    return generated


def _message(text: str) -> str:
    try:
        return _shown(str(json.loads(text)["error"]["message"]))
    except (ValueError, KeyError, TypeError):
        return _shown(text)


def _shown(text: str) -> str:
    return brief(for_log(text[: 10 * _MOST_SHOWN]), _MOST_SHOWN)


# ---- Several servers: requests are distributed, and retried while a server does not respond ----


# Maximum number of failures of a request: an invalid response, or an adapter that the server does not have
_MAX_FAILURES = 3
# Seconds between two health checks of a server that is down
_POLL_SECONDS = 0.5


@dataclass(frozen=True)
class ServerSettings:
    """Settings of the servers of a team. Times are in seconds."""

    urls: tuple[str, ...]
    request_timeout: float = 600.0  # of a turn
    server_timeout: float = 240.0  # that requests wait while a server does not answer
    max_inflight: int = 256  # concurrent requests per server
    health_timeout: float = 20.0  # without a response to health checks, after which a server counts as down
    own: Any | None = None  # the only server, an `OwnServer`, if this process started it
    kind: type[VLLMServer] = VLLMServer  # the client of a server
    sleep: bool = False  # the own server frees its device memory while nothing is generated

    @contextlib.asynccontextmanager
    async def connected(self):
        """Yield a client per address, for the current event loop."""
        from aiohttp import ClientSession, TCPConnector

        key = os.environ.get(self.kind.key_variable) if self.own is None else self.own.key
        # Each request has its own connection: vLLM closes idle ones after 5 seconds, and with uvicorn 0.54, some
        # requests on connections that had been used before got no answer until then
        async with ClientSession(connector=TCPConnector(limit=0, force_close=True)) as session:
            yield [self.kind(url, session, self.request_timeout, key) for url in self.urls]


async def put_to_sleep(settings: ServerSettings) -> None:
    async with settings.connected() as servers:
        for server in servers:
            await server.sleep(settings.server_timeout)


class ServerPool:
    """
    Connections to the servers of a team, for one event loop: `async with ServerPool(...) as pool`.

    A request goes to the server with the fewest requests and stays there. If that server goes down, the request is
    sent again with the same seed when the server is back and has all adapters, which `await make_ready(server)` loads.
    """

    def __init__(self, settings: ServerSettings, make_ready: Callable[[VLLMServer], Awaitable[None]]):
        self._settings, self._make_ready = settings, make_ready
        self._running: dict[VLLMServer, int] = {}
        self._slots = asyncio.Semaphore(settings.max_inflight * len(settings.urls))
        self._waits: dict[VLLMServer, asyncio.Task] = {}  # tasks that wait for servers that are down
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> ServerPool:
        servers = await self._stack.enter_async_context(self._settings.connected())
        self._running = dict.fromkeys(servers, 0)
        try:
            await asyncio.gather(*map(self._wait_until_ready, servers))
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *error: Any) -> None:
        for task in self._waits.values():
            task.cancel()
        await asyncio.gather(*self._waits.values(), return_exceptions=True)
        await self._stack.aclose()

    async def generate(
        self, request: GenerateRequest, on_tokens: Callable[[list[int]], None] | None = None
    ) -> tuple[GeneratedTurn, str]:
        """
        Generate a turn, and return it with the address of the server. Raises an [`EngineDownError`] after
        `server_timeout`, a [`RefusedError`], or an [`AnswerError`] if a healthy server failed several times.
        """
        async with self._slots:
            server = min(self._running, key=self._running.__getitem__)
            self._running[server] += 1
            try:
                return await self._generate(server, request, on_tokens), server.url
            finally:
                self._running[server] -= 1

    async def _generate(
        self, server: VLLMServer, request: GenerateRequest, on_tokens: Callable[[list[int]], None] | None
    ) -> GeneratedTurn:
        num_heard = num_repeated = num_failures = 0
        failed: Exception

        def pass_on(ids: list[int]) -> None:
            """Pass on the tokens that an earlier attempt has not already passed on."""
            nonlocal num_heard, num_repeated
            new, num_repeated = ids[num_repeated:], max(num_repeated - len(ids), 0)
            num_heard += len(new)
            if on_tokens is not None and new:
                on_tokens(new)

        while num_failures < _MAX_FAILURES:
            num_repeated = num_heard
            try:
                return await server.generate(request, None if on_tokens is None else pass_on)
            except UnknownAdapterError as error:  # the server was restarted
                num_failures, failed = num_failures + 1, error
                await self._wait_until_ready(server)
            except ServerDownError as error:
                failed = error
                if await self._is_healthy(server):  # only this request fails
                    num_failures += 1
                else:
                    logger.warning(f"{error} Requests to this server wait until it is back.")
                    await self._wait_until_ready(server)
            except AnswerError as error:
                num_failures, failed = num_failures + 1, error
        if not isinstance(failed, ServerDownError):
            raise failed
        raise AnswerError(
            f"{failed} The request failed {_MAX_FAILURES} times, although the server is healthy. If turns need more "
            f"than {self._settings.request_timeout:g} seconds, including the time in the server's queue, increase "
            "`vllm_request_timeout` or lower `vllm_max_inflight`."
        ) from failed

    async def _is_healthy(self, server: VLLMServer) -> bool:
        try:
            with contextlib.suppress(RefusedError):  # from a proxy that does not forward health checks
                await server.check_health(self._settings.health_timeout)
        except ServerDownError:
            return False
        return True

    async def _wait_until_ready(self, server: VLLMServer) -> None:
        """Wait until a server responds and has all adapters. Requests to the same server share the wait."""
        task = self._waits.get(server)
        if task is None or task.done():
            task = self._waits[server] = asyncio.ensure_future(self._poll_until_ready(server))
        await asyncio.shield(task)

    async def _poll_until_ready(self, server: VLLMServer) -> None:
        start = time.monotonic()
        while True:
            try:
                with contextlib.suppress(RefusedError):  # from a proxy that does not forward health checks
                    await server.check_health(self._settings.health_timeout)
                return await self._make_ready(server)
            except ServerDownError as error:
                if time.monotonic() - start > self._settings.server_timeout:
                    raise EngineDownError(
                        f"{server.url} has not answered for {self._settings.server_timeout:g} seconds "
                        f"(`vllm_server_timeout`). {error} Restart it with the same command, and resume the run. The "
                        "missing turns were not used for training."
                    ) from error
                await asyncio.sleep(_POLL_SECONDS)


def parse_addresses(
    urls: str | Sequence[str] | None, host: str, port: int, name: str = "vllm_server_base_url"
) -> tuple[str, ...]:
    """
    Parse the addresses of servers, without trailing slashes and `/v1`. `urls` may contain commas; `host` and `port`
    are used if it is empty. Raises a `ValueError` that names the setting for an invalid or repeated address.
    """
    # TRL's default 0.0.0.0 is an address to bind to, not to connect to. It stands for this machine
    host = "127.0.0.1" if host == "0.0.0.0" else host  # noqa: S104
    passed = [urls] if isinstance(urls, str) else list(urls or [f"http://{host}:{port}"])
    found = [url.strip().rstrip("/").removesuffix("/v1") for text in passed for url in text.split(",")]
    for url in found:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"`{name}` must contain addresses such as 'http://host:8000', got {url!r}.")
    if len(set(found)) < len(found) or not found:
        raise ValueError(f"`{name}` must list every server exactly once, got {passed!r}.")
    return tuple(found)


# Advice in messages about a missing server
_START_ADVICE = (
    "Start a server with the command from `marft_trl.extras.engines.vllm_command(model, agents, args, peft_config)`, "
    "or set the address of another server: `vllm_server_base_url='http://host:8000'`. With `vllm_mode='colocate'` and "
    "`vllm_python`, the trainer starts a server on its own GPU."
)
_WARN_AFTER_SECONDS = 5.0  # seconds without a server before a warning


def find_max_model_len(settings: ServerSettings) -> int | None:
    """
    Wait until all servers run, and return the smallest limit of an observation and its turn in tokens, if they report
    one. Raises an [`EngineDownError`] after `server_timeout`.
    """

    async def find_models() -> list[dict[str, dict[str, Any]]]:
        start = time.monotonic()
        async with settings.connected() as servers:
            return await asyncio.gather(*[_wait_for_models(server, settings, start) for server in servers])

    lengths = [model.get("max_model_len") for models in run_coroutine(find_models) for model in models.values()]
    return min((length for length in lengths if length), default=None)


async def _wait_for_models(server: VLLMServer, settings: ServerSettings, start: float) -> dict[str, dict[str, Any]]:
    has_warned = False
    while True:
        try:
            return await server.models(settings.health_timeout)
        except ServerDownError as error:
            waited = time.monotonic() - start
            if waited > settings.server_timeout:
                raise EngineDownError(
                    f"Found no vLLM server at {server.url} within {settings.server_timeout:g} seconds "
                    f"(`vllm_server_timeout`): {error} {_START_ADVICE}"
                ) from error
            if not has_warned and waited > _WARN_AFTER_SECONDS:
                has_warned = True
                logger.warning(
                    f"Waiting for a vLLM server at {server.url}, for up to {settings.server_timeout:g} seconds "
                    f"(`vllm_server_timeout`). {_START_ADVICE}"
                )
            await asyncio.sleep(_POLL_SECONDS)
