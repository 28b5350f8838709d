# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""The wiring of the objects that a trainer is composed of."""

from __future__ import annotations

import functools
from typing import cast

from transformers import PreTrainedModel
from trl import GRPOTrainer

from ..advantages.credit import CreditAssigner
from ..advantages.estimators import BaselineEstimator, CriticEstimator, Estimator
from ..agents import AgentSpec
from ..config.checks import uses_candidates
from ..config.unused import warn_of_unused
from ..learning.adapter_updates import AdapterUpdates
from ..learning.batching import Collator
from ..learning.critic_learner import CriticLearner
from ..learning.log_probs import LogProbs, Passes
from ..learning.losses import TeamLoss
from ..learning.micro_batcher import MicroBatcher
from ..learning.mixing import MixedPasses
from ..learning.sequential import SequentialFactors
from ..learning.value_scale import ValueScale
from ..reporting.games import GameMetrics
from ..reporting.health import Health
from ..reporting.model_card import TAGS
from ..reporting.plan import Planner
from ..reporting.reporter import Reporter
from ..rollout import preparing
from ..rollout.alternatives import Alternatives
from ..rollout.dynamic_sampling import DynamicSampling
from ..rollout.failures import OnFailure
from ..rollout.generator import Generator, Sampling, StreamGenerator
from ..rollout.own_returns import OwnReturns
from ..rollout.prompts import PromptBuilder, is_plain
from ..rollout.reach import RewardReach
from ..rollout.reward_scorer import RewardScorer
from ..rollout.rollouts import Rollouts
from ..rollout.runner import EpisodeRunner
from ..rollout.transformers_generator import TransformersGenerator
from ..rules.running import RunningBaselines
from ..runs.best import BestAdapters
from ..runs.checkpointing import Checkpoints, Stateful
from ..runs.collapse import Collapse
from ..runs.run import Run
from ..runs.run_settings import RunSettings
from ..seams.mixing import MixedLora
from ..seams.models import ScoringTemperature, check_fused_head
from ..seams.runs import save_checkpoint_now
from ..seams.trl import TrlEngine, TrlLoss, TrlPrompts, TrlRewards, TrlSettings, TrlState, trl_log_probs
from ..servers.look_ahead import LookAhead
from ..servers.overlap import Overlap
from ..servers.sampling_correction import SamplingCorrection
from ..servers.setup import make_vllm_generator, tolerance_of
from ..servers.vllm_generator import VLLMGenerator
from ..system.processes import Processes
from ..system.randomness import UserRandomness
from ..system.run_metrics import Metrics
from ..system.user_state import UserState
from ..weights.copies import PastCopies, TakeCopies
from ..weights.fingerprints import describe_base
from ..weights.manifest import BaseModel
from ..weights.policies import Policies
from . import setup
from .choices import Choices
from .evaluations import Evaluations
from .experience import Experience
from .team_files import TeamFiles


