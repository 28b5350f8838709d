# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""The trainer's part that says what a run will do, without doing it."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trl import GRPOTrainer

from ..agents import AgentSpec
from ..configs import MARFTConfig
from ..episodes import EndOfEpisode, Episode, Turn
from ..prefixes import clusters
from ..rollout.collector import Request
from ..rollout.prompts import Observation, Query
from ..rollout.runner import EpisodeRunner
from ..rollout.transformers_generator import Sampling
from ..transcripts import messages_as_text
from ..workflows import Workflow
from ..workflows.base import turn_links
from .adapters import Policies
from .memory import ActivationCost, MemoryPlan, cache_size, head_size, optimizer_size, size_of
from .setup import context_window


# Turns after which a rehearsal with made-up replies is ended: a loop may wait for words that never come.
_LONGEST_REHEARSAL = 64


@dataclass(frozen=True)
class Rehearsal:
    """
    An episode with made-up replies.

    Args:
        episode ([`Episode`]): its turns.
        shown (`dict[str, Observation]`): what each agent was shown first.
        prompts (`list[tuple[str, int, int]]`): for each turn its agent, how many tokens it would be shown if all turns
            it sees were as long as they may be, and how many of them come before the first of these turns' words.
    """

    episode: Episode
    shown: dict[str, Observation]
    prompts: list[tuple[str, int, int]]


