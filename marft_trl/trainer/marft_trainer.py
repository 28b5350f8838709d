# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""The trainer: the order of things, and nothing else."""

from __future__ import annotations

import contextlib
import functools
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import set_seed
from datasets import Dataset, IterableDataset
from peft import PeftConfig, PeftModel
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback
from trl import GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import get_config_model_id

from ..agents import AgentSpec, check_team
from ..anonymity import alias_names, anonymity
from ..configs import MARFTConfig, as_marft_config
from ..episodes import Episode
from ..progress import replace_default
from ..randomness import UserRandomness
from ..rollout.prompts import PromptBuilder, is_plain
from ..rollout.runner import EpisodeRunner
from ..rollout.transformers_generator import Sampling, TransformersGenerator
from ..rollout.views import View, team_view
from ..workflows import EnvironmentLoop, Workflow
from . import functional, setup
from .adapters import Policies, add_adapters
from .advantages import TeamAdvantages
from .batching import MicroBatch, Row, Slice, count_rows, cut_slices, loss_weights, together, weigh
from .cards import PAPER
from .evaluation import EvalMetric, check_eval_metrics, check_references
from .fingerprints import describe_base
from .fitting import TeamFitting
from .metrics import LocalAccelerator, StepMetrics
from .persistence import TeamPersistence
from .planning import TeamPlanning
from .reach import RewardReach
from .references import SyncReferences
from .reporting import TeamReporting
from .rollouts import Rollout
from .schedules import Schedule
from .scoring import TeamScoring
from .trl_seams import TrlEngine
from .turn_rewards import TurnRewards
from .updates import TeamUpdates
from .validation import check_datasets, check_rewards, check_turn_rewards, checked_reward
from .valuing import TeamValues


logger = get_logger(__name__)

# Share of joint actions, by effective sample size, below which factors of sequential updates are warned of
_LOWEST_EFFECTIVE_SHARE = 0.5


