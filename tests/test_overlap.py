"""Turns of earlier weights: which weights a batch is sampled from, and what its tokens weigh."""

import asyncio
import contextvars
import math
import random
import threading
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

from marft_trl.algorithms import functional
from marft_trl.algorithms.rows import Row, Slice
from marft_trl.config.team_setup import RunContext
from marft_trl.episodes.guard import EpisodeError
from marft_trl.episodes.records import SampledBy
from marft_trl.extras.engines.library import AdapterLibrary, Entry, MismatchError, Probe
from marft_trl.extras.engines.prefetch import Prefetcher, UpcomingRows
from marft_trl.extras.engines.server import RefusedError, ServerSettings
from marft_trl.extras.engines.vllm_generator import FidelityError, SamplingCorrection
from marft_trl.learning.adapter_updates import Schedule
from marft_trl.rollout.runner import RunMode, SeedKeys
from marft_trl.runs.checkpoints import load_rollouts, save_rollouts
from marft_trl.system.run_metrics import Metrics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from .helpers import config, lora, team_trainer
from .test_parts import one_process
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
    found = functional.sampling_weights(ratios.log(), mode, low, high)
    torch.testing.assert_close(found, torch.tensor(expected))


def row(number, agent="solver", theirs=(-1.0, -2.0), ours=(-1.0, -2.0), version=3, **fields):
    return Row(
        agent,
        agent,
        torch.tensor([1]),
        torch.arange(len(ours)),
        number=number,
        sampled_by=SampledBy("http://a", version, 7),
        sampling_logps=None if theirs is None else torch.tensor(theirs),
        old_per_token_logps=torch.tensor(ours),
        **fields,
    )


def correction(tmp_path, tolerance=0.1, staleness=lambda adapter, version: 0, **changes):
    store = {"train": defaultdict(list), "eval": defaultdict(list)}
    metrics = Metrics(store, lambda: True)
    args = config(tmp_path, use_vllm=True, **changes)
    run = RunContext(args, None, None, metrics, one_process())
    return SamplingCorrection(run, tolerance, staleness), store["train"]


def test_turns_are_weighed_and_reported(tmp_path):
    ours, theirs = (math.log(0.5), math.log(0.2)), (math.log(0.25), math.log(0.2))
    fixed, metrics = correction(tmp_path, tolerance=1.0)
    rows = fixed.corrected([row(0, ours=ours, theirs=theirs), row(1, agent="judge"), row(2, theirs=None)])
    assert [its.sampling_weights.tolist() for its in rows[1:]] == [[1.0, 1.0], [1.0, 1.0]]
    torch.testing.assert_close(rows[0].sampling_weights, torch.tensor([2.0, 2.0]))
    name = "sampling/sampling_logp_difference"
    assert metrics[f"{name}/mean"] == [pytest.approx(math.log(2) / 4)]
    assert metrics[f"{name}/max"] == [pytest.approx(math.log(2))]
    assert metrics[f"agents/solver/{name}/mean"] == [pytest.approx(math.log(2) / 2)]
    assert metrics[f"agents/judge/{name}/mean"] == [0.0]
    ratio = "sampling/importance_sampling_ratio"
    assert [metrics[f"{ratio}/{it}"][0] for it in ("min", "mean", "max")] == pytest.approx([1.0, 1.5, 2.0])
    assert metrics["sampling/masked_tokens"] == [0.0] and metrics["sampling/staleness"] == [0.0]
    fixed, metrics = correction(tmp_path, tolerance=1.0, vllm_importance_sampling_clip_max=1.5)
    assert not fixed.corrected([row(0, ours=ours, theirs=theirs)])[0].sampling_weights.any()
    assert metrics["sampling/masked_tokens"] == [1.0]
    fixed, metrics = correction(tmp_path, vllm_importance_sampling_correction=False)
    assert fixed.corrected([row(0)])[0].sampling_weights is None and f"{ratio}/mean" not in metrics


def test_a_server_with_other_weights_ends_the_run_and_stale_turns_do_not(tmp_path):
    wrong = row(0, theirs=(-1.5, -2.5), version=3)
    fixed, _ = correction(tmp_path)
    message = r"The log-probabilities of 'solver' on http://a \(version 3 .* by 0.5 on average over 2 tokens"
    with pytest.raises(FidelityError, match=message):
        fixed.corrected([wrong, row(1, agent="judge")])
    stale, metrics = correction(tmp_path, staleness=lambda adapter, version: 4 - version, max_staleness=1)
    assert stale.corrected([wrong, row(1, version=4)])[0].sampling_weights is not None
    assert metrics["sampling/staleness"] == [0.5]
    with pytest.raises(RuntimeError, match="'solver' was sampled from an adapter that is 2 versions old"):
        stale.corrected([row(0, version=2)])


