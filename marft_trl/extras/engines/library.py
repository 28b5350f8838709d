# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Versioned adapters on servers: which ones can be served, written, loaded, compared and retired."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import hashlib
import logging
import os
import random
import secrets
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig, PeftConfig, PeftModel
from peft.utils import get_peft_model_state_dict
from safetensors.torch import save_file

from ...agents import AgentSpec
from ...system.event_loop import run_coroutine
from .server import AnswerError, RefusedError, ServerDownError, ServerSettings, VLLMServer, put_to_sleep


logger = logging.getLogger(__name__)

# Modules whose adapters a server does not apply, or not everywhere
_HEADS = ("lm_head", "embed_tokens")


def check_servable(agent: AgentSpec, config: PeftConfig) -> None:
    """Raise a `ValueError` if a server would apply the adapter of an agent in part, or not at all."""
    if not isinstance(config, LoraConfig):
        raise ValueError(
            f"The adapter of agent {agent.name!r} is a {type(config).__name__}, but vLLM serves only LoRA. Use a "
            "`LoraConfig`, or set `use_vllm=False`."
        )
    targets = config.target_modules if isinstance(config.target_modules, (list, set, tuple)) else []
    wrong = {
        "target_parameters": config.target_parameters,
        "use_dora": config.use_dora,
        "bias": config.bias != "none",
        "modules_to_save": config.modules_to_save,
        "rank_pattern": config.rank_pattern,
        "alpha_pattern": config.alpha_pattern,
        "trainable_token_indices": getattr(config, "trainable_token_indices", None),
        "target_modules": [name for name in targets if name.rpartition(".")[2] in _HEADS],
    }
    # Of a mixture of experts, PEFT has rewritten `target_modules`
    experts = "Target only attention layers in `target_modules`, such as ['q_proj', 'v_proj']"
    cure = experts if config.target_parameters else "Remove it"
    for name, is_set in wrong.items():
        if is_set:
            raise ValueError(
                f"vLLM does not compute `{name}={getattr(config, name)!r}` (adapter of agent {agent.name!r}) as the "
                f"trainer does. {cure}, or set `use_vllm=False`."
            )


def adapter_tensors(model: PeftModel, adapter: str) -> dict[str, torch.Tensor]:
    """Current tensors of an adapter, by their names in PEFT's files."""
    return get_peft_model_state_dict(model, adapter_name=adapter, save_embedding_layers=False)


def zero_tensors(model: PeftModel, adapter: str) -> dict[str, torch.Tensor]:
    """Tensors of an adapter that changes nothing, by which a server that has only adapters gets the base."""
    return {name: torch.zeros_like(tensor) for name, tensor in adapter_tensors(model, adapter).items()}


def served_config(model: PeftModel, adapter: str) -> LoraConfig:
    """The config of an adapter, without what a server does not need."""
    config = copy.deepcopy(model.peft_config[adapter])
    config.inference_mode, config.base_model_name_or_path = True, None
    return config


# Lengths of the texts after which a server and the trainer are compared
_PROBE_LENGTHS = (3, 8, 17, 40)
# Number of tokens that the trainer's log-probabilities are kept for
_MOST_LIKELY = 512
# Temperature at which raw and processed log-probabilities of a server differ
_HOT = 2.0


class MismatchError(RuntimeError):
    """A server computes other log-probabilities with an adapter than the trainer."""

    def __init__(self, message: str, entry: str):
        super().__init__(message)
        self.entry = entry


@dataclass(frozen=True)
class Probe:
    """Token ids of a text, and the log-probabilities of the most likely next tokens that the trainer expects."""

    ids: tuple[int, ...]
    logps: dict[int, float]
    hot_logps: dict[int, float]  # the same at a high temperature

    @classmethod
    def from_log_probs(cls, ids: Sequence[int], logps: torch.Tensor) -> Probe:
        """Make a probe from the log-probabilities `(V,)` of all tokens."""
        logps = logps.double().cpu()
        best = logps.topk(min(_MOST_LIKELY, len(logps))).indices
        hot = torch.log_softmax(logps / _HOT, dim=-1)
        pairs = (dict(zip(best.tolist(), value[best].tolist(), strict=True)) for value in (logps, hot))
        return cls(tuple(ids), *pairs)


@dataclass(frozen=True)
class Version:
    """A state of an adapter that servers have."""

    entry: str  # an adapter of the team, its reference, or the base
    number: int  # counts the states of this entry, from 0
    name: str  # on the servers, which no other state ever has
    folder: str
    digest: str
    probes: tuple[Probe, ...]


@dataclass(frozen=True)
class ServedAdapter:
    """Weights that servers are given."""

    tensors: Callable[[], Mapping[str, torch.Tensor]]  # current tensors of a LoRA, by their names in PEFT's files
    config: LoraConfig
    # `next_token(ids)`: the trainer's log-probabilities `(V,)` after these tokens, at temperature 1
    next_token: Callable[[list[int]], torch.Tensor]
    is_fixed: bool = False  # the weights never change


