"""Turns from earlier weights: which weights a batch is sampled from, and the importance weights of the tokens."""

import asyncio
import contextlib
import contextvars
import itertools
import math
import random
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from marft_trl.algorithms import functional
from marft_trl.algorithms.rows import Row
from marft_trl.config.team_setup import RunContext
from marft_trl.episodes.guard import EpisodeError
from marft_trl.episodes.records import SampledBy
from marft_trl.extras.engines.library import AdapterLibrary, MismatchError, Probe, ServedAdapter
from marft_trl.extras.engines.prefetch import Prefetcher, UpcomingRows
from marft_trl.extras.engines.server import RefusedError, ServerSettings
from marft_trl.extras.engines.vllm_generator import FidelityError, SamplingCorrection
from marft_trl.learning.adapter_updates import Schedule
from marft_trl.rollout.runner import RunMode, SeedKeys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from .helpers import config, lora, only_slice, team_trainer
from .test_parts import Board, one_process
from .vllm_server import fake_servers


# ---- Weights of tokens ----


@pytest.mark.parametrize(
    ("mode", "low", "high", "expected"),
    [
        ("token_truncate", None, 3.0, [2.0, 0.5, 3.0]),
        ("token_truncate", 0.8, 3.0, [2.0, 0.8, 3.0]),
        ("token_truncate", None, None, [2.0, 0.5, 4.0]),
        ("token_mask", None, 3.0, [2.0, 0.5, 0.0]),
        ("token_mask", 0.8, 3.0, [2.0, 0.0, 0.0]),
        ("sequence_truncate", None, 3.0, [3.0, 3.0, 3.0]),
        ("sequence_truncate", None, 9.0, [4.0, 4.0, 4.0]),
        ("sequence_mask", None, 3.0, [0.0, 0.0, 0.0]),
        ("sequence_mask", None, 9.0, [4.0, 4.0, 4.0]),
        ("sequence_mask", 5.0, 9.0, [0.0, 0.0, 0.0]),
    ],
)
def test_sampling_weights_by_hand(mode, low, high, expected):
    ratios = torch.tensor([2.0, 0.5, 4.0])
    weights = functional.sampling_weights(ratios.log(), mode, low, high)
    torch.testing.assert_close(weights, torch.tensor(expected))


def row(number, agent="solver", sampled=(-1.0, -2.0), scored=(-1.0, -2.0), version=3, **fields):
    return Row(
        agent,
        agent,
        torch.tensor([1]),
        torch.arange(len(scored)),
        number=number,
        sampled_by=SampledBy("http://a", version, 7),
        sampling_logps=None if sampled is None else torch.tensor(sampled),
        old_per_token_logps=torch.tensor(scored),
        **fields,
    )


def correction(tmp_path, tolerance=0.1, staleness=lambda adapter, version: 0, **changes):
    board = Board()
    run = RunContext(config(tmp_path, use_vllm=True, **changes), None, None, board.metrics(), one_process())
    return SamplingCorrection(run, tolerance, staleness), board["train"]


def test_turns_are_weighed_and_reported(tmp_path):
    scored, sampled = (math.log(0.5), math.log(0.2)), (math.log(0.25), math.log(0.2))
    fixed, metrics = correction(tmp_path, tolerance=1.0)
    rows = fixed.corrected([row(0, scored=scored, sampled=sampled), row(1, agent="judge"), row(2, sampled=None)])
    assert [weighted_row.sampling_weights.tolist() for weighted_row in rows[1:]] == [[1.0, 1.0], [1.0, 1.0]]
    torch.testing.assert_close(rows[0].sampling_weights, torch.tensor([2.0, 2.0]))
    name = "sampling/sampling_logp_difference"
    assert metrics[f"{name}/mean"] == [pytest.approx(math.log(2) / 4)]
    assert metrics[f"{name}/max"] == [pytest.approx(math.log(2))]
    assert metrics[f"agents/solver/{name}/mean"] == [pytest.approx(math.log(2) / 2)]
    assert metrics[f"agents/judge/{name}/mean"] == [0.0]
    ratio = "sampling/importance_sampling_ratio"
    assert [metrics[f"{ratio}/{kind}"][0] for kind in ("min", "mean", "max")] == pytest.approx([1.0, 1.5, 2.0])
    assert metrics["sampling/masked_tokens"] == [0.0] and metrics["sampling/staleness"] == [0.0]
    fixed, metrics = correction(tmp_path, tolerance=1.0, vllm_importance_sampling_clip_max=1.5)
    assert not fixed.corrected([row(0, scored=scored, sampled=sampled)])[0].sampling_weights.any()
    assert metrics["sampling/masked_tokens"] == [1.0]
    fixed, metrics = correction(tmp_path, vllm_importance_sampling_correction=False)
    assert fixed.corrected([row(0)])[0].sampling_weights is None and f"{ratio}/mean" not in metrics