def test_a_difference_is_said_before_it_is_too_large(tmp_path, caplog):
    fixed, _ = correction(tmp_path, tolerance=1.0)
    for _ in range(2):
        fixed.corrected([row(0, theirs=(-1.5, -2.5))])
    assert caplog.text.count("by 0.5 on average") == 1 and "`fidelity_tolerance=1` stops the run" in caplog.text


@pytest.mark.parametrize("level", ["token", "action"])
def test_weights_multiply_the_loss_of_their_turns(small_model, tmp_path, level):
    trainer = team_trainer(small_model, tmp_path, settings={"level": level})
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    rows = [trainer.train_dataset[index // 4] for index in range(8)]
    slices = trainer.parts.experience.for_training(rows)[0]

    def gradient(change):
        changed = replace(slices, rows=[change(index, one) for index, one in enumerate(slices.rows)])
        trainer.model.zero_grad()
        loss = trainer.compute_loss(trainer.model, changed)
        loss.backward()
        return loss.item(), torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None])

    def weighed(factor):
        def change(index, one):
            return replace(one, sampling_weights=torch.full((len(one.completion_ids),), factor))

        return change

    plain, once, twice = gradient(lambda index, one: one), gradient(weighed(1.0)), gradient(weighed(2.0))
    torch.testing.assert_close(once[1], plain[1])
    torch.testing.assert_close(twice[1], 2 * plain[1])
    assert not gradient(weighed(0.0))[1].any() and plain[1].any()


def test_rows_of_servers_are_stored(tmp_path):
    stored = row(0, sampling_weights=torch.tensor([0.5, 2.0]))
    save_rollouts(tmp_path, 0, 1, 5, [Slice([stored])])
    _, (slice_,), _ = load_rollouts(tmp_path, 0, 1)
    (loaded,) = slice_.rows
    assert loaded.sampled_by == stored.sampled_by and isinstance(loaded.sampled_by, SampledBy)
    assert loaded.sampling_weights.equal(stored.sampling_weights)
    assert loaded.sampling_logps.equal(stored.sampling_logps)


# ---- Which weights a batch is sampled from ----


class FakeRunner:
    """Episodes are what they were sampled from; they take random times."""

    def __init__(self, seed, fails=None):
        self.version, self.pins, self.draw = -1, [], random.Random(seed)
        self.dropped_turns, self.fails, self.threads = 0, fails, set()
        self.keys, self.mode, self.randomness = SeedKeys("seed"), RunMode(), SimpleNamespace()
        self.generator = self

    def publish(self):
        self.version += 1

    def pin(self):
        self.pins.append(self.version)
        return self.version

    def release(self, pin):
        self.pins.remove(pin)

    def changed(self, mode):
        return self

    def connected(self):
        return self

    async def __aenter__(self):
        return self

    async def __aexit__(self, *error):
        return None

    def using(self, pin):
        @contextmanager
        def used():
            PINNED.set(pin)
            yield

        return used()

    async def collect(self, rows, key, failures):
        self.threads.add(threading.get_ident())
        await asyncio.sleep(self.draw.random() * 0.01)
        if self.fails == key[1]:
            raise EpisodeError("lost", 0)
        return [(one["number"], PINNED.get(), key) for one in rows]


PINNED = contextvars.ContextVar("pinned")


def overlapped(passes, every, accumulation, staleness, seed, fails=None):
    """What each batch was sampled from, in the order of training."""
    state = SimpleNamespace(micro_step=0)
    schedule = Schedule(("a",), every)
    ahead, runner = UpcomingRows(state, schedule, staleness), FakeRunner(seed, fails)
    found, largest = [], 0
    args = SimpleNamespace(max_staleness=staleness, on_episode_error="raise", reward_timeout=None)
    overlap = Prefetcher(RunContext(args, None, state, None, one_process()), runner, ahead, None)
    number = 0
    try:
        for count in passes:
            batches = [[{"number": number + index}] for index in range(count)]
            number += count
            source = iter([batch for batch in batches for _ in range(every)])
            while True:
                micro = []
                for _ in range(accumulation):  # as the Trainer reads them
                    try:
                        micro.append(next(ahead.over(source)))
                    except StopIteration:
                        break
                if not micro:
                    break
                for rows in micro:
                    if schedule.is_due(state.micro_step):
                        ((which, version, key),) = overlap.episodes(rows)
                        assert which == rows[0]["number"]
                        found.append((which, version, key[1]))
                        largest = max(largest, len(runner.pins))
                    state.micro_step += 1
    finally:
        overlap.close()
    assert not runner.pins and len(runner.threads) == 1 and threading.get_ident() not in runner.threads
    return found, largest


