# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""The trainer: the order of things, and nothing else."""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import gather_object, set_seed
from datasets import Dataset, IterableDataset
from peft import PeftConfig, PeftModel
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback
from trl import GRPOTrainer, is_conversational
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import get_config_model_id

from ..agents import AgentSpec, check_team
from ..configs import MARFTConfig, as_marft_config
from ..episodes import Turn
from ..rollout.collector import Request, collect
from ..rollout.prompts import PromptBuilder, View, team_view
from ..rollout.transformers_generator import Sampling, TransformersGenerator
from ..workflows import Sequential, Workflow
from . import gradients, setup
from .adapters import Policies, add_adapters
from .batching import MicroBatch, Row, Slice, collate, count_rows, cut_slices, loss_weights, micro_batches, weigh
from .cards import PAPER
from .evaluation import EvalMetric, check_eval_metrics, check_references
from .functional import agent_advantages, group_advantages, normalized_objectives, team_rewards
from .metrics import LocalAccelerator
from .persistence import TeamPersistence
from .reporting import Rollout, TeamReporting
from .scoring import ScoringTemperature
from .validation import check_datasets, check_prompts, check_rewards, checked_reward


logger = get_logger(__name__)

# Updates in a row that may be skipped for gradients that are not finite before training stops.
MAX_SKIPPED_UPDATES = 5

# Generation batches in a row that no reward function may score before training stops.
MAX_UNSCORED_BATCHES = 3