class TeamPlanning(GRPOTrainer):
    """Agents, workflow, batches, memory and prompts, before training."""

    args: MARFTConfig
    agents: list[AgentSpec]
    critic: Any
    policies: Policies
    workflow: Workflow
    _aliases: dict[str, str]
    _runner: EpisodeRunner
    _free_for_activations: Callable[[int], float]
    _may_keep_values: bool
    _limits: Callable[[int, ActivationCost, float], tuple[int, bool]]
    _measure: Callable[[int], ActivationCost]
    _samplings: dict[str, Sampling]
    _shares_prefixes: bool
    _specs: dict[str, AgentSpec]

    def plan(self) -> str:
        """
        What training will do, as text: the agents, who sees whom, the batches in episodes, turns and tokens, the
        memory, and what each agent is shown on the first row of the dataset, with made-up replies of its teammates.
        Nothing is generated or trained.
        """
        rehearsal = self._rehearse(next(iter(self.train_dataset)))
        episode, shown = rehearsal.episode, rehearsal.shown
        links = [f"{start} -> {end}" for start, end in self._links(rehearsal)]
        parts = {
            "Team": [self._describe(agent) for agent in self.agents],
            f"Workflow: {type(self.workflow).__name__}": links or ["(nobody is shown another's words)"],
            "Batches": self._describe_batches(rehearsal),
            "Memory of a process, with every turn as long as it may be": str(self.memory_plan()).splitlines(),
        }
        lines = [line for title, its in parts.items() for line in ["", title, *(f"  {one}" for one in its)]]
        for agent in self.agents:
            note = "" if agent.name in {turn.agent for turn in episode.turns} else " (not reached in the rehearsal)"
            lines += ["", f"What {agent.name} is shown: {len(shown[agent.name].ids)} tokens{note}"]
            lines += textwrap.indent(messages_as_text(shown[agent.name].content), "  ").splitlines()
        return "\n".join(lines[1:])

    def memory_plan(self) -> MemoryPlan:
        """
        The memory that this process needs, part by part, with every turn as long as it may be: counted, but for the
        activations, whose size by token is measured on a few short rows.
        """
        adapters = [p for name in self.policies.names for p in self.policies.parameters(name).values()]
        adapters = adapters if self.policies.has_adapters else []
        critics = self.critic.parts if self.critic is not None else []
        of_critic = [parameter for part in critics for parameter in self.critic.parameters(part).values()]
        apart = {id(tensor) for tensor in [*adapters, *of_critic]}
        model = self.accelerator.unwrap_model(self.model)
        base = [tensor for tensor in [*model.parameters(), *model.buffers()] if id(tensor) not in apart]
        trained = [p for p in [*model.parameters(), *of_critic] if p.requires_grad]
        trained = list({id(p): p for p in trained}.values())
        config, width = model.config.get_text_config(), 2 if self.args.bf16 or self.args.fp16 else 4
        prompts = self._rehearse(next(iter(self.train_dataset))).prompts
        turn = max(length + self._samplings[agent].max_completion_length for agent, length, _ in prompts)
        cost = self._measure(turn)
        return MemoryPlan(
            base=size_of(base),
            adapters=size_of(adapters),
            critic=size_of(of_critic),
            gradients=size_of(trained),
            optimizer=optimizer_size(trained, str(getattr(self.args.optim, "value", self.args.optim))),
            activations=self._activations(prompts, turn, cost),
            cache=cache_size(config, self._episodes_at_once(), turn, width),
        )

    def _activations(self, prompts: Sequence[tuple[str, int, int]], longest: int, cost: ActivationCost) -> int:
        """
        Bytes of the largest micro-batch: of an agent, or of the critic where it keeps its passes of all turns.

        Args:
            prompts (`Sequence[tuple[str, int, int]]`): for each turn its agent, tokens of its prompt, and how many of
                them its group shares.
            longest (`int`): tokens of the longest row.
            cost ([`ActivationCost`]): of a token.
        """
        config, needed, limits = self.model.config.get_text_config(), [], []
        for prompt in prompts:
            tokens, repeated, scored = self._work_of(*prompt)
            limit, checkpointing = self._limits(longest, cost, self._free_for_activations(scored))
            share = min(limit / tokens, 1.0)
            kept = cost.size(round(share * tokens), round(share * repeated), checkpointing)
            needed.append(kept + head_size(config.vocab_size, round(share * scored), self.accelerator.device))
            limits.append(0 if checkpointing else limit)
        if self._may_keep_values:
            needed.append(self._kept_by_critic(prompts, min(limits), cost))
        return max(needed)

    def _work_of(self, agent: str, length: int, same: int) -> tuple[int, int, int]:
        """How many tokens an agent's turns compute, repeat and score."""
        rows, new = self.args.per_device_train_batch_size, self._samplings[agent].max_completion_length
        same = same if self._shares_prefixes else 0
        tokens = math.ceil(rows / self.num_generations) * same + rows * (length - same + new)
        return tokens, rows * same, rows * new

    def _kept_by_critic(self, prompts: Sequence[tuple[str, int, int]], limit: int, cost: ActivationCost) -> int:
        work = [self._work_of(*prompt) for prompt in prompts]
        if sum(cost.size(tokens, repeated, False) for tokens, repeated, _ in work) > limit * cost.per_token:
            return 0
        reads_all = self.args.level == "token"  # else prompts alone
        sizes = [cost.size(tokens - (not reads_all) * scored, repeated, False) for tokens, repeated, scored in work]
        # A layer's worth on top is needed by one backward pass at a time
        layers = self.model.config.get_text_config().num_hidden_layers
        return round((sum(sizes) * layers + max(sizes)) / (layers + 1))

    def _episodes_at_once(self) -> int:
        return self.args.per_device_train_batch_size * self.args.steps_per_generation

    def _rehearse(self, row: dict[str, Any]) -> Rehearsal:
        shown: dict[str, Observation] = {}
        prompts: list[tuple[str, int, int]] = []

        def answer(requests: Sequence[Request]) -> list[Turn | EndOfEpisode]:
            built = self._runner.observe(self._runner.query(one)._replace(after=None) for one in requests)
            for request, observation in zip(requests, built, strict=True):
                shown.setdefault(request.agent, observation)
                prompts.append((request.agent, self._longest(observation), self._same(request, observation)))
            if len(requests[0].episode.turns) >= _LONGEST_REHEARSAL:
                return [EndOfEpisode("the rehearsal is long enough")] * len(requests)
            return [one.answered(self._made_up(one.agent)) for one in requests]

        with self._runner.rehearsing():
            (episode,) = self._runner.run([row], answer)
        rest = [agent for agent in self.agents if agent.name not in shown]
        alone = self._runner.observe(Query(agent, row["prompt"], (), agent.functions) for agent in rest)
        shown |= {agent.name: one for agent, one in zip(rest, alone, strict=True)}
        return Rehearsal(episode, shown, prompts)

    def _made_up(self, agent: str) -> str:
        return f"(what {self._aliases.get(agent, agent)} says)"

    def _longest(self, observation: Observation) -> int:
        """Tokens of an observation if the turns in it were as long as they may be."""
        longer = 0
        for item in observation.seen:
            if isinstance(item, Turn):
                made_up = len(self._tokenizer(item.text, add_special_tokens=False)["input_ids"])
                longer += max(self._samplings[item.agent].max_completion_length - made_up, 0)
        return len(observation.ids) + longer

    def _same(self, request: Request, observation: Observation) -> int:
        """How many tokens of what a request is shown do not depend on what teammates say."""
        if not any(isinstance(item, Turn) for item in observation.seen):
            return len(observation.ids) - 1
        others = [replace(item, text="?", raw_text="?") if isinstance(item, Turn) else item for item in request.seen]
        query = Query(self._specs[request.agent], request.episode.prompt, others, request.functions)
        (other,) = self._runner.observe([query])
        (cluster, *_) = clusters([observation.ids, other.ids])
        return cluster.length if len(cluster.rows) > 1 else 0

    def _links(self, rehearsal: Rehearsal | None = None) -> list[tuple[str, str]]:
        """Who sees whom: as the workflow says, or as it is in a rehearsal on the first row."""
        with self._runner.rehearsing():
            pairs = self.workflow.links([agent.name for agent in self.agents])
        if pairs or len(self.agents) == 1:
            return pairs
        try:
            return turn_links((rehearsal or self._rehearse(next(iter(self.train_dataset)))).episode.turns)
        except Exception:  # a picture is not worth a run
            return []

    def _describe(self, agent: AgentSpec) -> str:
        sampling = self._samplings[agent.name]
        adapter = self.policies.adapter_of(agent.name)
        weights = sum(p.numel() for p in self.policies.parameters(adapter).values())
        rate = self.args.learning_rate if agent.learning_rate is None else agent.learning_rate
        trained = f"learning rate {rate:g}" if agent.trainable else "frozen"
        facts = [f"adapter {adapter}, {weights:,} weights", trained, f"temperature {sampling.temperature:g}"]
        facts += [f"up to {sampling.max_completion_length} tokens"]
        facts += [f"tools {', '.join(tool.__name__ for tool in agent.functions)}"] if agent.functions else []
        return f"{agent.name}: {'; '.join(facts)}"

    def _describe_batches(self, rehearsal: Rehearsal) -> list[str]:
        args, processes = self.args, self.accelerator.num_processes
        episodes = self._episodes_at_once() * processes
        per_step = args.per_device_train_batch_size * args.gradient_accumulation_steps * processes
        turns = Counter(turn.agent for turn in rehearsal.episode.turns)
        trained = {agent.name for agent in self.agents if agent.trainable}
        rows = sum(turns[name] for name in trained)
        lengths = [
            (name, prompt + self._samplings[name].max_completion_length) for name, prompt, _ in rehearsal.prompts
        ]
        longest = sum(length for name, length in lengths if name in trained)
        by_agent = ", ".join(f"{name} {count}" for name, count in turns.items())
        length = _count(args.max_steps, "step") if args.max_steps > 0 else f"{args.num_train_epochs:g} epochs"
        return [
            f"{_count(episodes, 'episode is', 'episodes are')} generated at once: "
            f"{_count(episodes // args.num_generations, 'prompt')} x "
            f"{_count(args.num_generations, 'episode')}, on {_count(processes, 'process', 'processes')}",
            f"{_count(len(rehearsal.episode.turns), 'turn')} in an episode, as rehearsed: {by_agent}",
            f"{_count(per_step, 'episode')} in an optimizer step: {_count(per_step * rows, 'training row')}, at most "
            f"{per_step * longest:,} tokens, with every turn as long as it may be",
            *self._describe_window(lengths),
            f"micro-batches of at most {_count(args.per_device_train_batch_size, 'row')}"
            + (f" and {args.max_tokens_per_micro_batch} tokens" if args.max_tokens_per_micro_batch else ""),
            f"each episode is used {_count(args.num_iterations, 'time')}; {length}",
        ]

    def _describe_window(self, lengths: Sequence[tuple[str, int]]) -> list[str]:
        """A warning where a turn may outgrow the model's window."""
        window = context_window(self.model)
        name, length = max(lengths, key=lambda one: one[1])
        if window is None or length <= window:
            return []
        return [
            f"TOO LONG: a turn of {name} may take {length:,} tokens with what it is shown, the model's window is "
            f"{window:,}; context_overflow={self.args.context_overflow!r} says what happens then"
        ]


def _count(number: int, what: str, plural: str | None = None) -> str:
    return f"{number} {what if number == 1 else plural or what + 's'}"
