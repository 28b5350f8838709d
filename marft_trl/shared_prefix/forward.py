# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""
Fast forward pass. A prefix that several rows share is computed once, and only positions whose log-probability is used
reach the LM head, which is TRL's.

Why it is exact: in a causal transformer, the hidden state of a token depends only on the tokens up to it, on their
positions and on the weights. Rows that begin with the same tokens have the same hidden states there, and later tokens
only read the keys and values of the prefix. So the prefix goes through the model once. Its keys and values are
repeated for every row, in front of the row's own keys and values. Positions continue after the prefix, and padding in
between is masked. The gradients of all rows add up in the shared keys and values. The results differ from those of a
plain pass only in the order of summation, that is, by rounding. With dropout, rows that share a prefix also share its
dropout mask.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from ..seams.models import checkpointing_with_caches, fused_head
from ..seams.sharding import with_all_layers


@dataclass(frozen=True)
class Cluster:
    """Sequences whose first `length` tokens are the same."""

    length: int
    rows: tuple[int, ...]

    @property
    def saved(self) -> int:
        """Number of tokens that sharing saves."""
        return self.length * (len(self.rows) - 1)


def clusters(sequences: Sequence[Sequence[int]]) -> list[Cluster]:
    """
    Partition non-empty sequences into clusters with a common prefix, sorted by their first row, so that many tokens
    are shared. The last token of a sequence is never shared, so that every row has a token left to compute. A sequence
    that shares nothing is a cluster of its own.

    After sorting, the prefixes form a tree. From the leaves to the root, the clusters below a node are joined at the
    node's prefix if this saves more tokens than the clusters save by themselves.
    """
    order = sorted(range(len(sequences)), key=lambda row: tuple(sequences[row]))
    nodes: list[tuple[int, list[Cluster]]] = [(0, [])]  # from the root down: depth, and the clusters below so far
    previous: Sequence[int] = ()
    for row in order:
        sequence = sequences[row]
        _close(nodes, _common(previous, sequence))
        if nodes[-1][0] < len(sequence) - 1:
            nodes.append((len(sequence) - 1, []))
        nodes[-1][1].append(Cluster(len(sequence) - 1, (row,)))
        previous = sequence
    _close(nodes, 0)
    return sorted(_joined(*nodes[0]), key=lambda cluster: cluster.rows)


def plan_passes(
    prompts: Sequence[Sequence[int]], more: Sequence[int], kinds: Sequence[str] | None = None
) -> list[Cluster]:
    """
    Return clusters of rows that share a prefix of their prompts, or an empty list if separate rows take fewer tokens,
    padding included. `more` has the tokens of each row after the prompt. Rows of different `kinds` share nothing.
    """
    found = clusters(prompts) if kinds is None else _clusters_by_kind(prompts, kinds)
    if len(found) == len(prompts):
        return []
    lengths = [len(prompt) + count for prompt, count in zip(prompts, more, strict=True)]
    rest = max(lengths[row] - cluster.length for cluster in found for row in cluster.rows)
    num_tokens = len(found) * max(cluster.length for cluster in found) + len(lengths) * rest
    return found if num_tokens < len(lengths) * max(lengths) else []


def _clusters_by_kind(sequences: Sequence[Sequence[int]], kinds: Sequence[str]) -> list[Cluster]:
    found = []
    for kind in dict.fromkeys(kinds):
        places = [place for place, value in enumerate(kinds) if value == kind]
        for cluster in clusters([sequences[place] for place in places]):
            found.append(Cluster(cluster.length, tuple(places[row] for row in cluster.rows)))
    return sorted(found, key=lambda cluster: cluster.rows)


def _close(nodes: list[tuple[int, list[Cluster]]], depth: int) -> None:
    """Close the nodes deeper than `depth`. Their clusters move to the node at that depth."""
    while nodes[-1][0] > depth:
        below = _joined(*nodes.pop())
        if nodes[-1][0] < depth:
            nodes.append((depth, []))
        nodes[-1][1].extend(below)


