# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""The trainer: the methods that TRL and transformers call, in the order of a step. The work is done by its parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import set_seed
from datasets import Dataset, IterableDataset
from peft import PeftConfig, PeftModel
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin, TrainerCallback
from trl import GRPOTrainer

from ..adapters.manifest import TeamManifest
from ..adapters.policies import SyncReferences
from ..agents import AgentSpec, check_team
from ..algorithms.rows import Slice, make_level
from ..config.marft_config import MARFTConfig
from ..config.team_setup import Sampling, TeamSetup
from ..learning.adapter_updates import Schedule
from ..learning.memory import MemoryPlan
from ..prompts.views import View, check_view, team_view
from ..reporting.evaluation import EvalMetric, Vote, check_eval_metrics, last_box
from ..reporting.model_card import CARD_NAME, PAPER, TAGS
from ..reporting.progress import announce, team_callbacks
from ..rollout.failures import Failures
from ..rollout.reward_scorer import wrap_reward_function
from ..runs.checkpoints import raise_failed_push
from ..seams import runs
from ..seams.libraries import get_logger, hush, warn_of_newer_versions
from ..seams.sharding import as_if_not_sharded
from ..seams.trl import configure_grpo_trainer, constructing_grpo_trainer, logging_completions, prepare_further_model
from ..system.hints import checked_names
from ..system.redaction import published
from ..team import Team
from ..workflows import Workflow
from ..workflows.base import alias_names, anonymity
from . import bases, setup
from .parts import Parts, UserCode


logger = get_logger(__name__)
hush()  # here, since a trainer is what makes other libraries speak


