# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Episodes as datasets for TRL's other trainers: the observations and turns of agents."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from datasets import Dataset

from ..episodes.images import as_json, as_parts, images_of
from ..episodes.records import Episode, Turn
from ..system.hints import did_you_mean
from .events import check_count


# Formats of TRL 1.16, by the trainer that reads them
KINDS = {"prompt-completion": "SFTTrainer", "sft": "SFTTrainer", "dpo": "DPOTrainer", "kto": "KTOTrainer"}


def to_dataset(
    episodes: Sequence[Episode],
    kind: str,
    agents: Sequence[str],
    agent: str | None = None,
    rewards: Sequence[float] | None = None,
    best: int | None = None,
    threshold: float | None = None,
    template: Mapping[str, Any] | None = None,
) -> Dataset:
    """Implement [`Team.to_dataset`] for `agents` with a policy. `template`: arguments of the chat template."""
    episodes = list(episodes)
    _check(episodes, kind, agents, agent, best)
    needs = kind in ("dpo", "kto") or best is not None or threshold is not None
    scores = _scores(episodes, rewards, needs)
    names = [agent] if agent is not None else list(agents)
    groups: dict[str, list[int]] = {}
    for index, episode in enumerate(episodes):
        groups.setdefault(json.dumps(episode.row, sort_keys=True, default=as_json), []).append(index)
    rows: list[dict[str, Any]] = []
    for indices in groups.values():
        if kind == "dpo":
            rows += _pairs([(scores[index], episodes[index]) for index in indices], names)
        elif kind == "kto":
            mean = sum(scores[index] for index in indices) / len(indices)
            for index in indices:
                desirable = scores[index] > mean if threshold is None else scores[index] >= threshold
                rows += [
                    {**_to_prompt_completion(turn), "label": desirable, "agent": turn.agent}
                    for turn in _turns(episodes[index], names)
                    if not (desirable and turn.truncated)
                ]
        else:
            kept = sorted(indices, key=lambda index: -scores[index])[:best]
            kept = [index for index in kept if threshold is None or scores[index] >= threshold]
            for index in kept:
                # A turn that was cut has no end to learn
                turns = [turn for turn in _turns(episodes[index], names) if not turn.truncated]
                rows += [{**_shaped(turn, kind), "agent": turn.agent, "reward": scores[index]} for turn in turns]
    if not rows:
        raise ValueError(_nothing_left(kind, names, [turn for episode in episodes for turn in _turns(episode, names)]))
    if any(images_of(value) for row in rows for value in row.values() if _is_messages(value)):
        rows = list(map(_with_images_apart, rows))
    if template:
        rows = [{**row, "chat_template_kwargs": dict(template)} for row in rows]
    return Dataset.from_list(rows)


def _is_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and "role" in value[0]


def _with_images_apart(row: dict[str, Any]) -> dict[str, Any]:
    """A row as TRL's trainers take it for vision-language models: messages with places, and a column `images`."""
    images: list[Any] = []
    apart: dict[str, Any] = {}
    for name, value in row.items():
        apart[name] = value
        if _is_messages(value):
            images += images_of(value)
            parts = [(message, as_parts(message.get("content"))) for message in value]
            apart[name] = [
                {**message, "content": [{"type": "image"} if part["type"] == "image" else part for part in content]}
                for message, content in parts
            ]
    return {**apart, "images": images}


def _check(episodes: list[Episode], kind: str, agents: Sequence[str], agent: str | None, best: int | None) -> None:
    if kind not in KINDS:
        known = ", ".join(f"{item!r} ({trainer})" for item, trainer in KINDS.items())
        raise ValueError(f"`kind` must be one of {known}, got {kind!r}.{did_you_mean(kind, KINDS)}")
    if agent is not None and agent not in agents:
        raise ValueError(
            f"`agent={agent!r}` is not an agent with a policy; the agents with a policy are "
            f"{', '.join(map(repr, agents))}.{did_you_mean(agent, agents)}"
        )
    if best is not None:
        check_count("best", best)
    if best is not None and kind in ("dpo", "kto"):
        raise ValueError(f"`best` keeps only the best episodes, but `kind={kind!r}` needs worse ones. Leave it out.")
    wrong = [episode for episode in episodes if not isinstance(episode, Episode)]
    if wrong or not episodes:
        got = type(wrong[0]).__name__ if wrong else "no episodes"
        raise ValueError(f"`episodes` must be episodes that `team.run(...)` returned, got {got}.")


