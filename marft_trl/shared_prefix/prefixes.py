# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Common prefixes of token sequences: the rows that share a prefix, and its length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Cluster:
    """
    Sequences that begin with the same tokens.

    Args:
        length (`int`): number of shared tokens.
        rows (`tuple[int, ...]`): positions of the sequences.
    """

    length: int
    rows: tuple[int, ...]

    @property
    def saved(self) -> int:
        """Number of tokens that sharing saves."""
        return self.length * (len(self.rows) - 1)


def clusters(sequences: Sequence[Sequence[int]]) -> list[Cluster]:
    """
    Partition sequences into clusters with a common prefix, so that many tokens are shared.

    The last token of a sequence is never shared, so that every row has a token left to compute. A sequence that shares
    nothing is a cluster of its own, whose prefix is all but its last token.

    After sorting, sequences with a common prefix are neighbours, and the prefixes form a tree. From the leaves to the
    root, the clusters below a node are joined at the node's prefix if this saves more tokens than the clusters save by
    themselves.

    Args:
        sequences (`Sequence[Sequence[int]]`): token ids, none empty.

    Returns: clusters, sorted by their first row. The rows of a cluster are in ascending order.
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
    Decide whether to compute shared prefixes once. The plan with fewer tokens, padding included, is chosen.

    Args:
        prompts (`Sequence[Sequence[int]]`): beginnings of the rows, searched for common prefixes.
        more (`Sequence[int]`): number of tokens of each row after its prompt.
        kinds (`Sequence[str]`, *optional*): kind of each row. Rows of different kinds share nothing.

    Returns: clusters of rows that share a prefix, or an empty list if it is cheaper to compute every row as it is.
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
        places = [place for place, its in enumerate(kinds) if its == kind]
        its_clusters = clusters([sequences[place] for place in places])
        found += [Cluster(one.length, tuple(places[row] for row in one.rows)) for one in its_clusters]
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

    def gains(cluster: Cluster) -> bool:
        return cluster.saved < len(cluster.rows) * depth

    joining = [cluster for cluster in below if gains(cluster)]
    whole = Cluster(depth, tuple(sorted(row for cluster in joining for row in cluster.rows)))
    if whole.saved <= sum(cluster.saved for cluster in joining):
        return below
    return [whole, *(cluster for cluster in below if not gains(cluster))]


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    low, high = 0, min(len(first), len(second))
    while low < high:  # slices compare at the speed of C
        middle = (low + high + 1) // 2
        low, high = (middle, high) if first[low:middle] == second[low:middle] else (low, middle - 1)
    return low
