# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Description of a run before it starts: agents, workflow, batches, memory, and observations."""

from __future__ import annotations

import math
import os
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from datasets import IterableDataset
from trl.trainer.utils import get_config_model_id

from ..agents import AgentSpec
from ..algorithms.baselines import CREDITS
from ..config.checks import completes_candidates, uses_candidates
from ..config.dataset_checks import read_prompts
from ..config.team_setup import RunContext, TeamSetup
from ..episodes.records import EndOfEpisode, Episode, Request, Turn
from ..episodes.tools import tool_name
from ..learning import memory
from ..learning.batching import MicroBatcher
from ..learning.memory import ActivationCost, MemoryPlan
from ..prompts.builder import Observation
from ..rollout.runner import EpisodeRunner
from ..rollout.transformers_generator import MIXED_ROWS
from ..seams.sharding import ShardSizes, shard_sizes
from ..shared_prefix.decoding import PREFILL_TOKENS, ROOM
from ..shared_prefix.forward import clusters
from ..workflows import Debate, Graph, MixtureOfAgents, Sequential
from ..workflows.base import callable_name, turn_links
from .transcripts import messages_as_text


# Maximum number of turns of a rehearsal. A loop may wait for text that placeholder turns never contain.
_MAX_REHEARSAL_TURNS = 64
# Workflows whose turns do not depend on texts
_STATIC = (Sequential, Graph, Debate, MixtureOfAgents)


@dataclass(frozen=True)
class Rehearsal:
    episode: Episode
    shown: dict[str, Observation]  # first observation of each agent
    # For each turn: agent, tokens of its prompt with all turns at maximum length, tokens before the first turn in it
    prompts: list[tuple[str, int, int]]
    generation_calls: list[list[str]]  # agents whose turns are generated together
    tools: dict[str, list[str]]  # names by agent, those of an environment included


_ONE_PROMPT = "ONE PROMPT per step: increase `per_device_train_batch_size`, for example to 8 prompts per step"
# Ratio of the activation peak to the activations kept for backward: temporary tensors and fragmentation
_PEAK_RATIO = 1.05