def _joined(depth: int, below: list[Cluster]) -> list[Cluster]:
    """Join the clusters that save more tokens with the prefix of a node than with their own."""
    joining = [cluster for cluster in below if cluster.saved < len(cluster.rows) * depth]
    whole = Cluster(depth, tuple(sorted(row for cluster in joining for row in cluster.rows)))
    if whole.saved <= sum(cluster.saved for cluster in joining):
        return below
    return [whole, *(cluster for cluster in below if cluster.saved >= len(cluster.rows) * depth)]


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    low, high = 0, min(len(first), len(second))
    while low < high:  # slices compare at the speed of C
        middle = (low + high + 1) // 2
        low, high = (middle, high) if first[low:middle] == second[low:middle] else (low, middle - 1)
    return low


class KeptLayer(DynamicLayer):
    """Cache layer that keeps the keys and values of one pass, with gradients. A recomputed layer changes nothing."""

    is_initialized: bool

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        if not self.is_initialized:
            self.keys, self.values, self.is_initialized = key_states, value_states, True
        return key_states, value_states

    def get_seq_length(self) -> int:
        return 0  # nothing comes before the pass


class RepeatedLayer(DynamicLayer):
    """Cache layer that puts kept keys and values in front of those of a pass: for row `i`, those at `index[i]`."""

    def __init__(self, kept: KeptLayer, index: torch.Tensor):
        super().__init__()
        self.keys, self.values, self.index, self.is_initialized = kept.keys, kept.values, index, True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        index = self.index.to(self.keys.device)  # of a base that is spread over devices, a layer may be on another
        keys, values = self.keys.index_select(0, index), self.values.index_select(0, index)
        return torch.cat([keys, key_states], dim=-2), torch.cat([values, value_states], dim=-2)


class RowAdapters(NamedTuple):
    """Adapters of rows that go through a model together."""

    names: Sequence[str]
    use: Callable[[Sequence[str]], None]  # called before each pass with the adapters of its rows


def use_adapters(adapters: RowAdapters | None, rows: Iterable[int]) -> None:
    if adapters is not None:
        adapters.use([adapters.names[row] for row in rows])


def hidden_states(
    backbone: nn.Module,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    share: bool = True,
    images: Callable[[torch.Tensor, Sequence[int]], dict[str, torch.Tensor]] | None = None,
) -> torch.Tensor:
    """
    Compute the hidden states `(B, V, H)` that predict the tokens of completions. `V` is the length of the longest
    completion, at least 1; states after the end of a completion are not valid. An empty completion gets the hidden
    state of the last token of its prompt, which is never empty. `images` gives the inputs for token ids `(B, S)` with
    images before the ends of the prompts. Their positions are the model's, and they share nothing.
    """
    device = next(backbone.parameters()).device
    counts = [max(len(completion), 1) for completion in completions]
    parts = zip(prompts, completions, counts, strict=True)
    rows = [[*prompt, *completion[: count - 1]] for prompt, completion, count in parts]
    groups = plan_passes(prompts, [count - 1 for count in counts]) if share and images is None else []
    if groups:
        with checkpointing_with_caches(backbone):
            hidden, starts = shared_pass(backbone, rows, groups, RepeatedLayer)
    else:
        ids, mask = padded(rows, device)
        positions = torch.arange(ids.size(1), device=device).expand_as(ids)
        inputs = {"position_ids": positions} if images is None else images(ids, list(map(len, prompts)))
        output = backbone(input_ids=ids, attention_mask=mask, use_cache=False, **inputs)
        hidden, starts = output.last_hidden_state, [0] * len(rows)
    first = [len(row) - count - start for row, count, start in zip(rows, counts, starts, strict=True)]
    after = torch.arange(max(counts), device=hidden.device)
    index = (torch.tensor(first, device=hidden.device).unsqueeze(1) + after).clamp(max=hidden.size(1) - 1)
    return hidden.gather(1, index.unsqueeze(-1).expand(-1, -1, hidden.size(-1)))