class Builder:
    """The parts that other parts share, and the groups of parts that are built from them."""

    def __init__(self, trainer: GRPOTrainer, choices: Choices):
        args = choices.args
        self._trainer, self._choices, self._args = trainer, choices, args
        self.state, self.processes = TrlState(trainer), Processes(trainer.accelerator)
        self.metrics = Metrics(self.state.metrics, lambda: self.state.is_training)
        self._functions = TrlRewards(trainer)
        self._trl_prompts = TrlPrompts(trainer)
        self._tokenizer = self._trl_prompts.tokenizer
        self._uses_tools = bool(choices.workflow.functions) or any(agent.tools for agent in choices.agents)
        if self._uses_tools:
            trainer.chat_template = preparing.prepare_tools(self._tokenizer, choices.agents, choices.workflow)
        self._names = [agent.name for agent in choices.agents]
        self._samplings = {agent.name: Sampling.of(agent, args) for agent in choices.agents}
        self._base = _base_of(trainer, choices.policies)
        self._temperature = ScoringTemperature(
            [self._base] if trainer.ref_model is None else [self._base, trainer.ref_model],
            [sampling.temperature for sampling in self._samplings.values()],
            default=trainer.temperature,
            head={"cast_lm_head_to_fp32": args.cast_lm_head_to_fp32, "outputs": ("log_probs", "entropy")},
        )
        check_fused_head(self._base, trainer.temperature)
        self.passes = Passes(self._base, args, trainer.accelerator, trainer.aux_loss_enabled)
        warn_of_unused(args, self.passes.share)
        # As in TRL: rows of the policy that is about to be updated need no old log-probabilities
        self._needs_old = args.gradient_accumulation_steps % choices.schedule.generate_every != 0
        self._needs_old &= args.use_policy_ratio or args.update_order == "sequential"
        self._needs_old |= args.use_vllm  # what servers have sampled is compared with them
        longest_turn = choices.engine.longest_turn if choices.engine is not None else None
        self._window = preparing.context_window(trainer.model, longest_turn)
        self._settings = TrlSettings(trainer)
        self.own_returns = OwnReturns(args.returns, self._functions, self.processes)
        self.running = RunningBaselines(args.rae_decay)
        parts = choices.critic.parts if choices.critic is not None else []
        self.value_scale = ValueScale(args.normalize_values, parts, self.processes)
        self.randomness = UserRandomness(args.seed + args.process_index, trainer.accelerator.device)
        given = [getattr(function, "__wrapped__", function) for function in self._functions.functions]
        self.users = UserState(setup.user_objects(given, choices.turn_rewards, choices.workflow, choices.agents))
        self.past = PastCopies(choices.policies, choices.agents)
        self.best = BestAdapters(choices.policies, lambda: trainer.optimizer)
        self.runner = self._runner()
        ahead = args.max_staleness
        self.look_ahead = LookAhead(self.state, choices.schedule, ahead) if ahead else None

    def _runner(self) -> EpisodeRunner:
        trainer, choices, args = self._trainer, self._choices, self._args
        self.past.take(0)
        if self.past.agents:
            trainer.add_callback(TakeCopies(self.past))
        records = self._needs_old and self.passes.sample_what_they_score()
        prompts = PromptBuilder(
            self._tokenizer,
            tokenize=self._trl_prompts.tokenize,
            view=choices.view,
            chat_template_kwargs=trainer.chat_template_kwargs,
            plain=is_plain(choices.agents, self._uses_tools),
            window=self._window,
            reserved={name: sampling.max_completion_length for name, sampling in self._samplings.items()},
            overflow=args.context_overflow,
            chat_template=trainer.chat_template,
            ends=trainer.eos_token_ids,
            aliases=choices.aliases,
            alone=preparing.is_alone(choices.agents, choices.workflow),
            unread=[one.name for one in choices.agents if choices.critic is None and not one.has_policy],
            show_reasoning=args.show_reasoning,
        )
        preparing.warn_of_unprotected(prompts, self._uses_tools)
        return EpisodeRunner(
            choices.agents,
            choices.workflow,
            prompts,
            self._generator(records),
            self._tokenizer,
            ends=trainer.eos_token_ids,
            randomness=self.randomness,
            limits=setup.tool_limits(args),
            uses_tools=self._uses_tools,
            aliases=choices.aliases,
            patience=args.workflow_timeout,
            max_turns=args.max_episode_turns,
            users=self.users,
            vocabulary=self._base.get_input_embeddings().weight.size(0),
            seed=args.seed,
            copies=self.past if self.past.agents else None,
        )

    def _generator(self, records: bool) -> Generator | StreamGenerator:
        """What samples turns. A further generator gets its line here. `records`: keep log-probabilities."""
        trainer, choices, args = self._trainer, self._choices, self._args
        engine = TrlEngine(trainer, Sampling.of(AgentSpec("solo"), args).as_generation_kwargs())
        if choices.engine is None:
            return TransformersGenerator(
                engine, choices.policies, self._samplings, self.passes.share, records, self.past, self._mixed_lora()
            )
        return make_vllm_generator(
            choices.engine.servers,
            args,
            choices.agents,
            choices.policies,
            trainer.accelerator.unwrap_model(trainer.model),
            self._samplings,
            engine.settings,
            self._tokenizer,
            ends=trainer.eos_token_ids,
            vocabulary=self._base.get_input_embeddings().weight.size(0),
            is_exact=self.passes.sample_what_they_score(),
            next_token=lambda *asked, **how: self._log_probs.next_token(*asked, **how),
            processes=self.processes,
            past=self.past,
        )

    def _mixed_lora(self) -> MixedLora | None:
        """What lets agents be decoded together, where that is possible."""
        model, policies = self._trainer.accelerator.unwrap_model(self._trainer.model), self._choices.policies
        if self._args.mixed_passes is False or self.processes.have_shards or not self.passes.share:
            return None
        return MixedLora(model) if MixedLora.why_not(model, policies.names) is None else None

    def rewards(self) -> tuple[RewardScorer, RewardReach, Alternatives, Rollouts]:
        choices, args = self._choices, self._args
        scorer = RewardScorer(
            self._functions,
            choices.turn_rewards,
            self.randomness,
            OnFailure.of(args),
            choices.failures,
            self.processes,
        )
        reach = RewardReach(self._trained_agents())
        alternatives = Alternatives(self.runner, scorer, self.own_returns, choices.policies, args, self.processes)
        rollouts = Rollouts(
            runner=self.runner,
            alternatives=alternatives,
            scorer=scorer,
            rewards=self._functions,
            workflow=choices.workflow,
            own=self.own_returns,
            reach=reach,
            args=args,
            uses_candidates=uses_candidates(args),
            uses_tools=self._uses_tools,
            metrics=self.metrics,
            processes=self.processes,
            failures=choices.failures,
            ahead=self._overlap(),
        )
        return scorer, reach, alternatives, rollouts

    def dynamic_sampling(self, rollouts: Rollouts) -> DynamicSampling:
        return DynamicSampling(
            rollouts=rollouts,
            dataset=lambda: self._trainer.train_dataset,
            own=self.own_returns,
            args=self._args,
            uses_candidates=uses_candidates(self._args),
            settings=self._settings,
            state=self.state,
            metrics=self.metrics,
            processes=self.processes,
        )

    def evaluations(self, reporter: Reporter) -> Evaluations:
        return Evaluations(self._args, self._settings, self.runner, reporter)

    def collapse(self, rollouts: Rollouts, reporter: Reporter) -> Collapse:
        def act(rows):
            before = self.metrics.mark()
            with self.state.user_logs_aside():
                rollout = rollouts.run(rows, training=False, further=True)
                reporter.forget(rollout)
            self.metrics.drop(before, self.metrics.mark())
            return rollout.rewards

        def forget(adapters, step):
            self._checkpoints.forget()
            self.past.forget_after(step, adapters)

        return Collapse(
            best=self.best,
            policies=self._choices.policies,
            act=act,
            forget=forget,
            error_of_evaluation=lambda: reporter.evaluation_error,
            group_size=lambda: self._settings.group_size(training=True),
            step=lambda: self.state.optimizer_step,
            args=self._args,
            metrics=self.metrics,
            processes=self.processes,
        )

    def _trained_agents(self) -> list[str]:
        return [name for name in self._names if self._choices.policies.is_trained(name)]

    def _overlap(self) -> Overlap | None:
        ahead = self.look_ahead
        if ahead is None:
            return None
        policy, failures, count = OnFailure.of(self._args), self._choices.failures, self._args.max_staleness
        return Overlap(self.runner, ahead.upcoming, ahead.number, count, policy, failures, self.processes)

    def _describe_base(self) -> BaseModel:
        return describe_base(
            self._base,
            self._tokenizer,
            self._trainer.chat_template or self._tokenizer.chat_template,
            revision=(self._args.model_init_kwargs or {}).get("revision"),
        )

    def checkpoints(self, owners: dict[str, Stateful]) -> Checkpoints:
        trainer, choices = self._trainer, self._choices
        settings = RunSettings(
            args=choices.args,
            agents=choices.agents,
            policies=choices.policies,
            workflow=choices.workflow,
            critic=choices.critic,
            model=trainer.model,
            base=self._describe_base,
            rewards={"": self._functions.functions, **choices.turn_rewards},
            weights=self._functions.weights.tolist(),
            view=lambda: self.runner.prompts.view,
            dataset=trainer.train_dataset,
            num_processes=self.processes.count,
        )
        self._checkpoints = Checkpoints(
            state=self.state,
            owners=owners,
            schedule=choices.schedule,
            model=trainer.model,
            ref_model=trainer.ref_model,
            policies=choices.policies,
            critic=choices.critic,
            agents=choices.agents,
            anonymous=choices.anonymous,
            settings=settings,
            args=choices.args,
            processes=self.processes,
            copies=self.past,
            best=self.best,
        )
        return self._checkpoints

    def run(self, checkpoints: Checkpoints, rollouts: Rollouts) -> Run:
        trained = [p for p in self._trainer.model.parameters() if p.requires_grad]
        size = 3 * sum(parameter.numel() * parameter.element_size() for parameter in trained)  # with Adam's moments
        save = functools.partial(save_checkpoint_now, self._trainer)
        return Run(
            checkpoints, self._args, self.processes, save, checkpoint_size=lambda: size, clean_up=rollouts.close
        )

    def learning(
        self,
    ) -> tuple[MicroBatcher, LogProbs, CriticLearner | None, TeamLoss, AdapterUpdates, SequentialFactors]:
        trainer, choices, args = self._trainer, self._choices, self._args
        accelerator = trainer.accelerator
        updates = AdapterUpdates(
            policies=choices.policies,
            critic=choices.critic,
            agents=choices.agents,
            args=args,
            metrics=self.metrics,
            processes=self.processes,
            state=self.state,
            accelerator=accelerator,
        )
        batcher = MicroBatcher(
            model=trainer.model,
            base=self._base,
            policies=choices.policies,
            args=args,
            accelerator=accelerator,
            share=self.passes.share,
            trained=lambda: [p for its in updates.trained_parameters().values() for p in its.values()],
            has_optimizer_state=lambda: trainer.optimizer is not None and bool(trainer.optimizer.state),
        )
        collate = Collator(self._tokenizer.pad_token_id, trainer.pad_to_multiple_of, accelerator.device)
        log_probs = LogProbs(
            model=trainer.model,
            reference=trainer.ref_model,
            policies=choices.policies,
            samplings=self._samplings,
            temperature=self._temperature,
            plain=trl_log_probs(trainer),
            passes=self.passes,
            batcher=batcher,
            collate=collate,
            accelerator=accelerator,
            checkpointing_kwargs=args.gradient_checkpointing_kwargs,
        )
        self._log_probs = log_probs
        learner = self._critic_learner(batcher)
        loss = TeamLoss(
            trl_loss=TrlLoss(trainer),
            log_probs=log_probs,
            batcher=batcher,
            collate=collate,
            critic=learner,
            updates=updates,
            mixing=self._mixing(batcher),
            policies=choices.policies,
            level=choices.level,
            samplings=self._samplings,
            args=args,
            settings=self._settings,
            state=self.state,
            metrics=self.metrics,
            processes=self.processes,
        )
        sequential = SequentialFactors(log_probs, choices.level, args.sequential_clip, self.metrics, self.processes)
        return batcher, log_probs, learner, loss, updates, sequential

    def _mixing(self, batcher: MicroBatcher) -> MixedPasses | None:
        model, places = self._trainer.accelerator.unwrap_model(self._trainer.model), self.passes.give_positions
        shards = self.processes.have_shards
        return MixedPasses.of(model, self._choices.policies, self._args, batcher, places, shards)

    def _critic_learner(self, batcher: MicroBatcher) -> CriticLearner | None:
        choices = self._choices
        if choices.critic is None:
            return None
        choices.critic.heads.to(self._trainer.accelerator.device)
        return CriticLearner(
            critic=choices.critic,
            batcher=batcher,
            runner=self.runner,
            policies=choices.policies,
            agents=choices.agents,
            schedule=choices.schedule,
            args=self._args,
            processes=self.processes,
            share=self.passes.share,
            scale=self.value_scale,
        )

    def experience(
        self,
        rollouts: DynamicSampling,
        collapse: Collapse,
        alternatives: Alternatives,
        scorer: RewardScorer,
        log_probs: LogProbs,
        batcher: MicroBatcher,
        learner: CriticLearner | None,
        reporter: Reporter,
        reach: RewardReach,
    ) -> Experience:
        choices, args = self._choices, self._args
        credit = CreditAssigner(
            alternatives=alternatives,
            scorer=scorer,
            rewards=self._functions,
            own=self.own_returns,
            earns=choices.workflow.earns,
            args=args,
            metrics=self.metrics,
            processes=self.processes,
        )
        return Experience(
            rollouts=rollouts,
            collapse=collapse,
            alternatives=alternatives,
            credit=credit,
            estimator=self._estimator(credit),
            log_probs=log_probs,
            batcher=batcher,
            critic=choices.critic,
            learner=learner,
            policies=choices.policies,
            reporter=reporter,
            reach=reach,
            schedule=choices.schedule,
            args=args,
            settings=self._settings,
            needs_old=self._needs_old,
            share=self.passes.share,
            processes=self.processes,
            correction=self._correction(),
            metrics=self.metrics,
        )

    def _correction(self) -> SamplingCorrection | None:
        if not self._args.use_vllm:
            return None
        tolerance = tolerance_of(self._args, self.passes.sample_what_they_score())
        staleness = cast(VLLMGenerator, self.runner.generator).staleness
        return SamplingCorrection(self._args, tolerance, self.metrics, self.processes, staleness)

    def _estimator(self, credit: CreditAssigner) -> Estimator:
        choices = self._choices
        if choices.critic is not None:
            return CriticEstimator(credit, choices.level, choices.agents, self._args, self.metrics, self.processes)
        return BaselineEstimator(
            credit=credit,
            rewards=self._functions,
            agents=choices.agents,
            policies=choices.policies,
            args=self._args,
            settings=self._settings,
            processes=self.processes,
            running=self.running,
        )

    def reporting(self, batcher: MicroBatcher, learner: CriticLearner | None) -> tuple[Reporter, Planner]:
        trainer, choices, args = self._trainer, self._choices, self._args
        reporter = Reporter(
            agents=self._names,
            rewards=self._functions,
            eval_metrics=choices.eval_metrics,
            tokenizer=self._tokenizer,
            randomness=self.randomness,
            args=args,
            settings=self._settings,
            metrics=self.metrics,
            state=self.state,
            processes=self.processes,
            games=GameMetrics(self._names, self._trained_agents(), self.own_returns, self.past),
            vote=choices.eval_vote,
        )
        planner = Planner(
            agents=choices.agents,
            workflow=choices.workflow,
            runner=self.runner,
            policies=choices.policies,
            critic=choices.critic,
            learner=learner,
            level=choices.level,
            batcher=batcher,
            model=trainer.accelerator.unwrap_model(trainer.model),
            tokenizer=self._tokenizer,
            samplings=self._samplings,
            aliases=choices.aliases,
            args=args,
            window=self._window,
            share=self.passes.share,
            processes=self.processes,
            train_dataset=lambda: trainer.train_dataset,
            copies=self.past,
        )
        return reporter, planner

    def health(self, updates: AdapterUpdates) -> Health:
        return Health(
            agents=self._names,
            policies=self._choices.policies,
            parameters=updates.trained_parameters,
            vocabulary=self._base.config.get_text_config().vocab_size,
            args=self._args,
            metrics=self.metrics,
        )

    def files(self, planner: Planner) -> TeamFiles:
        trainer, choices = self._trainer, self._choices
        has_adapters = choices.policies.has_adapters
        configs = [trainer.model.peft_config[name] for name in choices.policies.names] if has_adapters else []
        return TeamFiles(
            agents=choices.agents,
            workflow=choices.workflow,
            policies=choices.policies,
            critic=choices.critic,
            generator=lambda: self.runner.generator,
            view=lambda: self.runner.prompts.view,
            base=self._describe_base(),
            planner=planner,
            max_rank=max((getattr(config, "r", 0) for config in configs), default=0),
            tags=TAGS,
            repo=lambda: trainer.hub_model_id,
            args=self._args,
            anonymous=choices.anonymous,
            chat_template_kwargs=trainer.chat_template_kwargs,
            share=self.passes.share,
            # Adapters generate outside of the wrapper that casts
            mixed_precision="no" if has_adapters else trainer.accelerator.mixed_precision,
        )


def _base_of(trainer: GRPOTrainer, policies: Policies) -> PreTrainedModel:
    """The language model under the wrappers of accelerate and PEFT."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    return model.get_base_model() if policies.has_adapters else model