class MARFTTrainer(TeamReporting, TeamPersistence, GRPOTrainer):
    """
    Trains a team of LLM agents with reinforcement learning: one adapter per agent on one base.

    The arguments that [`~trl.GRPOTrainer`] has mean the same here; those of a team come after them.

    Args:
        model (`str` or [`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            The base of all agents. With a `PeftModel`, adapters that bear the name of an agent's are trained on, and
            agents without one start from a copy of its adapter `default`.
        reward_funcs:
            Score the team's answer, as in `GRPOTrainer`. Functions also get `turns`: for each episode its list of
            [`Turn`].
        args ([`MARFTConfig`], *optional*):
            Training arguments; a `GRPOConfig` works too.
        train_dataset, eval_dataset, processing_class, reward_processing_classes, callbacks, optimizers,
        quantization_config:
            As in `GRPOTrainer`.
        peft_config ([`~peft.PeftConfig`], *optional*):
            Config of every adapter whose agent brings none. Without any, all agents share one fully trained policy.
        tools, rollout_func, environment_factory:
            Not supported; write a [`Workflow`].
        agents (`list[AgentSpec]`):
            The team, in order.
        workflow ([`Workflow`], *optional*, defaults to [`Sequential`]):
            Decides who acts next and what each sees.
        view (`Callable`, *optional*):
            `view(agent, prompt, seen)` returns the messages an agent is shown. See [`team_view`], the default.
        eval_metrics (*optional*):
            Metrics over the team's answers: of the `evaluate` package, or callables `metric(answers, **columns)`.

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
        view: View = team_view,
        eval_metrics: EvalMetric | Sequence[EvalMetric] | None = None,
    ):
        if args is None:
            name = model if isinstance(model, str) else get_config_model_id(model.config)
            args = MARFTConfig(f"{name.split('/')[-1]}-MARFT")
        args = as_marft_config(args)
        setup.refuse_unsupported(args, tools=tools, rollout_func=rollout_func, environment_factory=environment_factory)
        self.agents = check_team(agents)
        self.workflow = setup.check_workflow(workflow or Sequential(), self.agents)
        self._eval_metrics = check_eval_metrics(eval_metrics)
        check_datasets(train_dataset, eval_dataset, args.generation_batch_size // args.num_generations)
        reward_funcs = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs] * (reward_funcs is not None)
        check_rewards(reward_funcs, train_dataset, eval_dataset)
        check_references(self._eval_metrics, eval_dataset, args.eval_reference_column)

        set_seed(args.seed)  # adapters start at random
        model_was_named = isinstance(model, str)
        model = setup.load_base(model, args, quantization_config)
        processing_class = setup.load_tokenizer(processing_class, model, args)
        model = add_adapters(model, self.agents, peft_config)
        self.policies = Policies(model, self.agents)
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
        self.policies.remember_starts()
        self._prepare_team(view)

    @property
    def view(self) -> View:
        """What agents are shown; may be set between calls."""
        return self._prompts.view

    @view.setter
    def view(self, view: View) -> None:
        self._prompts.view = view

    def _prepare_team(self, view: View) -> None:
        """What the parent's constructor knows nothing of."""
        args = self.args
        self._specs = {agent.name: agent for agent in self.agents}
        self._samplings = {agent.name: Sampling.of(agent, args) for agent in self.agents}
        self._generator = TransformersGenerator(self, self.policies, self._samplings)
        self._prompts = PromptBuilder(
            self._tokenizer,
            tokenize=lambda prompts: self._tokenize_prompts(prompts)[0],
            view=view,
            chat_template_kwargs=self.chat_template_kwargs,
            plain=len(self.agents) == 1 and self.agents[0].system_prompt is None,
            window=setup.context_window(self.model),
            reserved={name: sampling.max_completion_length for name, sampling in self._samplings.items()},
            drop_oldest_turn=args.context_overflow == "drop_oldest_turn",
        )
        base = self.model.get_base_model() if self.policies.has_adapters else self.model
        self._temperature = ScoringTemperature(
            [base] if self.ref_model is None else [base, self.ref_model],
            [sampling.temperature for sampling in self._samplings.values()],
            default=self.temperature,
            head={"cast_lm_head_to_fp32": args.cast_lm_head_to_fp32, "outputs": ("log_probs", "entropy")},
        )
        self._prepare_reports()
        self._window_adapters: set[str] = set()
        self._skipped_in_a_row: dict[str, int] = defaultdict(int)
        self._unscored_in_a_row = 0
        self._dropped_turns = 0
        if args.ddp_broadcast_buffers is None:
            args.ddp_broadcast_buffers = False  # a collective in forward, which processes run unequally often

    # ---- One step ----

    def _prepare_inputs(self, generation_batch: list[dict[str, Any]]) -> Slice:
        """The slice of the present step; new episodes when they are due, as in `GRPOTrainer`."""
        generate_every = self.args.steps_per_generation * self.num_iterations
        if self._step % generate_every == 0 or self._buffered_inputs is None:
            self._buffered_inputs = self._generate_and_score_completions(generation_batch)
        return self._buffered_inputs[self._step % self.args.steps_per_generation]

    def training_step(self, model: nn.Module, inputs, num_items_in_batch=None) -> torch.Tensor:
        # Processes run different numbers of micro-batches: no gradient is reduced before all of them are done.
        with self.accelerator.no_sync(model) if self.accelerator.num_processes > 1 else contextlib.nullcontext():
            loss = super().training_step(model, inputs, num_items_in_batch)
        self._log_step_metrics()
        if self.accelerator.sync_gradients:
            self._finish_gradients()
        return loss

    def compute_loss(self, model, inputs: Slice, return_outputs=False, num_items_in_batch=None) -> torch.Tensor:
        """The loss of a slice. All micro-batches but the last have had their backward pass when it returns."""
        if return_outputs:
            raise ValueError("MARFTTrainer does not support returning outputs.")
        self._window_adapters |= inputs.adapters
        batches = list(self._micro_batches(inputs.rows))
        if not batches:  # no agent of the slice spoke on this process; others may have rows
            return torch.zeros((), device=self.accelerator.device, requires_grad=True)
        total = torch.zeros((), device=self.accelerator.device)
        for batch in batches[:-1]:
            loss = self._micro_batch_loss(model, batch, inputs)
            self.accelerator.backward(loss)
            total += loss.detach()
        return self._micro_batch_loss(model, batches[-1], inputs) + total

    def _micro_batches(self, rows: Sequence[Row]) -> Iterator[MicroBatch]:
        return micro_batches(rows, self.args.per_device_train_batch_size, self.args.max_tokens_per_micro_batch)

    def _micro_batch_loss(self, model, batch: MicroBatch, slice_: Slice) -> torch.Tensor:
        weights = loss_weights(
            batch, slice_, self.loss_type, self.accelerator.num_processes, self.args.steps_per_generation
        )
        tensors = self._collate(batch.rows)
        tensors["num_items_in_batch"] = torch.tensor(weights.num_items_in_batch, device=self.accelerator.device)
        self._act(batch.agent)
        with self._alone(batch, entropy_coef=self.entropy_coef * weights.entropy):
            loss = self._compute_loss(model, tensors)
        return loss * weights.loss

    @contextlib.contextmanager
    def _alone(self, batch: MicroBatch, entropy_coef: float) -> Iterator[None]:
        """Within, TRL's loss sees one agent on one process; its metrics go to the agent."""
        outer = self.accelerator, self._metrics, self.entropy_coef, self.max_completion_length
        own = {"train": defaultdict(list), "eval": defaultdict(list)}
        self.accelerator, self._metrics, self.entropy_coef = LocalAccelerator(self.accelerator), own, entropy_coef
        self.max_completion_length = self._samplings[batch.agent].max_completion_length
        try:
            yield
        finally:
            self.accelerator, self._metrics, self.entropy_coef, self.max_completion_length = outer
        self._step_metrics.add(batch.agent, own["train"], batch.num_loss_tokens)

    def _act(self, agent: str) -> None:
        self.policies.activate(agent)
        self._temperature.switch_to(self._samplings[agent].temperature)

    def _collate(self, rows: Sequence[Row]) -> dict[str, torch.Tensor]:
        return collate(rows, self._tokenizer.pad_token_id, self.pad_to_multiple_of, self.accelerator.device)

    # ---- Episodes and their advantages ----

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> list[Slice]:
        """Episodes for a generation batch, as slices of training rows."""
        rollout = self._roll_out(inputs)
        rollout.advantages, std = self._advantages(rollout)
        self._log_rollout(inputs, rollout, std)
        episodes = [self._rows(rollout, index) for index in range(len(rollout.episodes))]
        rows = [row for its_rows in episodes for row in its_rows]
        with torch.no_grad(), disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
            # As in TRL: rows of the policy that is about to be updated need no old log-probabilities
            if self.args.gradient_accumulation_steps % (self.args.steps_per_generation * self.num_iterations) != 0:
                self._score(rows, "old_per_token_logps")
            if self.beta != 0.0:
                self._score(rows, "ref_per_token_logps")
        order = torch.randperm(len(episodes))  # the one draw that TRL makes here
        slices = cut_slices(episodes, order, self.args.per_device_train_batch_size)
        adapters = self.policies.names
        counts = count_rows(slices, adapters).to(self.accelerator.device)
        return weigh(slices, adapters, self.accelerator.reduce(counts, reduction="sum"))

    def _roll_out(self, inputs: list[dict[str, Any]]) -> Rollout:
        check_prompts(inputs, "the dataset")
        self._dropped_turns = 0
        episodes = collect(self.workflow, inputs, list(self._specs), self._answer)
        dropped = sum(gather_object([self._dropped_turns]))
        self._metrics["train" if self.model.training else "eval"]["context/dropped_turns"].append(float(dropped))
        prompts = [row["prompt"] for row in inputs]
        answers = [episode.answer for episode in episodes]
        if is_conversational({"prompt": prompts[0]}):
            completions = [[{"role": "assistant", "content": turn.text}] for turn in answers]
        else:
            completions = [turn.text for turn in answers]
        rows = [{**row, "turns": episode.turns} for row, episode in zip(inputs, episodes, strict=True)]
        rewards_per_func = self._calculate_rewards(
            rows, prompts, completions, [list(turn.completion_ids) for turn in answers]
        )
        self._check_rewards(rewards_per_func)
        rewards = team_rewards(rewards_per_func, self.reward_weights.to(rewards_per_func.device))
        return Rollout(episodes, rewards_per_func, rewards)

    def _answer(self, requests: Sequence[Request]) -> list[Turn]:
        """Turns for all waiting requests: observe, generate, decode."""
        agents = [request.agent for request in requests]
        observations = self._prompts.build(
            [(self._specs[request.agent], request.episode.prompt, request.seen) for request in requests]
        )
        completions = self._generator.generate(agents, [observation.ids for observation in observations])
        texts = self._tokenizer.batch_decode(completions, skip_special_tokens=True)
        self._dropped_turns += sum(observation.dropped for observation in observations)
        return [
            Turn(
                agent=agent,
                text=text,
                index=-1,
                sees=tuple(turn.index for turn in observation.seen),
                observation=observation.content,
                prompt_ids=observation.ids,
                completion_ids=ids,
                raw_text=self._tokenizer.decode(ids[:-1] if ids and ids[-1] in self.eos_token_ids else ids),
                truncated=self._is_truncated(agent, ids),
            )
            for agent, text, observation, ids in zip(agents, texts, observations, completions, strict=True)
        ]

    def _is_truncated(self, agent: str, ids: list[int]) -> bool:
        ends = (*self.eos_token_ids, self._tokenizer.pad_token_id)
        stop = self._samplings[agent].stop
        return bool(ids) and ids[-1] not in ends and not (stop and self._generator.holds_stop(ids, stop))

    def _check_rewards(self, rewards_per_func: torch.Tensor) -> None:
        for index, (func, name) in enumerate(zip(self.reward_funcs, self.reward_func_names, strict=True)):
            if isinstance(func, nn.Module) and not rewards_per_func[:, index].isfinite().all():
                raise ValueError(
                    f"The reward model `{name}` returned a score that is NaN or infinite. Training on it would "
                    "destroy the weights or silence its group. Check its input length and dtype."
                )
        if not self.model.training or not torch.isnan(rewards_per_func).all():
            self._unscored_in_a_row = 0
            return
        self._unscored_in_a_row += 1
        if self._unscored_in_a_row >= MAX_UNSCORED_BATCHES:
            raise ValueError(
                f"Every reward function ({', '.join(self.reward_func_names)}) returned None for all "
                f"{len(rewards_per_func)} episodes of {MAX_UNSCORED_BATCHES} batches in a row, so there is nothing to "
                "learn from. At least one has to return a number for some of them."
            )

    def _advantages(self, rollout: Rollout) -> tuple[torch.Tensor, torch.Tensor]:
        """Advantages `(E, A)` of each agent's turns in each episode, and the deviation in each episode's group."""
        rewards, group_size, scale = rollout.rewards, self.num_generations, self.scale_rewards
        if self.multi_objective_aggregation == "normalize_then_sum":
            weights = self.reward_weights.to(rewards.device)
            rewards = normalized_objectives(rollout.rewards_per_func, weights, group_size)
            group_size, scale = len(rewards), "group"  # then over the whole batch, as in TRL
        advantages, std = group_advantages(rewards, group_size, scale)
        if self.args.advantage == "agent":
            counts = [[sum(t.agent == a for t in e.turns) for a in self._specs] for e in rollout.episodes]
            counts = self.accelerator.gather(torch.tensor(counts, device=rewards.device))
            return agent_advantages(rewards, counts, group_size, scale)[0], std
        return advantages.unsqueeze(1).expand(-1, len(self.agents)), std

    def _rows(self, rollout: Rollout, index: int) -> list[Row]:
        """Training rows of one local episode; frozen agents have none."""
        first = self.accelerator.process_index * len(rollout.episodes)
        own = dict(zip(self._specs, rollout.advantages[first + index].tolist(), strict=True))
        return [
            Row(
                agent=turn.agent,
                adapter=self.policies.adapter_of(turn.agent),
                prompt_ids=torch.tensor(turn.prompt_ids, dtype=torch.long),
                completion_ids=torch.tensor(turn.completion_ids, dtype=torch.long),
                advantage=own[turn.agent],
                counts=not (self.mask_truncated_completions and turn.truncated),
            )
            for turn in rollout.episodes[index].turns
            if self.policies.adapter_of(turn.agent) in self.policies.trained
        ]

    def _score(self, rows: Sequence[Row], name: str) -> None:
        """Fill in log-probabilities of the sampled tokens under the agents' policies or references."""
        for batch in self._micro_batches(rows):
            tensors = self._collate(batch.rows)
            ids = torch.cat([tensors["prompt_ids"], tensors["completion_ids"]], dim=1)
            mask = torch.cat([tensors["prompt_mask"], tensors["completion_mask"]], dim=1)
            self._act(batch.agent)
            model, as_reference = self.model, contextlib.nullcontext()
            if name == "ref_per_token_logps" and self.ref_model is not None:
                model = self.ref_model
            elif name == "ref_per_token_logps":
                as_reference = self.policies.reference(batch.agent)
            with as_reference:
                logps, _, _ = self._get_per_token_logps_and_entropies(
                    model, ids, mask, tensors["completion_ids"].size(1)
                )
            for row, its in zip(batch.rows, logps.cpu(), strict=True):
                setattr(row, name, its[: len(row.completion_ids)].clone())

    # ---- Gradients and the optimizer ----

    def create_optimizer(self, model=None) -> torch.optim.Optimizer:
        given = self.optimizer is not None
        optimizer = super().create_optimizer(model)
        adapters = self._trained_parameters()
        if not given:
            rates = {self.policies.adapter_of(agent.name): agent.learning_rate for agent in self.agents}
            gradients.split_groups(optimizer, adapters, rates)
        missing = gradients.untrained(optimizer, adapters)
        if missing:
            raise ValueError(
                f"The optimizer passed in `optimizers=` does not have the parameters of {missing}, so these adapters "
                "would not train. Adapters are created by the trainer: leave `optimizers` out and set `optim`, "
                "`learning_rate` and `AgentSpec(learning_rate=...)`, or pass a `PeftModel` that has the adapters."
            )
        return optimizer

    def _trained_parameters(self) -> dict[str, dict[str, nn.Parameter]]:
        return {adapter: self.policies.parameters(adapter) for adapter in self.policies.trained}

    def _finish_gradients(self) -> None:
        """
        One reduction over processes, of the adapters that have had a row on any of them since the last update. The
        others have no gradient, so the optimizer leaves them out.
        """
        if self.accelerator.num_processes > 1:
            adapters = self._trained_parameters()
            spoke = [adapter for adapter in adapters if adapter in self._window_adapters]
            gradients.average_gradients(
                [parameter for adapter in spoke for parameter in adapters[adapter].values()],
                self.accelerator.num_processes,
            )
        self._window_adapters.clear()

    def _clip_grad_norm(self, model) -> torch.Tensor:
        return self._clip_adapters(self.args.max_grad_norm)

    def _get_grad_norm(self, model, grad_norm=None):
        return self._clip_adapters(math.inf) if grad_norm is None else grad_norm

    def _clip_adapters(self, max_norm: float) -> torch.Tensor:
        """Clip each adapter by its own norm, and leave out of the update those whose gradient is not finite."""
        self.accelerator.unscale_gradients()
        norms = []
        for adapter, parameters in self._trained_parameters().items():
            present = {name: parameter for name, parameter in parameters.items() if parameter.grad is not None}
            if not present:
                continue
            norm = gradients.clip_gradients(present, max_norm)
            if self.accelerator.scaler is None:  # with fp16, overflow is the gradient scaler's business
                self._guard(adapter, norm, present)
            if norm.isfinite():
                norms.append(norm)
            for agent in self.policies.agents_of(adapter):
                self._metrics["train"][f"agents/{agent}/grad_norm"].append(norm.item())
        if len(norms) == 1:
            return norms[0]
        return torch.stack(norms).norm() if norms else torch.zeros(())

    def _guard(self, adapter: str, norm: torch.Tensor, parameters: dict[str, nn.Parameter]) -> None:
        for agent in self.policies.agents_of(adapter):
            self._metrics["train"][f"agents/{agent}/skipped_updates"].append(float(not norm.isfinite()))
        if norm.isfinite():
            self._skipped_in_a_row[adapter] = 0
            return
        gradients.drop_gradients(parameters)
        self._skipped_in_a_row[adapter] += 1
        agents = ", ".join(map(repr, self.policies.agents_of(adapter)))
        message = (
            f"The gradient of the adapter {adapter!r} (agents {agents}) is not finite in step "
            f"{self.state.global_step + 1}; its update was skipped."
        )
        if self._skipped_in_a_row[adapter] >= MAX_SKIPPED_UPDATES:
            raise FloatingPointError(
                f"{message} This was the {MAX_SKIPPED_UPDATES}th time in a row, so training stops with the weights as "
                "they are. Lower the learning rate, or look for rewards and log-probabilities that explode."
            )
        logger.warning(message)