def test_a_server_with_other_weights_ends_the_run_and_stale_turns_do_not(tmp_path):
    wrong = row(0, sampled=(-1.5, -2.5), version=3)
    fixed, _ = correction(tmp_path)
    message = r"The log-probabilities of 'solver' on http://a \(version 3 .* by 0.5 on average over 2 tokens"
    with pytest.raises(FidelityError, match=message):
        fixed.corrected([wrong, row(1, agent="judge")])
    stale, metrics = correction(tmp_path, staleness=lambda adapter, version: 4 - version, max_staleness=1)
    assert stale.corrected([wrong, row(1, version=4)])[0].sampling_weights is not None
    assert metrics["sampling/staleness"] == [0.5]
    with pytest.raises(RuntimeError, match="'solver' was sampled from an adapter that is 2 versions old"):
        stale.corrected([row(0, version=2)])


def test_a_difference_below_the_tolerance_logs_one_warning(tmp_path, caplog):
    fixed, _ = correction(tmp_path, tolerance=1.0)
    for _ in range(2):
        fixed.corrected([row(0, sampled=(-1.5, -2.5))])
    assert caplog.text.count("by 0.5 on average") == 1 and "`fidelity_tolerance=1` stops the run" in caplog.text


@pytest.mark.parametrize("level", ["token", "action"])
def test_weights_multiply_the_loss_of_their_turns(small_model, tmp_path, level):
    trainer = team_trainer(small_model, tmp_path, settings={"level": level})
    slices = only_slice(trainer, [trainer.train_dataset[index // 4] for index in range(8)])

    def gradient(factor=None):
        weights = [None if factor is None else torch.full((len(row.completion_ids),), factor) for row in slices.rows]
        rows = [replace(row, sampling_weights=weight) for row, weight in zip(slices.rows, weights, strict=True)]
        trainer.model.zero_grad()
        trainer.compute_loss(trainer.model, replace(slices, rows=rows)).backward()
        return torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None])

    plain = gradient()
    torch.testing.assert_close(gradient(1.0), plain)
    torch.testing.assert_close(gradient(2.0), 2 * plain)
    assert not gradient(0.0).any() and plain.any()


# ---- Which weights a batch is sampled from ----


PINNED = contextvars.ContextVar("pinned")


class FakeRunner:
    """Returns, after a random time, the version that each row was sampled from instead of episodes."""

    def __init__(self, seed, fails=None):
        self.version, self.pins, self.draw = -1, [], random.Random(seed)
        self.dropped_turns, self.fails, self.threads = 0, fails, set()
        self.keys, self.mode, self.randomness = SeedKeys("seed"), RunMode(), SimpleNamespace()
        self.generator = self
        self.session = lambda: contextlib.nullcontext(self)

    def publish(self):
        self.version += 1

    def pin(self):
        self.pins.append(self.version)
        return self.version

    def release(self, pin):
        self.pins.remove(pin)

    def changed(self, mode):
        return self

    @contextlib.contextmanager
    def using(self, pin):
        PINNED.set(pin)
        yield

    async def run(self, rows, key, failures):
        self.threads.add(threading.get_ident())
        await asyncio.sleep(self.draw.random() * 0.01)
        if self.fails == key[1]:
            raise EpisodeError("lost", 0)
        return [(row["number"], PINNED.get(), key) for row in rows]


def overlapped(passes, every, accumulation, staleness, seed, fails=None):
    """What each batch was sampled from, in the order of training."""
    state = SimpleNamespace(micro_step=0)
    schedule = Schedule(("a",), every)
    ahead, runner = UpcomingRows(state, schedule, staleness), FakeRunner(seed, fails)
    samples, largest = [], 0
    args = SimpleNamespace(max_staleness=staleness, on_episode_error="raise", reward_timeout=None)
    overlap = Prefetcher(RunContext(args, None, state, None, one_process()), runner, ahead, None)
    number = 0
    try:
        for count in passes:
            batches = [[{"number": number + index}] for index in range(count)]
            number += count
            source = iter([batch for batch in batches for _ in range(every)])
            # As the Trainer reads them
            while micro := [*itertools.islice(ahead.over(source), accumulation)]:
                for rows in micro:
                    if schedule.is_due(state.micro_step):
                        ((row_number, version, key),) = overlap.episodes(rows)
                        assert row_number == rows[0]["number"]
                        samples.append((row_number, version, key[1]))
                        largest = max(largest, len(runner.pins))
                    state.micro_step += 1
    finally:
        overlap.close()
    assert not runner.pins and len(runner.threads) == 1 and threading.get_ident() not in runner.threads
    return samples, largest


@settings(max_examples=40, deadline=None)
@given(
    passes=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    every=st.integers(1, 4),
    accumulation=st.integers(1, 5),
    staleness=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_a_batch_is_sampled_from_the_expected_version(passes, every, accumulation, staleness, seed):
    samples, largest = overlapped(passes, every, accumulation, staleness, seed)
    assert [row_number for row_number, _, _ in samples] == list(range(sum(passes)))  # none is dropped, all in order
    starts = [sum(passes[:index]) for index in range(len(passes))]
    for row_number, version, run in samples:
        start = max(start for start in starts if start <= row_number)  # nothing is read beyond the end of a pass
        assert version == max(start, row_number - staleness) and run == row_number
    assert largest <= staleness


def test_a_failing_batch_fails_when_it_is_due():
    with pytest.raises(EpisodeError, match="lost"):
        overlapped([6], 1, 1, 2, seed=1, fails=2)


# ---- Servers' settings and files, without a model ----


def library(folder, servers):
    def next_token(ids):
        return torch.log_softmax(torch.arange(50).float() / 10, dim=-1)

    tensors = {"base_model.model.x.lora_A.weight": torch.zeros(2, 2)}
    entries = {"actor": ServedAdapter(lambda: tensors, lora(), next_token)}
    settings = ServerSettings(tuple(server.url for server in servers), server_timeout=5.0)
    return AdapterLibrary(folder, entries, settings, 50, 0.01)


def right(adapter, ids, temperature):
    logps = torch.log_softmax(torch.arange(50).double() / 10 / temperature, dim=-1)
    return {token: logps[token].item() for token in range(45, 50)}


def wrong(*arguments):
    return {token: logp - 0.5 for token, logp in right(*arguments).items()}


@pytest.fixture
def servers():
    with fake_servers(2) as pair:
        for server in pair:
            server.logps = right
        yield pair


def test_servers_are_compared_before_they_are_used(servers, tmp_path):
    adapters = library(tmp_path, servers)
    version = adapters.publish()["actor"]
    assert all(server.loaded == {version.name: version.folder} for server in servers)
    servers[1].loaded.clear()  # the server restarted
    assert adapters.publish()["actor"] is version and version.name in servers[1].loaded
    servers[1].loaded.clear()
    servers[1].logps = wrong
    message = rf"of {servers[1].url} and the trainer differ by .* for the adapter 'actor' \(version 0\)"
    with pytest.raises(MismatchError, match=message):
        adapters.publish()
    assert not servers[1].loaded  # an adapter that fails the comparison is unloaded


def test_names_of_adapters_are_never_reused(servers, tmp_path):
    adapters = library(tmp_path, servers)
    first = adapters.publish()["actor"]
    adapters.close()
    second = adapters.publish()["actor"]
    assert second.name != first.name and second.folder != first.folder and second.number == first.number + 1
    assert [list(server.loaded) for server in servers] == [[second.name]] * 2


def test_adapters_that_were_loaded_without_a_comparison_are_compared(servers, tmp_path):
    def breaks(adapter, ids, temperature):
        raise OSError

    server, adapters = servers[0], library(tmp_path, servers[:1])
    server.logps = breaks  # answers 500
    assert adapters.publish()["actor"].name in server.loaded
    server.logps = wrong
    with pytest.raises(MismatchError):
        adapters.publish()
    server.logps = right
    assert adapters.publish()["actor"].name in server.loaded


def test_flags_that_a_server_lacks_are_named(servers, tmp_path, caplog):
    server, adapters = servers[0], library(tmp_path, servers[:1])
    server.takes_adapters = False
    with pytest.raises(RefusedError, match="--enable-lora.*VLLM_ALLOW_RUNTIME_LORA_UPDATING"):
        adapters.publish()
    server.takes_adapters, server.max_loras = True, 0
    adapters.publish()
    assert "--max-loras 1" in caplog.text
    server.loaded.clear()  # the server restarts with other flags
    server.logps = lambda adapter, ids, temperature: right(adapter, ids, 1.0)
    for adapter_library in (adapters, library(tmp_path, [server])):
        with pytest.raises(RefusedError, match="--logprobs-mode processed_logprobs"):
            adapter_library.publish()


def test_a_probe_knows_the_most_likely_tokens():
    probe = Probe.from_log_probs([1, 2], torch.log_softmax(torch.arange(1000).float() / 100, dim=-1))
    assert len(probe.logps) == 512 and 999 in probe.logps and 0 not in probe.logps
    assert probe.hot_logps[999] == pytest.approx(torch.log_softmax(torch.arange(1000).double() / 200, 0)[999].item())


def test_log_probabilities_that_are_no_numbers_are_a_mismatch(servers, tmp_path):
    adapters = library(tmp_path, servers[:1])
    servers[0].logps = lambda *arguments: dict.fromkeys(right(*arguments), math.nan)
    with pytest.raises(MismatchError):
        adapters.publish()
    assert not servers[0].loaded


def test_files_of_states_that_no_server_has_are_deleted(servers, tmp_path):
    adapters, versions = library(tmp_path, servers), []
    for _ in range(4):
        (tensor,) = adapters._entries["actor"].tensors().values()
        tensor += 1
        versions.append(adapters.publish()["actor"])
    # Those of the state before last may still be read
    assert [Path(version.folder).exists() for version in versions] == [False, False, True, True]
    assert all(server.loaded == {versions[-1].name: versions[-1].folder} for server in servers)
