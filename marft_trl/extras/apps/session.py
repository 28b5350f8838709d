# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""The requests of one episode of an application. A secret API key identifies the episode."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import os
import secrets
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ...episodes.images import as_json
from ...episodes.records import Turn
from .requests import ChatReply, ChatRequest, RequestError, with_format
from .responses import ResponseStore


if TYPE_CHECKING:
    from .http import ChatReplies, TextListener
    from .routing import AgentRule


# Maximum number of unanswered requests of an episode, and bytes of its stored responses
_MOST_WAITING, _MOST_STORED = 512, 4 << 20
_TOKEN = f"marft-{secrets.token_hex(4)}"  # prefix of the keys of this process and its forks
# Modules whose `api_key` is that of all clients of the process, and that of the Agents SDK with its default client
_CLIENTS = ("openai", "litellm")
_AGENTS_SDK = "agents.models._openai_shared"


class AppEndpoint(NamedTuple):
    """
    Where an application sends its requests in one episode.

    Args:
        base_url (`str`): base URL of the API for OpenAI's clients, ending in `/v1`.
        api_key (`str`): key of the episode.
    """

    base_url: str
    api_key: str

    @property
    def root_url(self) -> str:
        """Base URL for Anthropic's clients, which add `/v1`."""
        return self.base_url.removesuffix("/v1")

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables that the clients of OpenAI and Anthropic read."""
        return {
            **{"OPENAI_BASE_URL": self.base_url, "OPENAI_API_KEY": self.api_key},
            **{"ANTHROPIC_BASE_URL": self.root_url, "ANTHROPIC_API_KEY": self.api_key},
        }


# Name of the temporary folder of an application, as agents are shown it. It has letters and digits alone, which
# applications that make other names of a path keep
FOLDER = "marftapp000000000000"


def folder_name(secret: str) -> str:
    """Name of the temporary folder of the episode with a key."""
    return f"marftapp{hashlib.sha256(secret.encode()).hexdigest()[:12]}"


def mark_of_process() -> str:
    """Return the prefix of the keys of this process, which may itself be an application with another process's key."""
    return f"{_TOKEN}-{os.getpid()}-"


def shared_keys() -> list[str]:
    """Return the places, as code, that all episodes of this process share and that have the key of an episode."""
    variables = [f"os.environ[{name!r}]" for name, value in os.environ.items() if mark_of_process() in value]
    found = variables + [f"{name}.api_key" for name in _CLIENTS if mark_of_process() in str(_get_key(name))]
    return found + ["the default client of the Agents SDK"] * (mark_of_process() in _key_of_agents_sdk())


def _key_of_agents_sdk() -> str:
    shared = sys.modules.get(_AGENTS_SDK)
    if shared is None:
        return ""
    return f"{shared.get_default_openai_key()} {getattr(shared.get_default_openai_client(), 'api_key', None)}"


def forget_shared_keys() -> None:
    """Remove keys that functions have left in shared places, so that others are not blamed for them."""
    for name in [name for name, value in os.environ.items() if mark_of_process() in value]:
        del os.environ[name]
    for name in [name for name in _CLIENTS if mark_of_process() in str(_get_key(name))]:
        sys.modules[name].api_key = None  # type: ignore[attr-defined]
    if mark_of_process() in _key_of_agents_sdk():
        shared = sys.modules[_AGENTS_SDK]
        shared.set_default_openai_key(None)
        shared.set_default_openai_client(None)


def _get_key(module: str) -> Any:
    return getattr(sys.modules.get(module), "api_key", None)


_LOGGED: set[tuple[str, Any]] = set()


def _is_new(record: logging.LogRecord) -> bool:
    """Let each message through once, so that clients cannot fill a disk with them."""
    key = str(record.msg), record.exc_info[0] if record.exc_info else None
    is_new = key not in _LOGGED
    _LOGGED.add(key)
    return is_new


# Logger of errors that clients can cause
logger = logging.getLogger(__name__)
logger.addFilter(_is_new)


class Waiting:
    """A request that waits. `clients` and `answer` belong to the endpoint's thread, the rest to the episode's."""

    def __init__(self, chat_request: ChatRequest, seen: tuple[Turn, ...]):
        self.chat_request, self.seen = chat_request, seen  # `seen`: turns that were answered before it came
        self.answer: asyncio.Future[tuple[ChatReply, Turn]] = asyncio.get_running_loop().create_future()
        self.clients = 0
        self.is_gone = self.is_settled = False
        self.task: asyncio.Task | None = None

    @property
    def order(self) -> str:
        """Sort key of requests that arrive together, so that their order does not depend on which came first."""
        request = self.chat_request
        shown = [request.model, request.messages, request.tools, request.stop, request.schema]
        return json.dumps(shown, sort_keys=True, default=as_json)

    def settle(self, result: tuple[ChatReply, Turn] | BaseException) -> None:
        """Answer the request once, from the event loop of the episode."""
        if self.is_settled:
            return
        self.is_settled = True
        error = result if isinstance(result, BaseException) else None
        self.answer.get_loop().call_soon_threadsafe(settle_future, self.answer, result, error)