class MARFTTrainer(GRPOTrainer):
    """
    Trains a team of LLM agents with reinforcement learning: one adapter per agent on one base.

    Arguments of [`~trl.GRPOTrainer`] have the same meaning here and come first. The arguments of a team follow.

    Args:
        model (`str` or [`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            Base model of all agents without `AgentSpec(model=...)`. In a `PeftModel`, adapters that are named like the
            adapter of an agent are trained further, and missing ones start as copies of the adapter `default`.
        reward_funcs:
            Reward functions and reward models of the team's answer, as in `GRPOTrainer`. Functions are also passed
            `turns` (a list of [`Turn`] per episode), `earned` (the reward that the turns of each episode earned in the
            workflow) and `environments` (the environment of each episode, or `None`). Optional if the workflow earns
            rewards.
        args ([`MARFTConfig`], *optional*):
            Training arguments. A `GRPOConfig` is accepted too.
        train_dataset, eval_dataset, processing_class, reward_processing_classes, callbacks, optimizers,
        quantization_config:
            As in `GRPOTrainer`.
        peft_config ([`~peft.PeftConfig`], *optional*):
            Config of the adapters of agents without a `peft_config`. If no agent has one either, all agents share one
            fully trained policy.
        tools (`list[Callable]`, *optional*):
            Functions that agents without `AgentSpec(tools=...)` may call, as in `GRPOTrainer`. An agent with
            `AgentSpec(tools=[])` has none.
        rollout_func:
            Not supported. Write a [`Workflow`] instead.
        environment_factory (`Callable` or `dict[str, Callable]`, *optional*):
            Class of the environment, as in `GRPOTrainer`. Short for `workflow=EnvironmentLoop(environment_factory)`,
            or for [`ByColumn`] if it is a dictionary of several.
        agents (`list[AgentSpec]`):
            Agents of the team, in order.
        critic_peft_config ([`~peft.PeftConfig`], *optional*):
            Config of the critic's LoRAs. Defaults to the config of the first agent's adapter.
        workflow ([`Workflow`], *optional*, defaults to [`Sequential`]):
            Program that decides which agent acts next and what each agent is shown.
        view (`Callable`, *optional*, defaults to [`team_view`]):
            Function that makes observations: `view(agent, prompt, seen)` returns the messages that an agent is shown.
        eval_metrics (*optional*):
            Metrics of the team's answers in evaluations: metrics of the `evaluate` package, or callables
            `metric(answers, **columns)`.
        eval_vote (`Callable[[str], Hashable]`, *optional*):
            What is compared of the texts of answers for `maj@k` in evaluations (`eval_k`); `None` for a text without
            an answer. Defaults to the content of the last LaTeX box, or else the whole text.
        anonymous (`bool` or `str`, *optional*, defaults to `False`):
            Anonymous ablation. Role prompts are replaced by "You are agent 1 of 3 ..." (`True` or `"numbered"`) or
            left out (`"none"`). Teammates are shown as `agent_1`, `agent_2`, ...

    Raises:
        ValueError, TypeError: an argument, or a combination of arguments, that cannot work. Raised before anything is
            generated.

    Attributes:
        agents (`list[AgentSpec]`): the team.
        policies ([`Policies`]): the adapters on the base.
        critic ([`Critic`] or `None`): predicts values.
        schedule ([`Schedule`]): which adapters learn in a step.
        parts ([`Parts`]): the objects that the trainer is composed of.
    """

    _tag_names = TAGS
    _name = "MARFT"
    _paper = PAPER
    _order: runs.EpochSampler | None = None  # of the rows of a map-style dataset

    @checked_names("MARFTTrainer", "agents=[AgentSpec('planner'), AgentSpec('solver')]")
    def __init__(
        self,
        model: str | PreTrainedModel | PeftModel,
        reward_funcs=None,
        args: MARFTConfig | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Dataset | IterableDataset | dict[str, Dataset | IterableDataset] | None = None,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
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
        eval_vote: Vote | None = None,
        anonymous: bool | str = False,
    ):
        args = setup.as_marft_config(args, model)
        # Check as much as possible before anything is loaded, so that errors are raised at once, not after minutes
        warn_of_newer_versions()
        sharding = setup.check_launcher(args)
        self.agents = setup.with_tools(check_team(agents), tools)
        self._workflow = setup.choose_workflow(self.agents, workflow, environment_factory, rollout_func)
        self.anonymous = anonymity(anonymous)
        self.agents = setup.prompted(self.agents, self.workflow, self.anonymous)
        train_dataset, eval_dataset = setup.prepare_datasets(args, self.workflow, train_dataset, eval_dataset)
        reward_funcs, weights, turn_rewards = setup.prepare_rewards(
            args, self.agents, self.workflow, reward_funcs, train_dataset, eval_dataset
        )
        if eval_metrics is not None:
            eval_metrics = check_eval_metrics(eval_metrics, eval_dataset, args.eval_reference_column)
        groups = bases.split_by_base(self.agents, model, processing_class)
        bases.check_settings(args, groups, sharding)
        set_seed(args.seed)  # adapters start at random
        arguments = (model, args, peft_config, sharding, quantization_config, processing_class)
        loaded = bases.load_all(groups, {"train_dataset": train_dataset, **setup.named_sets(eval_dataset)}, *arguments)
        self.policies = bases.make_policies(loaded, self.agents)
        # The critic makes adapters of its own, so it comes after the policies and before the optimizer
        level = make_level(args)
        self.critic = setup.make_critic(
            args, self.policies, self.agents, critic_peft_config, level, lambda: self.accelerator.autocast()
        )
        critics = self.critic.parts if self.critic is not None else []
        self.schedule = Schedule.from_args(args, self.policies.trained_in_order, critics)
        failures = Failures(args.on_episode_error) if args.on_episode_error != "raise" else None
        # A server needs the names and ranks of all adapters, and TRL's constructor needs none
        engines = setup.make_engines(args, {base.model: base.agents for base in loaded})
        with constructing_grpo_trainer(args, loaded[0].model, isinstance(model, str), level.ratio, weights):
            super().__init__(
                model=loaded[0].model,
                reward_funcs=[wrap_reward_function(func, args.reward_timeout, failures) for func in reward_funcs],
                args=args,
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                processing_class=loaded[0].processing_class,
                reward_processing_classes=reward_processing_classes,
                callbacks=callbacks,
                optimizers=optimizers,
            )
        self.args: MARFTConfig = args  # TRL has typed it as its own
        self.reward_func_names: list[str] = setup.named_apart(self.reward_func_names)  # type: ignore[has-type]
        setup.check_votes(args, eval_vote, self.reward_func_names)
        configure_grpo_trainer(self, args.beta, level.ratio)
        for base in loaded[1:]:
            prepare_further_model(self, base.model, base.tokenizer)
        if sharding is not None:
            sharding.keep_adapters_whole(self, self.policies)
        # What adapters are now is what the KL is measured from
        self.policies.copy_references(copy_all=args.sync_ref_model, has_kl=args.beta != 0.0)
        if args.sync_ref_model and (self.policies.has_adapters or self.policies.further):
            self.add_callback(SyncReferences(self.policies))
        team_callbacks(self, [agent.name for agent in self.agents])
        samplings = {agent.name: Sampling.from_agent(agent, args) for agent in self.agents}
        parts = (self.agents, self.workflow, self.policies, self.critic, level)
        team = TeamSetup(*parts, samplings, alias_names(self.agents) if self.anonymous else {}, self.anonymous)
        code = UserCode(view, turn_rewards, eval_metrics or [], eval_vote or last_box, failures)
        self.parts = Parts(self, team, self.schedule, code, engines, loaded)
        if sharding is not None:
            sharding.keep_in_step(self, self.parts.processes)
        # In this order: what a step has shown, what is undone, and then what is saved
        for callback in filter(None, (self.parts.health, self.parts.collapse, self.parts.run)):
            self.add_callback(callback)

    @property
    def workflow(self) -> Workflow:
        """The workflow. It cannot be changed: rewards, tools and checks depend on it."""
        return self._workflow

    @property
    def view(self) -> View:
        """Observations of agents as messages; may be set between calls."""
        return self.parts.runner.prompts.view

    @view.setter
    def view(self, view: View) -> None:
        check_view(view, "the team")
        self.parts.runner.prompts.view = view

    @property
    def team(self) -> Team:
        """The team with its present weights, to be run: `trainer.team("question")`."""
        model = self.accelerator.unwrap_model(self.model)
        wait = self.parts.processes.wait  # processes may have asked for different numbers of passes
        models = {name: self.policies.get_model(name) for name in self.policies.base_owners}
        return Team(self.agents, self.workflow, self.parts.runner, model, self.parts.seeds, wait, further=models)

    def plan(self) -> str:
        """
        Describe the run without generating or training: the agents, the links between them, the batches in episodes,
        turns and tokens, the memory, and the observation of each agent on the first row of the dataset, with made-up
        turns of its teammates.
        """
        return self.parts.planner.plan()

    def memory_plan(self) -> MemoryPlan:
        """
        Estimate the memory that this process needs, part by part, for turns of maximum length. Sizes are counted,
        except those of activations, which are measured per token on a few short rows.
        """
        return self.parts.planner.memory_plan()

    def manifest(self) -> TeamManifest:
        """The manifest that is saved with the adapters, so that the team can be run again as it was trained."""
        return self.parts.files.manifest()

    # ---- A step of training, in its order (checked against TRL 1.16 and transformers 5.23) ----

    def _prepare_inputs(self, generation_batch: list[dict[str, Any]]) -> Slice:
        # One generation batch serves several micro-steps; each gets its slice
        state = self.parts.state
        if self.schedule.is_due(state.micro_step) or state.slices is None:
            state.slices = self._generate_and_score_completions(generation_batch)
        state.slices = self.parts.sequential.after_update(state.slices, self.schedule.just_updated(state.micro_step))
        return state.slices[state.micro_step % len(state.slices)]

    def get_batch_samples(self, epoch_iterator, *args, **kwargs):
        ahead = self.parts.look_ahead
        return super().get_batch_samples(ahead.over(epoch_iterator) if ahead else epoch_iterator, *args, **kwargs)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> list[Slice]:
        self.schedule.check(self.args)
        return self.parts.batch_maker.for_training(inputs)

    def training_step(self, model: nn.Module, inputs, num_items_in_batch=None) -> torch.Tensor:
        # Gradients are reduced by adapter afterwards, because processes have rows of different agents
        with self.parts.updates.micro_step(model):
            loss = super().training_step(model, inputs, num_items_in_batch)
        self.parts.loss.end_step(self.accelerator.sync_gradients)
        self.parts.updates.finish(self.accelerator.sync_gradients)
        return loss

    def compute_loss(self, model, inputs: Slice, return_outputs=False, num_items_in_batch=None) -> torch.Tensor:
        # The Trainer asks for outputs in `prediction_step`, which is overridden
        if return_outputs:
            raise ValueError("MARFTTrainer does not support returning outputs.")
        self.schedule.check(self.args)
        learning = self.schedule.learning(self.parts.state.micro_step, self.state.global_step)
        return self.parts.loss.slice_loss(model, inputs, learning, self.accelerator.backward)

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, *args, **kwargs):
        return self.parts.log_probs.for_trl(model, input_ids, attention_mask, logits_to_keep, *args, **kwargs)

    def _clip_grad_norm(self, model) -> torch.Tensor:
        return self.parts.updates.clip(self.args.max_grad_norm)

    def _get_grad_norm(self, model, grad_norm=None):
        return self.parts.updates.clip(torch.inf) if grad_norm is None else grad_norm

    def create_optimizer(self, model=None) -> torch.optim.Optimizer:
        is_ours = self.optimizer is None
        # The optimizer takes the trainable parameters: after the user's `model.set_adapter`, only those of one adapter
        self.policies.restore_requires_grad()
        optimizer = super().create_optimizer(self.policies.with_further(model or self.model))
        self.parts.updates.split_groups(optimizer, is_ours)
        return optimizer

    def _get_train_sampler(self, dataset: Dataset | None = None):
        self._order = runs.EpochSampler.from_sampler(super()._get_train_sampler(dataset), self.schedule.phases)
        return self._order

    def evaluate(
        self,
        eval_dataset: Dataset | IterableDataset | dict[str, Dataset | IterableDataset] | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
        *,
        num_samples: int | None = None,
        sampling: Mapping[str, float] | None = None,
        k: Sequence[int] | None = None,
    ) -> dict[str, float]:
        """
        Run the team on an evaluation set, or on several.

        Args:
            eval_dataset, ignore_keys, metric_key_prefix:
                As in [`~transformers.Trainer.evaluate`].
            num_samples (`int`, *optional*):
                Episodes of each question, instead of `num_generations_eval`.
            sampling (`dict`, *optional*):
                Sampling settings of all agents, instead of `eval_sampling`.
            k (`Sequence[int]`, *optional*):
                Values of k for pass@k and maj@k, instead of `eval_k`.

        Returns: the metrics, as they are logged.

        Raises:
            ValueError: a setting is not valid, or `num_samples` does not divide the episodes of an evaluation batch.
        """
        eval_dataset = setup.with_prompts(self.workflow, eval_dataset)
        setup.check_eval_set(eval_dataset, self.eval_dataset)
        with self.parts.evaluations.override(num_samples, sampling, k, is_other_set=eval_dataset is not None):
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        rollout, slice_, std = self.parts.batch_maker.for_evaluation(inputs, self.parts.evaluations.mode)
        with self.compute_loss_context_manager():
            loss = self.parts.evaluations.loss(self.parts.loss, self.model, slice_, self.schedule.everyone)
        self.parts.reporter.evaluated(rollout, inputs, std)
        return loss, None, None

    def evaluation_loop(self, dataloader, *args, metric_key_prefix: str = "eval", **kwargs):
        self.parts.reporter.begin_evaluation()
        output = super().evaluation_loop(dataloader, *args, metric_key_prefix=metric_key_prefix, **kwargs)
        metrics = self.parts.reporter.end_evaluation(dataloader.dataset, metric_key_prefix)
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in metrics.items()})
        return output

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        has_new = self.parts.reporter.before_log()
        with logging_completions(self, has_new):
            super().log(logs, start_time)
        self.parts.reporter.after_log()
        self.parts.checkpoints.record_after_log()  # an evaluation, which comes next, may fail

    def train(self, resume_from_checkpoint: str | bool | None = None, *args, **kwargs):
        with self.parts.run.training(resume_from_checkpoint) as checkpoint:
            if self.is_world_process_zero():
                announce([agent.name for agent in self.agents], self.accelerator)
            return super().train(checkpoint, *args, **kwargs)

    def _get_dataloader(self, dataset, *args, is_training: bool = False, **kwargs):
        if is_training and isinstance(dataset, IterableDataset):
            dataset = runs.EndlessStream(dataset)
        return super()._get_dataloader(dataset, *args, is_training=is_training, **kwargs)

    def _maybe_log_save_evaluate(self, *args, **kwargs) -> None:
        super()._maybe_log_save_evaluate(*args, **kwargs)
        self.parts.run.after_step()

    def _finalize_training(self, *args, **kwargs):
        with runs.keeping_checkpoints(self):
            return super()._finalize_training(*args, **kwargs)

    def _run_epoch(self, *args, epoch: int, **kwargs) -> None:
        # The parent looks whether training is over after a step, so a finished run would train one more
        if self.parts.run.is_over(self.state):
            self.control.should_training_stop = True
        else:
            runs.begin_pass(self._order, epoch)
            super()._run_epoch(*args, epoch=epoch, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        with as_if_not_sharded(self):
            super().save_model(output_dir, _internal_call)

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        names = self.policies.get_adapters(self.accelerator.unwrap_model(self.model))
        with published(), runs.saving_adapters_alone(self, names):
            super()._save(output_dir, state_dict)
        if self.args.should_save:
            self.parts.files.save(Path(output_dir or self.args.output_dir), self.state.log_history)

    def _save_checkpoint(self, model, trial) -> None:
        folder = runs.checkpoint_folder(self, trial)
        with self.parts.checkpoints.saving(folder), runs.saving_only(self), as_if_not_sharded(self):
            super()._save_checkpoint(model, trial)
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(folder))

    def _save_rng_state(self, output_dir: str) -> None:
        # Called on every process, before the checkpoint is pushed and older ones are removed
        super()._save_rng_state(output_dir)
        self.parts.checkpoints.save(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model=None) -> None:
        if not self.policies.has_adapters:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        if self.policies.has_adapters or self.policies.further:
            self.parts.checkpoints.load_weights(resume_from_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            with self.parts.updates.loading(self.optimizer, self.lr_scheduler), as_if_not_sharded(self):
                super()._load_optimizer_and_scheduler(checkpoint)
            self.parts.checkpoints.load(checkpoint)

    def _load_best_model(self) -> None:
        if not self.policies.has_adapters:
            super()._load_best_model()
        if self.policies.has_adapters or self.policies.further:
            self.parts.checkpoints.load_weights(self.state.best_model_checkpoint)

    def create_model_card(self, model_name: str | None = None, dataset_name: str | None = None, tags=None) -> None:
        if self.is_world_process_zero():
            folder = Path(self.args.output_dir)
            card = self.parts.files.card(self.state.log_history, model_name or folder.name, dataset_name, tags)
            card.save(folder / CARD_NAME)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self.is_world_process_zero():
            self.parts.files.copy_checkpoint(Path(checkpoint_folder), Path(self.args.output_dir))
        super()._push_from_checkpoint(checkpoint_folder)

    def _finish_current_push(self) -> None:
        super()._finish_current_push()
        jobs = getattr(getattr(self, "push_in_progress", None), "jobs", [])
        raise_failed_push(jobs, self.hub_model_id, self.args.output_dir)