@settings(max_examples=40, deadline=None)
@given(
    passes=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    every=st.integers(1, 4),
    accumulation=st.integers(1, 5),
    staleness=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_a_batch_is_sampled_from_the_weights_of_so_many_publications_ago(passes, every, accumulation, staleness, seed):
    found, largest = overlapped(passes, every, accumulation, staleness, seed)
    assert [which for which, _, _ in found] == list(range(sum(passes)))  # none is dropped, all in order
    starts = [sum(passes[:index]) for index in range(len(passes))]
    for which, version, run in found:
        start = max(start for start in starts if start <= which)  # nothing is read beyond the end of a pass
        assert version == max(start, which - staleness) and run == which
    assert largest <= staleness


def test_a_failing_batch_fails_when_it_is_due():
    with pytest.raises(EpisodeError, match="lost"):
        overlapped([6], 1, 1, 2, seed=1, fails=2)


# ---- Servers' settings and files, without a model ----


def library(folder, servers, weights=0.0, tolerance=0.01, vocabulary=50):
    def next_token(ids):
        logits = torch.arange(vocabulary).float() / 10 + weights
        return torch.log_softmax(logits, dim=-1)

    tensors = {"base_model.model.x.lora_A.weight": torch.full((2, 2), weights)}
    entries = {"actor": Entry(lambda: tensors, lora(), next_token)}
    settings = ServerSettings(tuple(server.url for server in servers), server_timeout=5.0)
    return AdapterLibrary(folder, entries, settings, vocabulary, tolerance)


def right(adapter, ids, temperature):
    logps = torch.log_softmax(torch.arange(50).double() / 10 / temperature, dim=-1)
    return {token: logps[token].item() for token in range(45, 50)}


def test_servers_are_compared_before_they_are_used(tmp_path):
    with fake_servers(2) as servers:
        for server in servers:
            server.logps = right
        one = library(tmp_path, servers)
        version = one.publish()["actor"]
        assert all(server.loaded == {version.name: version.folder} for server in servers)
        servers[1].loaded.clear()  # it was started again
        assert one.publish()["actor"] is version and version.name in servers[1].loaded
        servers[1].loaded.clear()
        servers[1].logps = lambda *asked: {token: value - 0.5 for token, value in right(*asked).items()}
        message = rf"of {servers[1].url} and the trainer differ by .* for the adapter 'actor' \(version 0\)"
        with pytest.raises(MismatchError, match=message):
            one.publish()
        assert not servers[1].loaded  # what was compared and is wrong is not left there


def test_a_name_is_never_given_twice(tmp_path):
    with fake_servers() as (server,):
        server.logps = right
        one = library(tmp_path, [server])
        first = one.publish()["actor"]
        one.close()
        second = one.publish()["actor"]
        assert second.name != first.name and second.folder != first.folder and second.number == first.number + 1
        assert list(server.loaded) == [second.name]


def test_what_was_loaded_but_not_compared_is_compared(tmp_path):
    with fake_servers() as (server,):

        def breaks(adapter, ids, temperature):
            raise OSError

        server.logps = breaks  # answers 500
        one = library(tmp_path, [server])
        version = one.publish()["actor"]
        assert version.name in server.loaded
        server.logps = lambda *asked: {token: value - 0.5 for token, value in right(*asked).items()}
        with pytest.raises(MismatchError):
            one.publish()
        server.logps = right
        assert one.publish()["actor"].name in server.loaded


def test_a_server_that_comes_back_with_other_flags_is_refused(tmp_path):
    with fake_servers() as (server,):
        server.logps = right
        one = library(tmp_path, [server])
        one.publish()
        server.loaded.clear()
        server.logps = lambda adapter, ids, temperature: right(adapter, ids, 1.0)
        with pytest.raises(RefusedError, match="--logprobs-mode processed_logprobs"):
            one.publish()


def test_flags_that_a_server_lacks_are_named(tmp_path, caplog):
    with fake_servers() as (server,):
        server.logps = lambda adapter, ids, temperature: right(adapter, ids, 1.0)
        with pytest.raises(RefusedError, match="--logprobs-mode processed_logprobs"):
            library(tmp_path, [server]).publish()
        server.logps, server.takes_adapters = right, False
        with pytest.raises(RefusedError, match="--enable-lora.*VLLM_ALLOW_RUNTIME_LORA_UPDATING"):
            library(tmp_path, [server]).publish()
        server.takes_adapters, server.max_loras = True, 0
        library(tmp_path, [server]).publish()
        assert "--max-loras 1" in caplog.text


def test_a_probe_knows_the_most_likely_tokens():
    probe = Probe.from_log_probs([1, 2], torch.log_softmax(torch.arange(1000).float() / 100, dim=-1))
    assert len(probe.logps) == 512 and 999 in probe.logps and 0 not in probe.logps
    assert probe.hot_logps[999] == pytest.approx(torch.log_softmax(torch.arange(1000).double() / 200, 0)[999].item())