def shared_pass(
    backbone: nn.Module,
    rows: Sequence[Sequence[int]],
    groups: Sequence[Cluster],
    layer_class: Callable[[KeptLayer, torch.Tensor], RepeatedLayer],
    adapters: RowAdapters | None = None,
) -> tuple[torch.Tensor, list[int]]:
    """
    Run a pass over the prefixes of the groups, and one over the rest of each row with a cache of `layer_class` layers.
    Returns the hidden states `(B, S, H)` of the rest, padded on the right, and where it begins in each row.
    """
    device = next(backbone.parameters()).device
    starts, index = [0] * len(rows), [0] * len(rows)
    for number, group in enumerate(groups):
        for row in group.rows:
            starts[row], index[row] = group.length, number
    use_adapters(adapters, (group.rows[0] for group in groups))
    kept, kept_mask, prefix_states = prefill(backbone, [rows[group.rows[0]][: group.length] for group in groups])
    which = torch.tensor(index, device=device)
    cache = Cache(layers=[layer_class(layer, which) for layer in kept.layers])
    use_adapters(adapters, range(len(rows)))
    ids, mask = padded([row[start:] for row, start in zip(rows, starts, strict=True)], device)
    output = backbone(
        input_ids=ids,
        attention_mask=torch.cat([kept_mask[which], mask], dim=1),
        position_ids=torch.tensor(starts, device=device).unsqueeze(1) + torch.arange(ids.size(1), device=device),
        past_key_values=cache,
        use_cache=False,  # the model must not create another cache
    )
    hidden = output.last_hidden_state
    if torch.distributed.is_initialized():  # only processes shard the layers
        hidden = with_all_layers(hidden, prefix_states, backbone)
    return hidden, starts


def prefill(
    backbone: nn.Module, prefixes: Sequence[Sequence[int]], cache: Cache | None = None
) -> tuple[Cache, torch.Tensor, torch.Tensor]:
    """
    Compute the keys and values of prefixes, padded on the left, their mask `(G, W)`, 0 for padding, and their last
    hidden states `(G, W, H)`. By default, the layers of the cache keep what they are given.
    """
    ids, mask = padded(prefixes, next(backbone.parameters()).device, side="left")
    cache = Cache(layer_class_to_replicate=KeptLayer) if cache is None else cache
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    inputs = {"attention_mask": mask, "position_ids": positions, "past_key_values": cache}
    return cache, mask, backbone(input_ids=ids, use_cache=False, **inputs).last_hidden_state