class MARFTTrainer(
    TeamPlanning,
    TeamReporting,
    TeamPersistence,
    TeamUpdates,
    TeamScoring,
    TeamFitting,
    TeamValues,
    TeamAdvantages,
    GRPOTrainer,
):
    """
    Trains a team of LLM agents with reinforcement learning: one adapter per agent on one base.

    The arguments that [`~trl.GRPOTrainer`] has mean the same here; those of a team come after them.

    Args:
        model (`str` or [`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            The base of all agents. With a `PeftModel`, adapters that bear the name of an agent's are trained on, and
            agents without one start from a copy of its adapter `default`.
        reward_funcs:
            Score the team's answer, as in `GRPOTrainer`. Functions also get `turns`, for each episode its list of
            [`Turn`], `earned`, what its turns earned, and `environments`, the environment it was played in or `None`.
            May be left out where the workflow earns rewards.
        args ([`MARFTConfig`], *optional*):
            Training arguments; a `GRPOConfig` works too.
        train_dataset, eval_dataset, processing_class, reward_processing_classes, callbacks, optimizers,
        quantization_config:
            As in `GRPOTrainer`.
        peft_config ([`~peft.PeftConfig`], *optional*):
            Config of every adapter whose agent brings none. Without any, all agents share one fully trained policy.
        tools (`list[Callable]`, *optional*):
            As in `GRPOTrainer`: functions that every agent may call which brings no `AgentSpec(tools=...)`.
        rollout_func:
            Not supported; write a [`Workflow`].
        environment_factory (`Callable`, *optional*):
            As in `GRPOTrainer`; short for `workflow=EnvironmentLoop(environment_factory)`.
        agents (`list[AgentSpec]`):
            The team, in order.
        critic_peft_config ([`~peft.PeftConfig`], *optional*):
            Config of the critic's LoRAs. That of the first agent's adapter unless given.
        workflow ([`Workflow`], *optional*, defaults to [`Sequential`]):
            Decides who acts next and what each sees.
        view (`Callable`, *optional*):
            `view(agent, prompt, seen)` returns the messages an agent is shown. See [`team_view`], the default.
        eval_metrics (*optional*):
            Metrics over the team's answers: of the `evaluate` package, or callables `metric(answers, **columns)`.
        anonymous (`bool` or `str`, *optional*, defaults to `False`):
            Ablation: whether role prompts are replaced by "You are agent 1 of 3 ..." (`True` or `"numbered"`) or left
            out (`"none"`), and teammates shown as `agent_1`, `agent_2`, ... in place of their names.

    Raises:
        ValueError, TypeError: something that cannot work, before anything is generated.
    """

    _tag_names = ["trl", "marft_trl", "marft", "multi-agent", "grpo"]
    _name = "MARFT"
    _paper = PAPER

    def __init__(
        self,
        model: str | PreTrainedModel | PeftModel,
        reward_funcs=None,
        args: MARFTConfig | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Dataset | IterableDataset | dict[str, Dataset | IterableDataset] | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        reward_processing_classes: PreTrainedTokenizerBase | list[PreTrainedTokenizerBase] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LambdaLR | None] = (None, None),
        quantization_config: Any = None,
        peft_config: PeftConfig | None = None,
        tools: list | None = None,
        rollout_func: Any = None,
        environment_factory: Any = None,
        *,
        agents: Sequence[AgentSpec],
        workflow: Workflow | None = None,
        critic_peft_config: PeftConfig | None = None,
        view: View = team_view,
        eval_metrics: EvalMetric | Sequence[EvalMetric] | None = None,
        anonymous: bool | str = False,
    ):
        if args is None:
            name = model if isinstance(model, str) else get_config_model_id(model.config)
            args = MARFTConfig(f"{name.split('/')[-1]}-MARFT")
        args = as_marft_config(args)
        setup.refuse_unsupported(args, rollout_func=rollout_func)
        self.agents = setup.with_tools(check_team(agents), tools)
        workflow = setup.choose_workflow(workflow, environment_factory)
        self.workflow = setup.check_workflow(workflow, self.agents)
        self.anonymous = anonymity(anonymous)
        self.agents = setup.prompted(self.agents, self.workflow, self.anonymous)
        self._aliases = alias_names(self.agents) if self.anonymous else {}
        self._eval_metrics = check_eval_metrics(eval_metrics)
        if train_dataset is None and isinstance(self.workflow, EnvironmentLoop):
            train_dataset = setup.placeholder_prompts(args)
        check_datasets(train_dataset, eval_dataset, args.generation_batch_size // args.num_generations)
        reward_funcs = setup.team_reward_funcs(reward_funcs, args, self.workflow)
        check_rewards(reward_funcs, train_dataset, eval_dataset)
        setup.check_stream(args, train_dataset)
        turn_rewards = setup.turn_reward_funcs(args, self.agents, self.workflow)
        check_turn_rewards(turn_rewards, train_dataset)
        check_references(self._eval_metrics, eval_dataset, args.eval_reference_column)

        set_seed(args.seed)  # adapters start at random
        model_was_named = isinstance(model, str)
        model = setup.load_base(model, args, quantization_config)
        processing_class = setup.load_tokenizer(processing_class, model, args)
        model = add_adapters(model, self.agents, peft_config)
        self.policies = Policies(model, self.agents)
        setup.check_learning(args, self.policies)
        trained = [self.policies.adapter_of(agent.name) for agent in self.agents if agent.trainable]
        self.schedule = Schedule.of(args, list(dict.fromkeys(trained)))
        self.critic = setup.make_critic(
            args, self.policies, model, self.agents, critic_peft_config, autocast=lambda: self.accelerator.autocast()
        )
        no_reference = setup.without_reference(args, if_=self.policies.has_adapters)
        with no_reference, setup.without_false_warning(model_was_named):
            super().__init__(
                model=model,
                reward_funcs=[checked_reward(func) for func in reward_funcs],
                args=args,
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                processing_class=processing_class,
                reward_processing_classes=reward_processing_classes,
                callbacks=callbacks,
                optimizers=optimizers,
            )
        self.beta = args.beta
        self.policies.remember_starts(all_of_them=args.sync_ref_model)
        if args.sync_ref_model and self.policies.has_adapters:
            self.add_callback(SyncReferences(self.policies))
        self._turn_rewards = TurnRewards(self, turn_rewards)
        self._prepare_team(view)

    @property
    def view(self) -> View:
        """What agents are shown; may be set between calls."""
        return self._runner.prompts.view

    @view.setter
    def view(self, view: View) -> None:
        self._runner.prompts.view = view

    def _prepare_team(self, view: View) -> None:
        """What the parent's constructor knows nothing of."""
        args = self.args
        for theirs, ours in replace_default(self.callback_handler.callbacks).items():
            self.remove_callback(theirs)
            self.add_callback(ours([agent.name for agent in self.agents]))
        self._specs = {agent.name: agent for agent in self.agents}
        self._samplings = {agent.name: Sampling.of(agent, args) for agent in self.agents}
        self._uses_tools = bool(self.workflow.functions) or any(agent.tools for agent in self.agents)
        if self._uses_tools:
            self.chat_template = setup.prepare_tools(self._tokenizer, self.agents, self.workflow)
        if args.level == "action":
            self.importance_sampling_level = "sequence"  # one ratio per turn; `_as_actions` says which
        self._prepare_scoring()
        self._prepare_fitting()
        # As in TRL: rows of the policy that is about to be updated need no old log-probabilities
        self._needs_old_logps = args.gradient_accumulation_steps % self.schedule.generate_every != 0
        self._needs_old_logps &= args.use_policy_ratio or args.update_order == "sequential"
        self._generator = TransformersGenerator(
            TrlEngine(self),
            self.policies,
            self._samplings,
            share=self._shares_prefixes,
            records=self._needs_old_logps and self._samples_what_it_scores(),
        )
        self._runner = EpisodeRunner(
            self.agents,
            self.workflow,
            self._prompt_builder(view),
            self._generator,
            self._tokenizer,
            ends=self.eos_token_ids,
            randomness=UserRandomness(args.seed + args.process_index, self.accelerator.device),
            limits=setup.tool_limits(args),
            uses_tools=self._uses_tools,
            aliases=self._aliases,
            patience=args.workflow_timeout,
        )
        self._warned_of_factors = False
        self._team_seeds = random.Random(args.seed)  # noqa: S311  # of samples that no seed is given for
        self._base_description = describe_base(
            self._base_of(self.model),
            self._tokenizer,
            self.chat_template or self._tokenizer.chat_template,
            revision=(args.model_init_kwargs or {}).get("revision"),
        )
        self._reach = RewardReach([name for name in self._specs if self._is_trained(name)])
        self._prepare_reports()
        self._prepare_counters()
        self._prepare_updates()
        self._prepare_values()
        if args.ddp_broadcast_buffers is None:
            args.ddp_broadcast_buffers = False  # a collective in forward, which processes run unequally often

    def _prompt_builder(self, view: View) -> PromptBuilder:
        return PromptBuilder(
            self._tokenizer,
            tokenize=self._tokenize_fresh,
            view=view,
            chat_template_kwargs=self.chat_template_kwargs,
            plain=is_plain(self.agents, self._uses_tools),
            window=setup.context_window(self.model),
            reserved={name: sampling.max_completion_length for name, sampling in self._samplings.items()},
            overflow=self.args.context_overflow,
            chat_template=self.chat_template,
            ends=self.eos_token_ids,
            aliases=self._aliases,
        )

    # ---- One step ----

    def _prepare_inputs(self, generation_batch: list[dict[str, Any]]) -> Slice:
        """The slice of the present step; new episodes when they are due, as in `GRPOTrainer`."""
        if self._step % self.schedule.generate_every == 0 or self._buffered_inputs is None:
            self._buffered_inputs = self._generate_and_score_completions(generation_batch)
        updated = self.schedule.just_updated(self._step)
        if updated is not None:
            self._multiply_by_ratios(updated)
        return self._buffered_inputs[self._step % self.args.steps_per_generation]

    def training_step(self, model: nn.Module, inputs, num_items_in_batch=None) -> torch.Tensor:
        self._open_window()
        # Processes run different numbers of micro-batches: no gradient is reduced before all of them are done.
        with self.accelerator.no_sync(model) if self.accelerator.num_processes > 1 else contextlib.nullcontext():
            loss = super().training_step(model, inputs, num_items_in_batch)
        self._log_step_metrics()
        if self.accelerator.sync_gradients:
            self._finish_gradients()
        self.policies.activate(self.agents[0].name)  # whoever uses the model next gets an agent, not the critic
        return loss

    def compute_loss(self, model, inputs: Slice, return_outputs=False, num_items_in_batch=None) -> torch.Tensor:
        """The loss of a slice. All micro-batches but the last have had their backward pass when it returns."""
        if return_outputs:
            raise ValueError("MARFTTrainer does not support returning outputs.")
        learning = self._learning()
        self._window_adapters |= inputs.adapters & learning
        parts = self._losses(model, inputs, learning)
        if not parts:  # no agent of the slice learns on this process; others may have rows
            return torch.zeros((), device=self.accelerator.device, requires_grad=True)
        total = torch.zeros((), device=self.accelerator.device)
        for loss_of_part in parts[:-1]:
            loss = loss_of_part()
            self.accelerator.backward(loss)
            total += loss.detach()
        return parts[-1]() + total

    def _losses(self, model, slice_: Slice, learning: frozenset[str]) -> list[Callable[[], torch.Tensor]]:
        """The losses of the micro-batches of a slice, to be computed one after the other."""
        self._entropy_thresholds = self._high_entropy_thresholds(slice_, learning)
        # The critic comes first: what has been kept of its passes is gone before the policies need memory
        parts = [(self._value_loss, batch) for batch in self._value_batches(slice_.rows) if batch.agent in learning]
        parts += [
            (self._micro_batch_loss, batch)
            for batch in self._micro_batches([row for row in slice_.rows if row.is_trained])
            if batch.adapter in learning
        ]
        return [functools.partial(loss_of, model, batch, slice_) for loss_of, batch in parts]

    @torch.no_grad()
    def _evaluation_loss(self, rollout: Rollout) -> torch.Tensor:
        """
        The loss of the episodes of an evaluation batch, as one slice, under the rules of training. Episodes whose
        advantages or credit would need further generation are compared within their group (see `_rules`).
        """
        episodes, std = self._scored_rows(rollout)
        if std is not None and self._episodes_per_prompt > 1:
            self._metrics["eval"]["frac_reward_zero_std"].append(_share_of_zeros(std))
        self._metrics["eval"]["num_tokens"] = [self.state.num_input_tokens_seen]
        (slice_,) = self._weighed([[row for its_rows in episodes for row in its_rows]])
        learning = frozenset(self.policies.trained) | frozenset(self.critic.parts if self.critic is not None else ())
        total = torch.zeros((), device=self.accelerator.device)
        with self._apart_from_training(), self.compute_loss_context_manager():
            for loss in self._losses(self.model, slice_, learning):
                total += loss()
            self._log_step_metrics()
        self.policies.activate(self.agents[0].name)
        return total

    @contextlib.contextmanager
    def _apart_from_training(self) -> Iterator[None]:
        """Context manager: what losses take note of for the update of an optimizer step stays as it was."""
        names = ("_window_sums", "_value_sums", "_step_metrics", "_kept_values", "_entropy_thresholds")
        outer = {name: getattr(self, name) for name in names}
        self._window_sums, self._kept_values = {}, []
        self._value_sums = torch.zeros_like(self._value_sums)
        self._step_metrics = StepMetrics([agent.name for agent in self.agents])
        try:
            yield
        finally:
            self.__dict__.update(outer)

    def _learning(self) -> frozenset[str]:
        """Adapters, and parts of the critic, that learn in the present step."""
        learning = self.schedule.learning(self._step, self.state.global_step)
        if self.critic is not None and self.schedule.critic_learns(self._step, self.state.global_step):
            learning |= frozenset(self.critic.parts)
        return learning

    def _micro_batch_loss(self, model, batch: MicroBatch, slice_: Slice) -> torch.Tensor:
        steps, processes = self.args.steps_per_generation, self.accelerator.num_processes
        steps = steps if self.model.training else 1  # an evaluation batch is one slice
        weights = loss_weights(batch, slice_, self.loss_type, processes, steps, self.args.level)
        tensors = self._collate(batch.rows)
        if not self.args.use_policy_ratio:  # then TRL takes the present policy for the one that sampled: a ratio of 1
            tensors.pop("old_per_token_logps", None)
        tensors["num_items_in_batch"] = torch.tensor(weights.num_items_in_batch, device=self.accelerator.device)
        tensors["action_divisors"] = self._action_divisors(batch.rows)
        self._act(batch.agent)
        with self._alone(batch, tensors, self._entropy_coef_of(batch.adapter) * weights.entropy):
            loss = self._compute_loss(model, tensors)
        return loss * weights.loss

    @contextlib.contextmanager
    def _alone(self, batch: MicroBatch, tensors: dict[str, torch.Tensor], entropy_coef: float) -> Iterator[None]:
        """Within, TRL's loss sees one agent on one process; its metrics go to the agent."""
        own = {"train": defaultdict(list), "eval": defaultdict(list)}
        inner = {
            "accelerator": LocalAccelerator(self.accelerator),
            "_metrics": own,
            "entropy_coef": entropy_coef,
            "use_adaptive_entropy": False,  # each adapter has a controller of its own
            "max_completion_length": self._samplings[batch.agent].max_completion_length,
            "_loss_inputs": tensors,
            "_loss_adapter": batch.adapter,
            "get_high_entropy_mask": self._entropy_mask(batch.agent),
        }
        outer = {name: getattr(self, name, None) for name in inner}
        self.__dict__.update(inner)
        try:
            yield
        finally:
            self.__dict__.update(outer)
        turns = sum(row.num_loss_tokens > 0 for row in batch.rows)
        self._step_metrics.add(
            batch.agent, own[self._mode], turns if self.args.level == "action" else batch.num_loss_tokens
        )

    # ---- Episodes and their advantages ----

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> list[Slice]:
        """Episodes for a generation batch, as slices of training rows."""
        rollout = self._roll_out(inputs)
        episodes, std = self._scored_rows(rollout)
        rollout.advantages = self._advantages_by_turn(rollout, episodes)
        self._reach.note_advantages(self._who_has_advantages(episodes))
        self._log_rollout(inputs, rollout, std)
        order = torch.randperm(len(episodes))  # the one draw that TRL makes here
        if self._shares_prefixes:
            order = together(order, self._group_of(len(episodes)))
        return self._weighed(cut_slices(episodes, order, self.args.per_device_train_batch_size))

    def _scored_rows(self, rollout: Rollout) -> tuple[list[list[Row]], torch.Tensor | None]:
        """
        The training rows of each episode, with all that their losses need, and the standard deviation in the group of
        each episode `(E,)` where there is no critic.
        """
        episodes = self._rows(rollout)
        rows = [row for its_rows in episodes for row in its_rows]
        trained = [row for row in rows if row.is_trained]
        if self.model.training:
            self._fit(rows)
        keeps_values = self._may_keep_values  # within, gradients are not checkpointed
        with torch.no_grad(), disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
            if self._needs_old_logps and self.model.training:
                self._score([row for row in trained if row.old_per_token_logps is None], "old_per_token_logps")
            if self.beta != 0.0:
                self._score(trained, "ref_per_token_logps")
            last_values = self._value_rollout(rollout, rows, keeps_values) if self.critic is not None else []
        if self.critic is None:
            return episodes, self._baseline_advantages(rollout, episodes)
        self._critic_advantages(rollout, episodes, last_values)
        return episodes, None

    def _who_has_advantages(self, episodes: Sequence[Sequence[Row]]) -> dict[str, bool]:
        """For each trained agent whether a turn of it on any process has an advantage, or with a critic a return."""
        own = {row.agent for its_rows in episodes for row in its_rows if torch.as_tensor(row.advantage).any()}
        if self.critic is not None:
            own = self._credited
        names = [name for name in self._specs if self._is_trained(name)]
        flags = self._reduce(torch.tensor([name in own for name in names], dtype=torch.float64), "max")
        return dict(zip(names, (flags > 0).tolist(), strict=True))

    def _weighed(self, slices: list[list[Row]]) -> list[Slice]:
        adapters, parts = self.policies.names, self.critic.parts if self.critic is not None else []
        counts = count_rows(slices, adapters, parts).to(self.accelerator.device)
        return weigh(slices, adapters, self.accelerator.reduce(counts, reduction="sum"), parts)

    def _rows(self, rollout: Rollout) -> list[list[Row]]:
        """
        Training rows of each episode: one for each turn of a trained agent; with a critic, one for each turn; where
        turns have candidates, one for each candidate.
        """
        turns, is_training = [list(episode.turns) for episode in rollout.episodes], self.model.training
        if self._rules[0] == "turn":
            turns = [[] for _ in rollout.episodes]
            for node in rollout.nodes:
                turns[node.episode] += node.turns
        elif self.critic is None and self._is_one_advantage_for_all:
            turns = [[turn for turn in its if self._is_trained(turn.agent)] for its in turns]
        return [
            [
                Row(
                    agent=turn.agent,
                    adapter=self.policies.adapter_of(turn.agent),
                    prompt_ids=torch.tensor(turn.prompt_ids, dtype=torch.long),
                    completion_ids=torch.tensor(turn.completion_ids, dtype=torch.long),
                    counts=not (self.mask_truncated_completions and turn.truncated),
                    episode=index,
                    is_trained=self._is_trained(turn.agent),
                    round=rounds[turn.index] if 0 <= turn.index < len(rounds) else 0,  # a candidate is in none
                    words=max(len(turn.text.split()), 1),
                    critic=self.critic.part_of(turn.agent) if self.critic is not None else None,
                    old_per_token_logps=None if turn.logps is None or not is_training else torch.tensor(turn.logps),
                )
                for turn in its
            ]
            for index, (its, rounds) in enumerate(zip(turns, map(Episode.rounds, rollout.episodes), strict=True))
        ]

    def _is_trained(self, agent: str) -> bool:
        return self.policies.adapter_of(agent) in self.policies.trained

    # ---- Sequential updates ----

    def _multiply_by_ratios(self, adapter: str) -> None:
        """Multiply the advantages of every episode by the ratios of the turns of an adapter that was just updated."""
        rows = [row for slice_ in self._buffered_inputs for row in slice_.rows]
        updated = [row for row in rows if row.adapter == adapter and row.is_trained and len(row.completion_ids)]
        old = [row.old_per_token_logps for row in updated]
        with torch.no_grad(), disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
            self._score(updated, "old_per_token_logps")
        actions = {key: index for index, key in enumerate(dict.fromkeys((row.episode, row.round) for row in rows))}
        log_ratios, places = torch.zeros(0), torch.zeros(0, dtype=torch.long)
        if updated:
            divisors = (
                self._action_divisors(updated).cpu() if self.args.level == "action" else torch.ones(len(updated))
            )
            sums = torch.stack(
                [(row.old_per_token_logps - then).sum() for row, then in zip(updated, old, strict=True)]
            )
            log_ratios = sums / divisors
            places = torch.tensor([actions[row.episode, row.round] for row in updated])
        for row, then in zip(updated, old, strict=True):
            row.old_per_token_logps = then
        more = functional.sequential_log_factors(log_ratios, places, len(actions))
        for row in rows:
            row.log_factor += more[actions[row.episode, row.round]].item()
        so_far = {(row.episode, row.round): row.log_factor for row in rows}
        log_factors = torch.tensor(list(so_far.values()))
        factors = functional.clipped_factors(log_factors, self.args.sequential_clip)
        by_action = dict(zip(so_far, factors.tolist(), strict=True))
        for row in rows:
            row.factor = by_action[row.episode, row.round]
        self._log_factors(adapter, factors, functional.clipped_factors(log_factors, None))

    def _log_factors(self, adapter: str, factors: torch.Tensor, unclipped: torch.Tensor) -> None:
        """
        Metrics of the factors of joint actions `(J,)` after an adapter's update, and a warning where they vary much
        before they are clipped.
        """
        pair = [its.double() for its in (factors, unclipped)]
        sums = torch.stack([torch.stack([torch.tensor(len(its)).double(), its.sum(), (its**2).sum()]) for its in pair])
        totals = self._reduce(sums, "sum")
        count, total, squares = totals[0].tolist()
        mean, share = total / max(count, 1), functional.effective_share(totals[1])
        metrics = self._metrics["train"]
        metrics["sequential_factor/mean"].append(mean)
        metrics["sequential_factor/std"].append(max(squares / max(count, 1) - mean**2, 0.0) ** 0.5)
        metrics["sequential_factor/effective_share"].append(share)
        if share < _LOWEST_EFFECTIVE_SHARE and not self._warned_of_factors:
            self._warned_of_factors = True
            logger.warning(
                f"The factors of `update_order='sequential'` have an effective sample size of {share:.0%} behind the "
                f"adapter {adapter!r}, so the next agents would learn from a few episodes. Lower the learning rate or "
                "`num_iterations`, set a smaller `sequential_clip`, or set `level='action'` with "
                "`action_logprob='token'`, whose ratios do not grow with length."
            )


def _share_of_zeros(values: torch.Tensor) -> float:
    return torch.isclose(values, torch.zeros_like(values)).float().mean().item()