class Session:
    """An episode from the point of view of the endpoint. Create it in the event loop of the episode."""

    def __init__(
        self,
        agents: Sequence[str],
        takes_tools: bool,
        earns: bool,
        agent_of: AgentRule | None = None,
        count: Callable[..., int] | None = None,
    ):
        self.agent_of, self._count = agent_of, count
        self.models, self.takes_tools, self.earns = tuple(agents), takes_tools, earns
        self.secret = mark_of_process() + secrets.token_urlsafe(32)
        self.loop = asyncio.get_running_loop()
        self.inbox: asyncio.Queue[Waiting] = asyncio.Queue()  # in the event loop of the episode
        self._folder = folder_name(self.secret)
        self.responses = ResponseStore(_MOST_STORED, self.as_shown)
        self.counts: Counter[str] = Counter()  # requests, by outcome
        self.refused: str | None = None  # error of the latest refused request
        self.first_refused: str | None = None
        # Each with the last turn that was answered before
        self.rewards: list[tuple[float | Mapping[str, float], Turn | None]] = []
        self._answered: list[Turn] = []
        self._by_body: dict[str, list[Waiting]] = {}
        self._firsts: Counter[str] = Counter()  # requests that were no further tries, by body
        self._num_waiting = 0

    # ---- In the thread of the endpoint ----

    async def answer(
        self, chat_request: ChatRequest, body: bytes, is_retry: bool, on_text: TextListener | None
    ) -> ChatReplies:
        """Answer a request. If the caller is canceled, so is the request. A retry is recognized by its body."""
        from .http import ChatReplies

        self._check(chat_request)
        key = hashlib.sha256(body).hexdigest()
        same = self._by_body.setdefault(key, [])
        self._firsts[key] += not is_retry
        waiting = self._earlier(same, is_retry, self._firsts[key])
        if waiting is not None:
            self.counts["retried"] += 1
        elif self._num_waiting >= _MOST_WAITING:
            raise RequestError(f"This episode already has {_MOST_WAITING} unanswered requests. Wait for answers.", 429)
        else:
            waiting = Waiting(chat_request, tuple(self._answered))
            same.append(waiting)
            self.counts["requests"] += 1
            self._call(self.inbox.put_nowait, waiting)
        waiting.clients += 1
        self._num_waiting += 1
        try:
            reply, turn = await asyncio.shield(waiting.answer)
        except asyncio.CancelledError:
            self.on_send_failed(waiting)
            raise
        except RequestError:
            if waiting in same:  # so that a retry gets a new turn
                same.remove(waiting)
            raise
        finally:
            self._num_waiting -= 1
        if turn not in self._answered:
            self._answered.append(turn)
        return ChatReplies([self._as_sent(reply)], functools.partial(self.on_send_failed, waiting))

    def as_shown(self, text: str) -> str:
        """Replace the name of the application's folder by one that is the same in every episode and re-run."""
        return text.replace(self._folder, FOLDER)

    def _as_sent(self, reply: ChatReply) -> ChatReply:
        """A reply with the name that the folder really has."""
        calls = [call._replace(arguments=call.arguments.replace(FOLDER, self._folder)) for call in reply.calls]
        return dataclasses.replace(reply, text=reply.text.replace(FOLDER, self._folder), calls=tuple(calls))

    async def count_tokens(self, chat_request: ChatRequest) -> int:
        self._check(chat_request)
        if self._count is None:
            raise RequestError("Tokens cannot be counted here.", 404)
        messages = with_format(chat_request.messages, chat_request.schema)
        return await asyncio.to_thread(self._count, chat_request.model, messages, chat_request.tools)

    def on_send_failed(self, waiting: Waiting) -> None:
        """Handle a client that disconnected before or while its answer was sent. It may retry."""
        waiting.clients -= 1
        if not waiting.clients and not waiting.answer.done():
            with contextlib.suppress(RequestError):  # the episode has ended
                self._call(self._give_up, waiting)

    @staticmethod
    def _earlier(same: Sequence[Waiting], is_retry: bool, firsts: int) -> Waiting | None:
        """Return the request that is retried: one without clients, or the latest if each first try has a turn."""
        present = [waiting for waiting in same if not waiting.is_gone]
        left = [waiting for waiting in present if not waiting.clients]
        return left[0] if left else present[-1] if present and is_retry and len(present) >= firsts else None

    def refuse(self, error: RequestError) -> None:
        if error.details is not None:  # the client knows it, and goes on in another way
            return
        self.counts["refused"] += 1
        self.refused = str(error)
        self.first_refused = self.first_refused or self.refused

    def reward(self, reward: Any) -> None:
        """Record a reward: a number for the team, or a mapping of agent names to numbers."""
        if not self.earns:
            raise RequestError("The workflow accepts no rewards. Set `ExternalApp(..., earns=True)`.")
        by_name = reward if isinstance(reward, dict) else {"": reward}
        for name, value in by_name.items() or [("", None)]:
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e30
            if not is_number or (isinstance(reward, dict) and name not in self.models):
                names = ", ".join(map(repr, self.models))
                text = f"`reward` must be a number, or numbers by agent name ({names}), got {json.dumps(reward)[:80]}."
                raise RequestError(text, field="reward")
        self.rewards.append((reward, self._answered[-1] if self._answered else None))

    def _check(self, chat_request: ChatRequest) -> None:
        chat_request.check_turn()
        if chat_request.tools and not self.takes_tools:
            text = "The request has `tools`, but the chat template is not ready. Set `ExternalApp(..., tools=True)`."
            raise RequestError(text, field="tools", code="unsupported_parameter")

    def _give_up(self, waiting: Waiting) -> None:
        """Cancel a request, in the event loop of the episode. A turn that is already complete is kept for a retry."""
        if waiting.clients or waiting.is_settled:
            return
        waiting.is_gone = True
        self.counts["abandoned"] += 1
        if waiting.task is not None:
            waiting.task.cancel()

    def _call(self, function: Any, *arguments: Any) -> None:
        try:
            self.loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError as error:  # the loop is closed: the run has ended
            raise RequestError("The episode of this key has ended.", 401, code="invalid_api_key") from error


def settle_future(future: asyncio.Future, value: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
        future.exception()  # nobody may wait for it any more
    else:
        future.set_result(value)