class AdapterLibrary:
    """
    The adapters of a team on its servers.

    A state of an adapter gets a new name and a new folder and never changes. An adapter whose weights have not changed
    keeps its name, and with it the server's prefix cache. Servers see `folder` under the same path; `tolerance` is the
    largest mean difference of log-probabilities between a server and the trainer.
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        entries: Mapping[str, ServedAdapter],
        servers: ServerSettings,
        vocabulary: int,
        tolerance: float,
    ):
        self._run = secrets.token_hex(4)  # of this process: a name is never given twice, also after a restart
        self._folder = Path(folder).absolute() / self._run
        self._entries, self.servers, self._tolerance = dict(entries), servers, tolerance
        draw = random.Random(0)  # noqa: S311
        self._probes = [[draw.randrange(vocabulary) for _ in range(length)] for length in _PROBE_LENGTHS]
        self._current: dict[str, Version] = {}
        self._live: dict[str, Version] = {}  # by name: those that servers have
        self._retired: list[Version] = []
        self._numbers: dict[str, int] = {}  # of the latest state of each entry, including unloaded ones
        self._compared: set[tuple[str, str]] = set()  # servers' addresses, and names that were compared there

    @property
    def current(self) -> dict[str, Version]:
        """The current state of each entry."""
        return dict(self._current)

    def adopt(self, current: Mapping[str, Version], keep: Iterable[Version] = ()) -> None:
        """Use the states that another process has published, and others that are still used."""
        self._current = dict(current)
        self._live = {version.name: version for version in [*keep, *current.values()]}

    def follow(self, current: Mapping[str, Version], keep: Iterable[Version] = ()) -> None:
        """Like `adopt`, for a process with its own servers: they get these states."""
        before = dict(self._live)
        self.adopt(current, keep)
        run_coroutine(self._make_all_ready)
        run_coroutine(self._unload, [version for name, version in before.items() if name not in self._live])

    def publish(self, keep: Iterable[Version] = ()) -> dict[str, Version]:
        """
        Give every server the current weights, and return the current state of each entry. Only what has changed is
        written and loaded. `keep` has earlier states that turns are still sampled from.

        Raises a `FloatingPointError` if a weight is not finite, a [`MismatchError`] if a server computes something
        else than the trainer, and a [`RefusedError`] with the flag to set if a server cannot load an adapter.
        """
        for version in self._retired:  # unloaded since the last time, so no server reads them again
            shutil.rmtree(version.folder, ignore_errors=True)
        self._retired.clear()
        before = dict(self._live)
        for entry, source in self._entries.items():
            if entry not in self._current or not source.is_fixed:
                self._write(entry)
        self.adopt(self._current, keep)
        try:
            run_coroutine(self._make_all_ready)
        except MismatchError as error:  # once more under another name: a read may have been partial
            logger.warning(f"{error} The adapter is loaded again under another name.")
            self._write(error.entry, again=True)
            self.adopt(self._current, keep)
            run_coroutine(self._make_all_ready)
        old = [version for name, version in before.items() if name not in self._live]
        run_coroutine(self._unload, old)
        self._retired += old
        return self.current

    def close(self, delete_files: bool = True) -> None:
        """Unload all adapters, and delete the files, which one process does. Later requests publish them again."""
        run_coroutine(self._unload, list(self._live.values()))
        self._current.clear()
        self._live.clear()
        self._retired.clear()
        if delete_files:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _write(self, entry: str, again: bool = False) -> None:
        """Write the files of a new state, if there is one, or of the current state `again`. The folder is complete."""
        source, known = self._entries[entry], self._current.get(entry)
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in source.tensors().items()}
        digest = hash_tensors(tensors)
        if known is not None and digest == known.digest and not again:
            return
        for name, tensor in tensors.items():
            if not tensor.isfinite().all():
                raise FloatingPointError(
                    f"The adapter {entry!r} has a weight that is not finite ({name}), so it was not sent to any "
                    "server, where it could harm others. Resume from an earlier checkpoint with a lower learning rate."
                )
        number = self._numbers[entry] = self._numbers.get(entry, -1) + (0 if again else 1)
        name = f"{known.name}-again" if known is not None and again else f"{self._run}-{entry}-v{number}"
        folder, partial = self._folder / name, self._folder / f".{name}"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        save_file(tensors, partial / "adapter_model.safetensors", metadata={"format": "pt"})
        source.config.save_pretrained(str(partial))
        for file in partial.iterdir():
            with open(file, "rb") as opened:
                os.fsync(opened.fileno())
        os.rename(partial, folder)
        probes = tuple(Probe.from_log_probs(ids, source.next_token(ids)) for ids in self._probes)
        self._current[entry] = Version(entry, number, name, str(folder), digest, probes)

    async def _make_all_ready(self) -> None:
        async with self.servers.connected() as servers:
            for error in await asyncio.gather(*map(self.make_ready, servers), return_exceptions=True):
                if isinstance(error, ServerDownError):  # it is made ready when it is back
                    logger.warning(f"{error} The server receives the adapters when it is back.")
                elif isinstance(error, BaseException):
                    raise error

    async def make_ready(self, server: VLLMServer) -> None:
        """Load what a server lacks, and compare. Errors: `ServerDownError`, `MismatchError`, `RefusedError`."""
        known, live = await server.models(self.servers.health_timeout), list(self._live.values())
        is_new = not any(version.name in known for version in live)
        for version in live:
            pair = server.url, version.name
            if version.name not in known:
                self._compared.discard(pair)
                await self._load(server, version)
            if pair not in self._compared:  # also what another process has loaded, or what was interrupted
                await self._compare(server, version)
                self._compared.add(pair)
        if is_new and live:
            await self._check_flags(server, live[0])

    async def _check_flags(self, server: VLLMServer, version: Version) -> None:
        """Check that a server has no settings under which turns would be wrong, or slow."""
        seconds, probe = self.servers.server_timeout, version.probes[-1]
        hot = await server.next_token(version.name, probe.ids, _HOT, seconds)
        if _difference(hot, probe.logps) < _difference(hot, probe.hot_logps):
            raise RefusedError(
                f"The log-probabilities of {server.url} are not those of the distribution that it samples from. Start "
                "the server with `--logprobs-mode processed_logprobs`.",
                status=400,
            )
        room = await server.max_loras(seconds)
        if room is not None and room < len(self._entries):
            logger.warning(
                f"{server.url} runs at most {room} adapters at a time, but the team has {len(self._entries)}, so "
                f"turns wait for each other. Start the server with `--max-loras {len(self._entries)}` or more."
            )

    async def _load(self, server: VLLMServer, version: Version) -> None:
        try:
            await server.load(version.name, version.folder, self.servers.server_timeout)
        except RefusedError as error:
            text = f"The adapter {version.entry!r} cannot be loaded. {error} {_advice(str(error), error.status)}"
            raise RefusedError(text, error.status) from error

    async def _compare(self, server: VLLMServer, version: Version) -> None:
        seconds = self.servers.server_timeout
        try:
            found = [await server.next_token(version.name, probe.ids, 1.0, seconds) for probe in version.probes]
        except (AnswerError, RefusedError) as error:
            await server.unload(version.name, seconds)
            raise MismatchError(f"Could not compare the adapter {version.entry!r}: {error}", version.entry) from error
        pairs = zip(found, version.probes, strict=True)
        difference = sum(_difference(served, probe.logps) for served, probe in pairs) / len(found)
        if not difference <= self._tolerance:
            await server.unload(version.name, seconds)
            raise MismatchError(
                f"The log-probabilities of {server.url} and the trainer differ by {difference:.3g} on average for the "
                f"adapter {version.entry!r} (version {version.number}), and the tolerance is {self._tolerance:g}. The "
                "server has another base, another precision (`--dtype`), or read other files. If a difference of this "
                "size is expected, increase `fidelity_tolerance`.",
                version.entry,
            )

    async def sleep(self) -> None:
        """Let the servers free the memory of the device. They forget the adapters."""
        await self._unload(list(self._live.values()))
        await put_to_sleep(self.servers)

    async def wake(self) -> None:
        """Let the servers take the memory of the device. Adapters are loaded and compared when they are needed."""
        async with self.servers.connected() as servers:
            for server in servers:
                await server.wake(self.servers.server_timeout)

    async def _unload(self, versions: Sequence[Version]) -> None:
        async def unload(server: VLLMServer) -> None:
            with contextlib.suppress(ServerDownError):  # it has forgotten them when it is back, or keeps old ones
                for version in versions:
                    self._compared.discard((server.url, version.name))
                    await server.unload(version.name, self.servers.health_timeout)

        async with self.servers.connected() as servers:
            await asyncio.gather(*map(unload, servers))


def hash_tensors(tensors: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode())
        digest.update(tensor.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _difference(server_log_probs: Mapping[int, float], local_log_probs: Mapping[int, float]) -> float:
    """Mean absolute difference of log-probabilities. An unknown token counts as the least likely of our tokens."""
    least = min(local_log_probs.values())
    differences = [abs(value - local_log_probs.get(token, least)) for token, value in server_log_probs.items()]
    return sum(differences) / max(len(differences), 1)


def _advice(message: str, status: int) -> str:
    """Advice for a server that cannot load an adapter."""
    if "rank" in message.lower():
        return "Start the server with a larger `--max-lora-rank`, as `marft_trl.extras.engines.vllm_command` does."
    if "No adapter found" in message:
        return (
            "The server cannot see this folder: set `vllm_adapter_dir` to a folder that the trainer and all servers "
            "see under the same path."
        )
    if status in (404, 405):
        return (
            "The server cannot load adapters at run time: start it with `--enable-lora` and the environment variable "
            "`VLLM_ALLOW_RUNTIME_LORA_UPDATING=True`."
        )
    return "Start it with the command that `marft_trl.extras.engines.vllm_command` gives."
