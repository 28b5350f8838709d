# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""One vLLM server over HTTP: requests, and what its answers mean."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from ...system.redaction import for_log, without_secrets


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
    """
    What a server generated.

    Args:
        ids: token ids, up to and including the one that ends the turn.
        logps: their log-probabilities in the distribution that they were sampled from.
    """

    ids: list[int]
    logps: list[float]


@dataclass(frozen=True)
class GenerateRequest:
    """
    What a server is asked to generate.

    Args:
        adapter: name of the adapter on the server.
        prompt_ids: token ids of the observation.
        max_tokens: largest number of tokens.
        settings: settings of sampling under vLLM's names, with the seed.
    """

    adapter: str
    prompt_ids: Sequence[int]
    max_tokens: int
    settings: Mapping[str, Any]

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
    """
    A vLLM server. Its methods are awaited within one event loop.

    Args:
        url: address, such as `"http://localhost:8000"`.
        timeout: seconds after which a request for a turn is given up.
        key: the server's API key.
    """

    def __init__(self, url: str, session: Any, timeout: float, key: str | None = None):
        # `url` is shown in messages and is recorded with turns, so it has no secrets
        self.url, self._address, self._session, self._timeout = without_secrets(url), url, session, timeout
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    async def generate(
        self, request: GenerateRequest, on_tokens: Callable[[list[int]], None] | None = None
    ) -> GeneratedTurn:
        """
        Generate a turn.

        Raises:
            ServerDownError: the server does not answer.
            AnswerError: its answer is not a whole turn.
            UnknownAdapterError: it does not have the adapter.
            RefusedError: it refused the request.
        """
        try:
            if on_tokens is None:
                answer = await self._post("/v1/completions", request.body(), self._timeout)
            else:
                answer = await self._streamed("/v1/completions", request.body(), on_tokens)
        except RefusedError as error:
            if error.status == 404:
                raise UnknownAdapterError(f"{self.url} does not have the adapter {request.adapter!r}.") from error
            raise
        return whole_turn(answer, request, self.url)

    async def next_token(
        self, adapter: str, prompt_ids: Sequence[int], temperature: float, timeout: float
    ) -> dict[int, float]:
        """
        Log-probabilities of the most likely next tokens after a prompt, by token id.

        vLLM's `prompt_logprobs` would score whole texts, but on a CPU they end the engine (0.32) if another request is
        computed at the same time.
        """
        body = {"model": adapter, "prompt": list(prompt_ids), "max_tokens": 1, "temperature": temperature, "seed": 0}
        limits = {"logprobs": _MOST_LIKELY, "return_tokens_as_token_ids": True, "top_p": 1.0, "top_k": 0}
        answer = await self._post("/v1/completions", {**body, **limits}, timeout)
        try:
            (texts,) = answer["choices"][0]["logprobs"]["top_logprobs"]
            found = {int(token.removeprefix("token_id:")): float(value) for token, value in texts.items()}
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise AnswerError(f"{self.url} returned no log-probabilities: {_brief(str(answer))}") from error
        likely = sorted(found, key=found.__getitem__, reverse=True)[:_MOST_LIKELY]  # not the sampled one
        return {token: found[token] for token in likely}

    async def load(self, name: str, folder: str, timeout: float) -> None:
        """
        Load an adapter from a folder.

        Raises:
            RefusedError: the server cannot load it.
        """
        try:  # what cannot be loaded is answered with 500
            await self._post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder}, timeout, down=501)
        except RefusedError as error:
            if "already been loaded" not in str(error):
                raise

    async def unload(self, name: str, timeout: float) -> None:
        """Forget the name of an adapter. A server that does not know it is left alone."""
        with contextlib.suppress(RefusedError):
            await self._post("/v1/unload_lora_adapter", {"lora_name": name}, timeout)

    async def sleep(self, timeout: float) -> None:
        """Give the memory of the device back. The weights of the base are kept in main memory."""
        await self._request("POST", "/sleep?level=1", None, timeout)

    async def wake(self, timeout: float) -> None:
        """Take the memory of the device again."""
        await self._request("POST", "/wake_up", None, timeout)

    async def models(self, timeout: float) -> dict[str, dict[str, Any]]:
        """The base and the adapters that the server has, by name."""
        answer = await self._get("/v1/models", timeout)
        return {model["id"]: model for model in json.loads(answer)["data"]}

    async def max_loras(self, timeout: float) -> int | None:
        """Largest number of adapters in a batch, if the server tells. It does after a first request to an adapter."""
        for line in (await self._get("/metrics", timeout)).splitlines():
            if line.startswith("vllm:lora_requests_info{") and 'max_lora="' in line:
                return int(line.partition('max_lora="')[2].partition('"')[0])
        return None

    async def check_health(self, timeout: float) -> None:
        """
        Raises:
            ServerDownError: the server does not respond that it is healthy.
        """
        await self._get("/health", timeout)

    async def _get(self, path: str, timeout: float) -> str:
        return await self._request("GET", path, None, timeout)

    async def _post(self, path: str, body: dict[str, Any], timeout: float, down: int = 500) -> dict[str, Any]:
        text = await self._request("POST", path, body, timeout, down)
        try:
            return json.loads(text)
        except ValueError:
            return {"message": text}

    async def _streamed(
        self, path: str, body: dict[str, Any], on_tokens: Callable[[list[int]], None]
    ) -> dict[str, Any]:
        """An answer whose tokens arrive one by one, as if it had arrived as a whole."""
        ids: list[int] = []
        logps: list[float] = []
        reason = None
        async with self._answer("POST", path, {**body, "stream": True}, self._timeout) as answer:
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
                    raise AnswerError(f"{self.url} streamed an invalid turn: {_brief(data)}") from error
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
        """Asynchronous context manager: an answer with a status below 400."""
        from aiohttp import ClientError, ClientTimeout

        try:
            async with self._session.request(
                method, self._address + path, json=body, headers=self._headers, timeout=ClientTimeout(total=timeout)
            ) as answer:
                if answer.status >= 400:
                    self._refuse(answer.status, path, await answer.text(), down)
                yield answer
        except ServerDownError:
            raise
        except TimeoutError as error:
            raise ServerDownError(f"{self.url}{path} did not answer within {timeout:g} seconds.") from error
        except (ClientError, OSError) as error:
            raise ServerDownError(f"{self.url}{path}: {type(error).__name__}: {for_log(str(error))}") from error

    def _refuse(self, status: int, path: str, text: str, down: int) -> NoReturn:
        if status >= down:
            raise ServerDownError(f"{self.url}{path} answered {status}: {_message(text)}")
        if status == 401:
            raise RefusedError(f"{self.url} requires an API key. Set the environment variable `VLLM_API_KEY`.", 401)
        raise RefusedError(f"{self.url}{path} answered {status}: {_message(text)}", status)


def whole_turn(answer: Mapping[str, Any], request: GenerateRequest, url: str) -> GeneratedTurn:
    """
    The turn in an answer of `/v1/completions`.

    Raises:
        AnswerError: it was aborted or cut short, lacks tokens or log-probabilities, or has one that is not a number.
    """
    try:
        (choice,) = answer["choices"]
        ids, logps, reason = choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["finish_reason"]
        generated = GeneratedTurn([int(index) for index in ids], [float(value) for value in logps])
    except (KeyError, TypeError, ValueError) as error:
        raise AnswerError(f"{url} returned no turn: {_brief(str(answer))}") from error
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
        return _brief(str(json.loads(text)["error"]["message"]))
    except (ValueError, KeyError, TypeError):
        return _brief(text)


def _brief(text: str) -> str:
    text = for_log(text[: 10 * _MOST_SHOWN])
    return text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 3] + "..."