def padded(
    rows: Sequence[Sequence[int]], device: torch.device, side: str = "right"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad rows of token ids with 0 to a batch `(B, S)`, and return it with its mask: 0 for padding, else 1."""
    pad = partial(pad_sequence, batch_first=True, padding_side=side)
    ids = [torch.tensor(row, dtype=torch.long) for row in rows]
    return pad(ids).to(device), pad(list(map(torch.ones_like, ids))).to(device)


# Number of logits that TRL's head holds at once on a CPU. More do not fit into its caches and take twice the time.
_LOGITS_AT_ONCE = 2**22


def scored_at_once(vocabulary: int, device: torch.device) -> int:
    """Number of positions that go through the LM head together. On a GPU, its kernel cuts them further."""
    return max(_LOGITS_AT_ONCE // vocabulary, 1) if device.type == "cpu" else 4096


def score(
    model: PreTrainedModel, hidden: torch.Tensor, tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probabilities and, if the head gives them, entropies `(N,)` of tokens `(N,)` from hidden states `(N, H)`."""
    if not len(tokens):  # an empty result that is connected to the model, so that backward runs
        nothing = hidden.sum(dim=-1).float()
        return nothing, nothing
    size = scored_at_once(model.config.get_text_config().vocab_size, hidden.device)
    parts = [fused_head(model, *part) for part in zip(hidden.split(size), tokens.split(size), strict=True)]
    logps = torch.cat([part.log_probs[0] for part in parts]).float()
    if parts[0].entropy is None:
        return logps, None
    return logps, torch.cat([part.entropy[0] for part in parts]).float()


@contextlib.contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Put a model in training or in evaluation mode within the context. Then restore the mode of each module."""
    was_training, modes = model.training, [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        model.train(was_training)  # modules that were added, too
        for module, mode in modes:
            module.training = mode


@torch.no_grad()
def find_obstacle(model: PreTrainedModel) -> str | None:
    """Reason why the fast forward does not work for a model, by a trial on a few tokens; `None` if it works."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        return f"it has layers ({', '.join(sorted(kinds))}) whose state is not a list of keys and values"
    rope = getattr(config, "rope_parameters", None) or {}
    parts = [rope, *(item for item in rope.values() if isinstance(item, dict))]  # by layer type, in some models
    ropes = {str(part.get("rope_type")) for part in parts} & {"dynamic", "longrope"}
    if ropes:
        return f"its position encoding depends on the length of the whole row (rope_type={sorted(ropes)})"
    if getattr(config, "output_router_logits", False):
        return "its router logits are part of the loss"
    ids = [token % config.vocab_size for token in range(5, 14)]
    prompts, completions = [ids, [*ids[:7], ids[0]], ids[3:]], [ids[:1], ids[2:6], ids[:3]]
    device = next(model.parameters()).device
    try:
        with in_mode(model, training=False):
            shared = hidden_states(model.base_model, prompts, completions)
            for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
                alone = torch.tensor([[*prompt, *completion[:-1]]], device=device)
                states = model.base_model(input_ids=alone, use_cache=False).last_hidden_state[0]
                found, expected = shared[row, : len(completion)], states[-len(completion) :]
                error = max(_error(found, expected), _typical_error(found, expected, states))
                if not error < (1e-3 if states.dtype == torch.float32 else 0.1):
                    return f"its hidden states differ by {error:.1e} when rows share a prefix"
    except Exception as problem:
        return f"it cannot run with cached keys and values ({type(problem).__name__}: {problem})"
    return None


@torch.no_grad()
def needs_positions(model: PreTrainedModel) -> bool:
    """`True` if left-padded rows need `position_ids` (GPT-2). Raises `ValueError` if padding is text (RWKV)."""
    backbone, device = model.base_model, next(model.parameters()).device
    takes_positions = "position_ids" in inspect.signature(type(backbone).forward).parameters
    row = [token % model.config.get_text_config().vocab_size for token in range(5, 14)]
    ids, mask = padded([row, row + row], device, side="left")
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)

    def last(ids: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
        return backbone(input_ids=ids, use_cache=False, **inputs).last_hidden_state[0, -len(row) :]

    try:
        with in_mode(model, training=False):
            alone = last(ids[:1, -len(row) :])
            left_out = _error(last(ids, attention_mask=mask), alone)
            extra = {"position_ids": positions} if takes_positions else {}
            rounding = _error(last(ids, attention_mask=mask, **extra), alone)
    except Exception:  # the model needs other inputs than tokens, which TRL's pass may provide
        return False
    if not min(left_out, rounding) < 0.1:  # in half precision, the error is about 0.01
        raise ValueError(
            f"`{type(model).__name__}` reads padding as text: padding a prompt changes its hidden states by "
            f"{min(left_out, rounding):.0%}. Prompts of different lengths are sampled and scored together, so the "
            "team would learn from distorted prompts, as with GRPOTrainer. Use a model that applies the attention "
            "mask."
        )
    return left_out > 10 * rounding + (1e-3 if model.dtype == torch.float32 else 0.05)


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).float().norm() / expected.float().norm()).item()


def _typical_error(found: torch.Tensor, expected: torch.Tensor, states: torch.Tensor) -> float:
    """Error of the median dimension, relative to how much it varies over a row `(S, H)`: a few may hide all else."""
    spread = states.float().std(dim=0) + 1e-6
    return ((found - expected).float().pow(2).mean(dim=0).sqrt() / spread).median().item()
