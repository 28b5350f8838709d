"""No row is lost, none is mixed with another agent's, and the weights add up."""

from marft_trl.algorithms.rows import TokenLevel
from marft_trl.learning import batching
from marft_trl.learning.batching import Pools, Row

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st


ADAPTERS = {"x1": "left", "x2": "left", "x3": "right"}
rows_lists = st.lists(
    st.builds(
        lambda agent, prompt, completion, counts: Row(
            agent, ADAPTERS[agent], torch.arange(prompt), torch.arange(completion), counts=counts
        ),
        st.sampled_from(["x1", "x2", "x3"]),
        st.integers(1, 30),
        st.integers(0, 20),
        st.booleans(),
    ),
    max_size=30,
)


@given(rows=rows_lists, max_rows=st.integers(1, 8), max_tokens=st.one_of(st.none(), st.integers(10, 200)))
def test_micro_batches_hold_every_row_once_with_one_agent_within_the_bounds(rows, max_rows, max_tokens):
    batches = list(batching.micro_batches(rows, max_rows, max_tokens))
    batched_rows = [row for batch in batches for row in batch.rows]
    assert sorted(map(id, batched_rows)) == sorted(id(row) for row in rows if len(row.completion_ids))
    for batch in batches:
        assert {row.agent for row in batch.rows} == {batch.agent} and len(batch.rows) <= max_rows
        width = max(len(r.prompt_ids) for r in batch.rows) + max(len(r.completion_ids) for r in batch.rows)
        assert batch.num_tokens == len(batch.rows) * width
        assert max_tokens is None or len(batch.rows) == 1 or batch.num_tokens <= max_tokens


def test_rows_that_fit_keep_their_order():
    rows = [Row("x1", "left", torch.arange(n), torch.arange(2)) for n in (5, 1, 3)]
    (batch,) = batching.micro_batches(rows, 8, None)
    assert batch.rows == rows


@given(sizes=st.lists(st.integers(0, 4), min_size=1, max_size=12), per_slice=st.integers(1, 5))
def test_slices_hold_whole_episodes_and_all_of_them(sizes, per_slice):
    episodes = [[Row("x1", "left", torch.arange(1), torch.arange(1)) for _ in range(size)] for size in sizes]
    slices = batching.cut_slices(episodes, torch.randperm(len(episodes)), per_slice)
    assert sorted(id(row) for rows in slices for row in rows) == sorted(id(row) for rows in episodes for row in rows)
    for slice_rows in slices:
        ids = set(map(id, slice_rows))
        assert all(set(map(id, rows)) <= ids or ids.isdisjoint(map(id, rows)) for rows in episodes)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "bnpo"])
@given(first=rows_lists, second=rows_lists)
def test_weights_add_up_over_micro_batches_and_processes(loss_type, first, second):
    """Two processes with one slice each: an adapter's weights, divided by their number, add up to 1."""
    adapters = ["left", "right"]
    pools = Pools(adapters)
    counts = batching.count_rows([first], pools) + batching.count_rows([second], pools)
    rows_total, tokens_total = torch.zeros(2), torch.zeros(2)
    for rows in (first, second):
        (slice_,) = batching.make_slices([rows], pools, counts)
        assert slice_.adapters == {a for i, a in enumerate(adapters) if counts[0, i, 2]}
        for batch in batching.micro_batches(rows, 3, 60):
            w = batching.loss_weights(
                batch, slice_, loss_type, num_processes=2, steps_per_generation=1, level=TokenLevel()
            )
            index = adapters.index(batch.adapter)
            rows_total[index] += w.loss / 2
            tokens_total[index] += w.loss * w.entropy / 2
            if loss_type == "dapo" and batch.num_loss_tokens:
                # TRL: sum over tokens / (num_items / processes); times w.loss / processes: sum / all tokens
                assert w.loss / w.num_items_in_batch == pytest.approx(1 / counts[0, index, 1].item())
    for index, adapter in enumerate(adapters):
        assert tokens_total[index].item() == pytest.approx(1.0 if counts[0, index, 1] else 0.0, abs=1e-5)
        if loss_type == "grpo":
            with_tokens = sum(len(row.completion_ids) > 0 for row in first + second if row.adapter == adapter)
            share = with_tokens / max(counts[0, index, 0].item(), 1)
            assert rows_total[index].item() == pytest.approx(share, abs=1e-5)


def test_collate_by_hand():
    def row(prompt, completion, logps, **fields):
        ids = torch.tensor(prompt), torch.tensor(completion)
        return Row("x1", "left", *ids, ref_per_token_logps=torch.tensor(logps), **fields)

    rows = [row([5], [6, 7], [-1.0, -2.0], advantage=0.5), row([8, 9], [4], [-3.0], advantage=-0.5, counts=False)]
    batch = batching.collate(rows, pad_token_id=0, pad_to_multiple_of=None, device=torch.device("cpu"))
    assert batch["prompt_ids"].tolist() == [[0, 5], [8, 9]] and batch["prompt_mask"].tolist() == [[0, 1], [1, 1]]
    assert batch["completion_ids"].tolist() == [[6, 7], [4, 0]]
    assert batch["completion_mask"].tolist() == [[1, 1], [0, 0]]  # the second turn does not count
    assert batch["advantages"].tolist() == [0.5, -0.5]
    assert batch["ref_per_token_logps"].tolist() == [[-1.0, -2.0], [-3.0, 0.0]]
    assert "old_per_token_logps" not in batch
    assert batching.collate(rows, 0, 4, torch.device("cpu"))["prompt_ids"].shape == (2, 4)
    assert batching.MicroBatch("x1", rows).num_loss_tokens == 2