class Planner:
    """Describes a run before it starts: the workflow takes the row with the longest prompt and placeholder turns."""

    def __init__(
        self,
        team: TeamSetup,
        run: RunContext,
        runner: EpisodeRunner,
        batchers: Mapping[str, MicroBatcher],  # by agent
        train_dataset: Callable[[], Any],
    ):
        self._agents, self._workflow, self._policies = team.agents, team.workflow, team.policies
        self._critic, self._level = team.critic, team.level
        self._samplings, self._aliases, self._trained = team.samplings, team.aliases, team.trained
        self._with_policy = {agent.name for agent in team.agents if agent.has_policy}
        self._args, self._processes = run.args, run.processes
        self._runner, self._batchers, self._dataset = runner, batchers, train_dataset
        self._joins_slices = all(batcher.joins_slices for batcher in batchers.values())
        self._first_row: dict[str, Any] | None = None  # of a stream
        self._longest: tuple[Any, int] | None = None  # data set, and the place of its longest prompt

    def _example(self) -> dict[str, Any]:
        """The row with the longest prompt. Of a stream, the first one, which is read once."""
        dataset = self._dataset()
        if isinstance(dataset, IterableDataset):
            if self._first_row is None:
                first = next(iter(dataset), None)
                if first is None:
                    raise ValueError("`train_dataset` is empty: the stream has no row to plan with.")
                self._first_row = dict(first)
            return self._first_row
        return dataset[self._longest_row()]

    def _longest_row(self) -> int:
        dataset = self._dataset()
        if self._longest is None or self._longest[0] is not dataset:
            lengths = [len(str(row["prompt"])) for row in read_prompts(dataset)]
            self._longest = dataset, max(range(len(lengths)), key=lengths.__getitem__)
        return self._longest[1]

    def plan(self) -> str:
        rehearsal = self.rehearse(self._example())
        episode, shown = rehearsal.episode, rehearsal.shown
        links = [f"{start} -> {end}" for start, end in self.links(rehearsal)]
        parts = {
            "Team": [self._describe(agent, rehearsal.tools.get(agent.name, ())) for agent in self._agents],
            f"Workflow: {type(self._workflow).__name__}": links or ["(no agent sees turns of another agent)"],
            "Batches": self._describe_batches(rehearsal),
            "Memory per process, with every turn at maximum length": self._describe_memory(),
        }
        lines = [line for title, part in parts.items() for line in ["", title, *(f"  {item}" for item in part)]]
        for agent in self._agents:
            note = "" if agent.name in {turn.agent for turn in episode.turns} else " (not reached in the rehearsal)"
            lines += ["", f"Observation of {agent.name}: {len(shown[agent.name].ids)} tokens{note}"]
            lines += textwrap.indent(messages_as_text(shown[agent.name].content), "  ").splitlines()
        return "\n".join(lines[1:])

    def _describe_memory(self) -> list[str]:
        plans = self._plans()
        lines = str(MemoryPlan.join(list(plans.values()))).splitlines()
        for agents, plan in plans.items() if len(plans) > 1 else ():
            base, total = memory.readable(plan.base), memory.readable(plan.total)
            lines.append(f"of the base of {agents}: {base}, {total} at once")
        if self._processes.is_base_sharded:
            sizes = self._shards()
            held, gathered = memory.readable(sizes.held), memory.readable(sizes.gathered)
            over = f"{self._processes.count} processes (FSDP2)"
            lines.append(f"The base is sharded over {over}: {held} on each, and up to {gathered}")
            lines.append("gathered at once. Adapters and critics are not sharded.")
        return lines

    def _shards(self) -> ShardSizes:
        is_half = self._args.bf16 or self._args.fp16
        whole, model = self._policies.all_parameters(), self._policies.get_model(self._agents[0].name)
        return shard_sizes(model, whole, self._processes.count, 2 if is_half else None)

    def memory_plan(self) -> MemoryPlan:
        return MemoryPlan.join(list(self._plans().values()))

    def _plans(self) -> dict[str, MemoryPlan]:
        """The plan of each base, by the names of its agents."""
        rehearsal, plans = self.rehearse(self._example()), {}
        for batcher in dict.fromkeys(self._batchers.values()):
            agents = [agent for agent, own in self._batchers.items() if own is batcher]
            plans[", ".join(agents)] = self._plan_base(batcher, agents, rehearsal)
        return plans

    def _plan_base(self, batcher: MicroBatcher, agents: Sequence[str], rehearsal: Rehearsal) -> MemoryPlan:
        model, critic = self._policies.get_model(agents[0]), self._critic
        names = [name for name in self._policies.names if self._policies.models[name] is model]
        adapters = [
            p for name in filter(self._policies.is_lora, names) for p in self._policies.parameters(name).values()
        ]
        parts = dict.fromkeys(critic.get_part(agent) for agent in agents) if critic else []
        critic_parameters = [p for part in parts for p in critic.parameters(part).values()] if critic else []
        apart = {id(tensor) for tensor in [*adapters, *critic_parameters]}
        base = [tensor for tensor in [*model.parameters(), *model.buffers()] if id(tensor) not in apart]
        trained = list({id(p): p for p in [*model.parameters(), *critic_parameters] if p.requires_grad}.values())
        config, width = model.config.get_text_config(), 2 if self._args.bf16 or self._args.fp16 else 4
        copies = 2 if self._args.beta and not adapters else 1  # without adapters, the reference is a second base
        read = {agent.name for agent in self._agents if agent.has_policy or critic is not None}  # by a model
        prompts = [prompt for prompt in rehearsal.prompts if prompt[0] in read and prompt[0] in agents]
        if not prompts:  # the rehearsal did not reach the agents of this base
            prompts = [(agent, len(rehearsal.shown[agent].ids), 0) for agent in agents if agent in read]
        longest = max(length + self._samplings[agent].max_completion_length for agent, length, _ in prompts)
        cost = batcher.measure(longest)
        self._processes.wait()  # the number of passes that it takes may differ
        calls = [[agent for agent in wave if agent in agents] for wave in rehearsal.generation_calls]
        at_once = self._turns_at_once([agent for agent, *_ in prompts], list(filter(None, calls)) or [agents])
        keeps = self._runner.generator.keeps_cache
        has_ddp = self._processes.count > 1 and not self._processes.is_base_sharded
        cache = memory.cache_size(config, at_once, longest + (-longest % ROOM if keeps else 0), width)
        return MemoryPlan(
            base=copies * (sum(self._shards()) if self._processes.is_base_sharded else memory.count_bytes(base)),
            adapters=memory.count_bytes(adapters),
            critic=memory.count_bytes(critic_parameters),
            # DDP keeps a second copy of all gradients, in its buckets
            gradients=memory.count_bytes(trained) * (2 if has_ddp else 1),
            optimizer=memory.optimizer_size(trained, str(getattr(self._args.optim, "value", self._args.optim))),
            activations=self._activations(batcher, prompts, longest, cost),
            cache=0 if keeps else cache,
            prefill=max(
                round(cost.per_token * min(at_once * longest, PREFILL_TOKENS) / config.num_hidden_layers),
                at_once * config.vocab_size * memory.DRAW_BYTES,
            ),
            # The cache, workspaces, and the logits of a graph
            kept=cache + memory.WORKSPACE_BYTES + 4 * at_once * config.vocab_size if keeps else 0,
        )

    def _activations(
        self, batcher: MicroBatcher, prompts: Sequence[tuple[str, int, int]], longest: int, cost: ActivationCost
    ) -> int:
        """Bytes of the largest micro-batch of an agent or of a trained critic."""
        config, needed = self._policies.get_model(prompts[0][0]).config.get_text_config(), []
        work: list[tuple[int, ...]] = [self._count_tokens(*prompt) for prompt in prompts]
        if self._joins_slices:  # a micro-batch may have all turns of an agent
            agents = dict.fromkeys(agent for agent, *_ in prompts)
            pairs = list(zip(prompts, work, strict=True))
            turns = [[counts for prompt, counts in pairs if prompt[0] == name] for name in agents]
            work = [tuple(map(sum, zip(*counts, strict=True))) for counts in turns]
        for tokens, repeated, scored in [*work, *self._critic_work(prompts)]:
            free = batcher.free_for_activations(scored, cost.fixed)
            limit, checkpointing = batcher.compute_limits(longest, cost, free)
            share = min(limit / tokens, 1.0)
            kept = cost.size(round(share * tokens), round(share * repeated), checkpointing)
            needed.append(kept + memory.head_size(config.vocab_size, round(share * scored), self._processes.device))
        return round(_PEAK_RATIO * max(needed))

    def _critic_work(self, prompts: Sequence[tuple[str, int, int]]) -> list[tuple[int, int, int]]:
        """Like `_count_tokens`, of a trained critic, which scores no token and may read several agents."""
        if self._critic is None or self._critic.reads_reference_pass:  # a frozen critic's states are kept
            return []
        work: dict[Any, tuple[int, int, int]] = {}
        for number, prompt in enumerate(prompts):
            tokens, repeated, scored = self._count_tokens(*prompt)
            part = self._critic.get_part(prompt[0]) if self._joins_slices else number
            before = work.get(part, (0, 0, 0))
            tokens -= 0 if self._level.reads_completions else scored
            work[part] = before[0] + tokens, before[1] + repeated, 0
        return list(work.values())

    def _count_tokens(self, agent: str, length: int, same: int) -> tuple[int, int, int]:
        """Numbers of computed, repeated and scored tokens of an agent's micro-batch."""
        rows, new = self._args.per_device_train_batch_size, self._samplings[agent].max_completion_length
        rows *= self._args.gradient_accumulation_steps if self._joins_slices else 1
        same = same if self._batchers[agent].share else 0
        tokens = math.ceil(rows / self._args.num_generations) * same + rows * (length - same + new)
        return tokens, rows * same, rows * new

    def _episodes_at_once(self) -> int:
        return self._args.per_device_train_batch_size * self._args.steps_per_generation

    def _turns_at_once(self, agents: Sequence[str], generation_calls: Sequence[Sequence[str]]) -> int:
        """Bound the turns generated at once, candidates and re-runs included. `agents`: of an episode's turns."""
        args, rule = self._args, CREDITS[self._args.credit]
        episodes = max(self._rows_at_once(wave) for wave in generation_calls)
        if rule.reruns:  # removing the last turn generates nothing
            changed = agents[:-1] if rule.removes else agents
            return episodes * max(sum(agent in self._trained for agent in changed), 1)
        most = max(self._candidates(agent) for agent in agents)
        completes = most > 1 and completes_candidates(args) and len(agents) > 1
        return episodes * most * (args.candidate_samples if completes else 1)

    def _rows_at_once(self, wave: Sequence[str]) -> int:
        adapters = Counter(self._policies.get_adapter(agent) for agent in wave if agent in self._with_policy)
        rows = [self._episodes_at_once() * count for count in adapters.values()]
        together = sum(rows) <= MIXED_ROWS * len(rows)  # few rows of several adapters share a pass
        return sum(rows) if together else max(rows)

    def _candidates(self, agent: str) -> int:
        return self._args.turn_candidates if uses_candidates(self._args) and agent in self._trained else 1

    def rehearse(self, row: dict[str, Any]) -> Rehearsal:
        observations: dict[str, Observation] = {}
        prompts: list[tuple[str, int, int]] = []
        generation_calls: list[list[str]] = []
        tools = {agent.name: list(map(tool_name, agent.functions)) for agent in self._agents if agent.functions}

        async def answer(requests: Sequence[Request], key: tuple) -> list[Turn | EndOfEpisode]:
            generation_calls.append([request.agent for request in requests])
            built = runner.observe(replace(request, after=None) for request in requests)
            for request, observation in zip(requests, built, strict=True):
                tools[request.agent] = list(map(tool_name, request.functions))
                observations.setdefault(request.agent, observation)
                shared = self._shared_length(runner, request, observation)
                prompts.append((request.agent, self._max_length(request.agent, observation), shared))
            if len(requests[0].episode.turns) >= _MAX_REHEARSAL_TURNS:
                return [EndOfEpisode("the rehearsal has the maximum number of turns")] * len(requests)
            names = [self._aliases.get(request.agent, request.agent) for request in requests]
            return [request.make_turn(f"(what {name} says)") for request, name in zip(requests, names, strict=True)]

        with self._runner.rehearsal_runner() as runner:
            (episode,) = runner.run([row], answer)
            rest = [agent for agent in self._agents if agent.name not in observations]
            alone = runner.observe(Request(episode, agent.name, (), agent.functions) for agent in rest)
        observations |= {agent.name: observation for agent, observation in zip(rest, alone, strict=True)}
        return Rehearsal(episode, observations, prompts, generation_calls, tools)

    def _max_length(self, agent: str, observation: Observation) -> int:
        """Return the number of tokens of an observation if all turns in it had maximum length."""
        longer, tokenizer = 0, self._runner.prompts.for_agent(agent).tokenizer
        for item in observation.seen:
            if isinstance(item, Turn):
                made_up = len(tokenizer(item.text, add_special_tokens=False)["input_ids"])
                longer += max(self._samplings[item.agent].max_completion_length - made_up, 0)
        return len(observation.ids) + longer

    def _shared_length(self, runner: EpisodeRunner, request: Request, observation: Observation) -> int:
        """Number of tokens of an observation that do not depend on turns of teammates."""
        if not any(isinstance(item, Turn) for item in observation.seen):
            return len(observation.ids) - 1
        if request.requested_turn is not None:  # another program wrote the observation
            return 0
        others = [replace(item, text="?", raw_text="?") if isinstance(item, Turn) else item for item in request.seen]
        (other,) = runner.observe([replace(request, seen=tuple(others), after=None)])
        (cluster, *_) = clusters([observation.ids, other.ids])
        return cluster.length if len(cluster.rows) > 1 else 0

    def links(self, rehearsal: Rehearsal | None = None) -> list[tuple[str, str]]:
        """Return pairs of agents in which the second sees turns of the first, from the workflow or a rehearsal."""
        with self._runner.rehearsal_runner():
            pairs = self._workflow.links([agent.name for agent in self._agents])
        if pairs or len(self._agents) == 1 or (rehearsal is None and self._workflow.acts_outside):
            return pairs
        try:
            if rehearsal is None and isinstance(self._dataset(), IterableDataset):  # training reads its rows
                return []
            return turn_links((rehearsal or self.rehearse(self._example())).episode.turns)
        except Exception:  # a missing picture must not stop a run
            return []

    def draw_workflow(self) -> str:
        if self._workflow.acts_outside:
            return ""
        with self._runner.rehearsal_runner():
            return self._workflow.mermaid([agent.name for agent in self._agents], self.links())

    def _describe(self, agent: AgentSpec, tools: Sequence[str]) -> str:
        sampling = self._samplings[agent.name]
        most = f"up to {sampling.max_completion_length} tokens"
        if agent.reply is not None:
            return f"{agent.name}: turns of {callable_name(agent.reply)}; {most}"
        adapter = self._policies.get_adapter(agent.name)
        weights = sum(p.numel() for p in self._policies.parameters(adapter).values())
        rate = self._args.learning_rate if agent.learning_rate is None else agent.learning_rate
        trained = f"learning rate {rate:g}" if agent.trainable else "frozen"
        facts = [f"adapter {adapter}, {weights:,} weights, {self._policies.get_origin(adapter)}", trained]
        if self._policies.further:
            model = self._policies.get_model(agent.name)
            base = get_config_model_id(model.config) or type(model).__name__
            facts.insert(0, f"base {os.path.basename(base) if os.path.isdir(base) else base}")
        facts += [f"temperature {sampling.temperature:g}", most]
        facts += [f"tools {', '.join(tools)}"] if tools else []
        return f"{agent.name}: {'; '.join(facts)}"

    def _describe_batches(self, rehearsal: Rehearsal) -> list[str]:
        args, processes = self._args, self._processes.count
        episodes = self._episodes_at_once() * processes
        per_step = args.per_device_train_batch_size * args.gradient_accumulation_steps * processes
        turns = Counter(turn.agent for turn in rehearsal.episode.turns)
        rows = sum(turns[name] * self._candidates(name) for name in self._trained)
        most = {name: sampling.max_completion_length for name, sampling in self._samplings.items()}
        lengths = [(name, prompt + most[name]) for name, prompt, _ in rehearsal.prompts]
        longest = sum(length * self._candidates(name) for name, length in lengths if name in self._trained)
        by_agent = ", ".join(f"{name} {count}" for name, count in turns.items())
        # Slices of a step go through the model together, with all turns of an agent
        together = args.per_device_train_batch_size
        together *= args.gradient_accumulation_steps if self._joins_slices else 1
        turns_of_agent = max((turns[name] * self._candidates(name) for name in self._trained), default=1) or 1
        return [
            f"{_count(episodes, 'episode is', 'episodes are')} generated at once: "
            f"{_count(episodes // args.num_generations, 'prompt')} x "
            f"{_count(args.num_generations, 'episode')}, on {_count(processes, 'process', 'processes')}",
            f"{_count(len(rehearsal.episode.turns), 'turn')} per episode in the rehearsal: {by_agent}",
            self._describe_rehearsal(),
            f"{_count(per_step, 'episode')} in an optimizer step: {_count(per_step * rows, 'training row')} and up to "
            f"{per_step * longest:,} tokens if all episodes go as the rehearsal, with every turn at maximum length",
            self._describe_generation(rehearsal),
            *self._describe_window(lengths),
            f"micro-batches of at most {_count(together * turns_of_agent, 'row')}"
            + (f" and {args.max_tokens_per_micro_batch} tokens" if args.max_tokens_per_micro_batch else ""),
            f"each episode is used {_count(args.num_iterations, 'time')}; {self._describe_length()}",
            # As with TRL's default batch size of 8
            *([_ONE_PROMPT] if episodes <= args.num_generations else []),
        ]

    def _describe_rehearsal(self) -> str:
        """The row and the placeholders that the numbers come from, and what they leave out."""
        if isinstance(self._dataset(), IterableDataset):
            row = "the first row of the stream, and others may be longer"
        else:
            row = f"row {self._longest_row()} of `train_dataset`, which has the longest prompt"
        branches = "" if isinstance(self._workflow, _STATIC) else " Other turns may be taken where texts decide."
        return f"the rehearsal takes {row}, with placeholders as turns.{branches}"

    def _describe_length(self) -> str:
        args = self._args
        if args.max_steps > 0:
            return _count(args.max_steps, "step")
        batches = len(self._dataset()) * args.num_generations // (self._episodes_at_once() * self._processes.count)
        steps = math.ceil(args.num_train_epochs * math.ceil(batches * self._steps_per_batch()))
        epochs = "1 epoch, which is" if args.num_train_epochs == 1 else f"{args.num_train_epochs:g} epochs, which are"
        return f"{epochs} {steps:,} steps"

    def _steps_per_batch(self) -> Fraction:
        """Return the number of optimizer steps per generation batch, which every trained adapter uses in turn."""
        args = self._args
        phases = len(self._policies.trained) if args.update_order == "sequential" else 1
        return Fraction(args.steps_per_generation * args.num_iterations * phases, args.gradient_accumulation_steps)

    def _describe_generation(self, rehearsal: Rehearsal) -> str:
        every = self._steps_per_batch()
        batches = _count(every.denominator, "generation batch", "generation batches")
        steps = "optimizer step" if every.numerator == 1 else f"{every.numerator} optimizer steps"
        turns = [turn.agent for turn in rehearsal.episode.turns if turn.agent in self._with_policy]
        longest = sum(self._samplings[name].max_completion_length for name in turns)
        has_more = completes_candidates(self._args) or CREDITS[self._args.credit].reruns
        more = ", plus those of candidates and re-runs" if has_more else ""
        return f"{batches} per {steps}, with up to {longest:,} decoding steps in sequence{more}"

    def _describe_window(self, lengths: Sequence[tuple[str, int]]) -> list[str]:
        windows = {name: self._runner.prompts.for_agent(name).window_size for name, _ in lengths}
        too_long = [(length, name) for name, length in lengths if length > (windows[name] or math.inf)]
        if not too_long:
            return []
        length, name = max(too_long)
        return [
            f"TOO LONG: an observation and a turn of {name} may have {length:,} tokens, but the model's window is "
            f"{windows[name]:,} tokens (context_overflow={self._args.context_overflow!r} applies)"
        ]


def _count(number: int, what: str, plural: str | None = None) -> str:
    return f"{number} {what if number == 1 else plural or what + 's'}"