def _scores(episodes: list[Episode], rewards: Sequence[float] | None, needs: bool) -> list[float]:
    if rewards is None:
        if needs and not any(any(episode.earned) for episode in episodes):
            raise ValueError(
                "The workflow earned no rewards, so pass `rewards`, a number for each episode, such as "
                "`rewards=score(completions=[episode.answer.text for episode in episodes], ...)`."
            )
        return [float(sum(episode.earned)) for episode in episodes]
    scores = [float(reward) for reward in rewards]
    if len(scores) != len(episodes) or not all(map(math.isfinite, scores)):
        raise ValueError(
            f"`rewards` must have a finite number for each of the {len(episodes)} episodes, got {len(scores)} numbers"
            + ("." if all(map(math.isfinite, scores)) else ", not all of them finite.")
        )
    return scores


def _turns(episode: Episode, names: Sequence[str]) -> list[Turn]:
    return [turn for turn in episode.turns if turn.agent in names and len(turn.completion_ids)]


def _to_prompt_completion(turn: Turn) -> dict[str, Any]:
    """Prompt and completion: messages, or texts where the agent was shown a text."""
    if isinstance(turn.observation, str):
        return {"prompt": turn.observation, "completion": turn.raw_text}
    return {"prompt": list(turn.observation), "completion": [{"role": "assistant", "content": turn.raw_text}]}


def _shaped(turn: Turn, kind: str) -> dict[str, Any]:
    pair = _to_prompt_completion(turn)
    if kind == "prompt-completion":
        return pair
    if isinstance(pair["prompt"], str):
        return {"text": pair["prompt"] + pair["completion"]}
    return {"messages": [*pair["prompt"], *pair["completion"]]}


def _pairs(scored: list[tuple[float, Episode]], names: Sequence[str]) -> list[dict[str, Any]]:
    """For each agent, the turns of the best and of the worst episode in which it was shown the same."""
    by_shown: dict[tuple, list[tuple[float, Turn]]] = {}
    for score, episode in scored:
        seen: dict[str, int] = {}
        for turn in _turns(episode, names):
            count = seen[turn.agent] = seen.get(turn.agent, 0) + 1
            by_shown.setdefault((turn.agent, count, turn.prompt_ids), []).append((score, turn))
    pairs = []
    for (agent, _, _), turns in by_shown.items():
        whole = [pair for pair in turns if not pair[1].truncated]
        if not whole:
            continue
        high, chosen = max(whole, key=lambda pair: pair[0])
        low, rejected = min(turns, key=lambda pair: pair[0])
        if high > low and chosen.completion_ids != rejected.completion_ids:
            good, bad = _to_prompt_completion(chosen), _to_prompt_completion(rejected)["completion"]
            pairs.append({"prompt": good["prompt"], "chosen": good["completion"], "rejected": bad, "agent": agent})
    return pairs


def _nothing_left(kind: str, names: Sequence[str], turns: Sequence[Turn]) -> str:
    if turns and all(turn.truncated for turn in turns):
        return (
            f"No turn of {', '.join(map(repr, names))} is left: all {len(turns)} were truncated at their length "
            "limit. Raise `max_completion_length`."
        )
    if kind == "dpo":
        return (
            f"No pair is left for {', '.join(map(repr, names))}: two episodes of a prompt must have different rewards "
            "and the same observation of the agent. Agents that read sampled turns of teammates rarely have the same "
            "observation twice: use `kind='kto'` for them, or run more episodes of each prompt (`num_samples`)."
        )
    return (
        f"No turn of {', '.join(map(repr, names))} is left: lower `threshold`, or run more episodes of each prompt. "
        "Turns that were truncated at their length limit are skipped."
    )
