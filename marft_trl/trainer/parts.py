# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""The objects that a trainer is composed of, and how they are put together, in the order of a step."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from peft import PeftModel
from transformers import PreTrainedModel
from trl import GRPOTrainer

from ..adapters.manifest import describe_base
from ..agents import AgentSpec
from ..algorithms.baselines import BASELINES, CREDITS
from ..algorithms.rows import Row
from ..config.checks import uses_candidates
from ..config.options import warn_of_unused
from ..config.team_setup import RunContext, Sampling, TeamSetup
from ..learning.adapter_updates import AdapterUpdates, Schedule, SequentialFactors
from ..learning.advantages import BaselineEstimator, CreditAssigner, CriticEstimator, Estimator
from ..learning.batching import MicroBatcher, TeamBatcher, collate
from ..learning.critic_learner import CriticLearner, ValueScale
from ..learning.log_probs import LogProbs, ModelPass
from ..learning.losses import OutOfMemory, TeamLoss
from ..prompts.views import View
from ..reporting.evaluation import EvalMetric, Vote
from ..reporting.health import Health
from ..reporting.plan import Planner
from ..reporting.reporter import GameMetrics, Reporter
from ..rollout.alternatives import Alternatives
from ..rollout.dynamic_sampling import DynamicSampling
from ..rollout.failures import Failures
from ..rollout.generator import Generator
from ..rollout.reward_scorer import AgentReturns, RewardReachChecker, RewardScorer
from ..rollout.rollouts import Rollouts
from ..rollout.runner import EpisodeLimits, EpisodeRunner, RunMode
from ..rollout.several_bases import join_speakers
from ..rollout.speaker import PromptSettings, Speaker, find_end_tokens, find_template, make_speaker
from ..rollout.transformers_generator import ModelEngine, TransformersGenerator
from ..runs.checkpoints import BestAdapters, Checkpoints
from ..runs.collapse import Collapse
from ..runs.resume import RunSettings
from ..runs.run import Run
from ..seams.generation import HALF, TrlEngine
from ..seams.models import ScoringTemperature, check_fused_head
from ..seams.runs import save_checkpoint_now
from ..seams.trl import TrlLoss, TrlPrompts, TrlRewards, TrlSettings, TrlState, trl_log_probs
from ..system.processes import Processes, other_devices
from ..system.randomness import RandomStates, UserRandomness, UserState
from ..system.run_metrics import Metrics
from . import setup
from .bases import Base
from .batch_maker import BatchMaker, ModelOutputs
from .evaluation_options import EvaluationOptions
from .team_files import TeamFiles


if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful

    from ..extras.engines.setup import Engine


@dataclass(frozen=True, eq=False)
class UserCode:
    """Functions of users, after all checks."""

    view: View  # observations of agents as messages
    turn_rewards: Mapping[str, Sequence[Callable]]  # by agent, for its own turns
    eval_metrics: Sequence[EvalMetric]
    vote: Vote  # what is compared of answers when the samples of an evaluation vote
    failures: Failures | None  # what they have failed in, unless that ends the run


class Parts:
    """The objects of a trainer, in the order of their dependencies. What a feature needs is `None` if it is off."""

    def __init__(
        self,
        trainer: GRPOTrainer,
        team: TeamSetup,
        schedule: Schedule,
        code: UserCode,
        engines: Mapping[PreTrainedModel | PeftModel, Engine],  # by base; empty if this process generates
        bases: Sequence[Base],  # that of TRL first
    ):
        self._trainer, self._team, self._schedule, self._code, self._engines = trainer, team, schedule, code, engines
        self._bases = bases
        self._args, self._model = trainer.args, trainer.accelerator.unwrap_model(trainer.model)
        self.state, self.processes = TrlState(trainer), Processes(trainer.accelerator)
        metrics = Metrics(self.state.metrics, trainer)
        self._context = RunContext(self._args, TrlSettings(trainer), self.state, metrics, self.processes)
        self._make_scoring()
        self._make_episodes()
        self._make_rollouts()
        self._make_learning()
        self._make_reports()
        self._make_batch_maker()
        self._make_checkpoints()
        self.seeds = random.Random(self._args.seed)  # noqa: S311  # of samples without a seed

    @functools.cached_property
    def planner(self) -> Planner:
        return Planner(
            self._team, self._context, self.runner, self.batchers, train_dataset=lambda: self._trainer.train_dataset
        )

    def _make_scoring(self) -> None:
        """How rows go through the model."""
        trainer, args, policies = self._trainer, self._args, self._team.policies
        accelerator = trainer.accelerator
        # `check_fused_head` compares TRL's head with the model's own, before anything is scored
        models = [base.language_model for base in self._bases]
        temperature = ScoringTemperature(
            models if trainer.ref_model is None else [*models, trainer.ref_model],
            [sampling.temperature for sampling in self._team.samplings.values()],
            default=trainer.temperature,
            head={"cast_lm_head_to_fp32": args.cast_lm_head_to_fp32, "outputs": ("log_probs", "entropy")},
        )
        for model in models:
            check_fused_head(model, trainer.temperature)
        of_trl = trainer.ref_model, trainer.aux_loss_enabled
        first = self._bases[0]
        self.passes = ModelPass(trainer.model, policies.has_adapters, args, accelerator, *of_trl, images=first.images)
        self.pass_of = dict.fromkeys(self._bases[0].names, self.passes)
        for base in self._bases[1:]:
            options: dict[str, Any] = {"further_device": base.model.device, "images": base.images}
            passes = ModelPass(base.model, isinstance(base.model, PeftModel), args, accelerator, **options)
            self.pass_of |= dict.fromkeys(base.names, passes)
        warn_of_unused(args, any(passes.share for passes in self.pass_of.values()))
        self.updates = AdapterUpdates(self._team, self._context, accelerator)
        sources = self.updates.trained_parameters, lambda: trainer.optimizer
        self.batchers: dict[str, MicroBatcher] = {}  # by agent
        self._pad_tokens = {name: base.tokenizer.pad_token_id for base in self._bases for name in base.names}
        for base in self._bases:
            activate = functools.partial(policies.activate_adapter, policies.find_trained(base.names))
            batcher = MicroBatcher(self.pass_of[base.names[0]], activate, args, *sources)
            self.batchers |= dict.fromkeys(base.names, batcher)
        self.batcher = batcher if len(self._bases) == 1 else TeamBatcher(self.batchers)
        plain, cut = trl_log_probs(trainer), self.batcher.cut
        self.log_probs = LogProbs(self._team, temperature, plain, self.pass_of, cut, self._collate)
        # As in TRL: rows of the policy that is about to be updated need no old log-probabilities
        needs_old = args.gradient_accumulation_steps % self._schedule.generate_every != 0
        needs_old &= args.use_policy_ratio or args.update_order == "sequential"
        self._needs_old = needs_old | args.use_vllm  # what servers have sampled is compared with them
        if self._needs_old:
            for passes in dict.fromkeys(self.pass_of.values()):
                passes.warn_of_dropout(policies)

    def _collate(self, rows: Sequence[Row]) -> dict[str, torch.Tensor]:
        agent, multiple = rows[0].agent, self._trainer.pad_to_multiple_of
        tensors = collate(rows, self._pad_tokens[agent], multiple, self.pass_of[agent].device)
        return tensors | self.pass_of[agent].image_inputs(rows, tensors) if rows[0].images else tensors

    def _make_episodes(self) -> None:
        """How the team acts, with the random states and the objects of users' code."""
        trainer, team, args, code = self._trainer, self._team, self._args, self._code
        speakers: dict[str, Speaker] = {}
        for base in self._bases:
            speakers |= dict.fromkeys(base.names, self._make_speaker(base))
        speaker = join_speakers(speakers)
        seed = args.seed + args.process_index
        self._randomness = UserRandomness(seed, self.processes.device, self._other_devices())
        # Checkpoints save the state of users' own functions, which are wrapped to name the one that fails
        functions = [getattr(function, "__wrapped__", function) for function in TrlRewards(trainer).functions]
        self._users = UserState(setup.user_objects(functions, code.turn_rewards, team.workflow, team.agents))
        limits = EpisodeLimits(setup.tool_limits(args), args.workflow_timeout, args.max_episode_turns)
        runner = EpisodeRunner(team.agents, team.workflow, speaker, self._randomness, limits, self._users, args.seed)
        self.runner = runner.changed(RunMode(trains=True))

    def _other_devices(self) -> list[torch.device]:
        device, models = self.processes.device, [self._model, *self._team.policies.further]
        devices = [item for model in models for item in other_devices(model, device)]
        devices += [model.device for model in models[1:] if model.device not in (device, torch.device("cpu"))]
        return list(dict.fromkeys(devices))

    def _make_speaker(self, base: Base) -> Speaker:
        trainer, team, args, is_first = self._trainer, self._team, self._args, base is self._bases[0]
        uses_tools, template = find_template(base.agents, team.workflow, base.tokenizer)
        if is_first and uses_tools:
            trainer.chat_template = template
        template = trainer.chat_template if is_first else template
        settings = PromptSettings(
            tokenize=TrlPrompts(trainer).tokenize if is_first else None,
            chat_template=template,
            images=base.images,
            chat_template_kwargs=trainer.chat_template_kwargs,
            view=self._code.view,
            aliases=team.aliases,
            context_overflow=args.context_overflow,
            show_reasoning=args.show_reasoning,
        )
        end_token_ids = trainer.eos_token_ids if is_first else find_end_tokens(base.model, base.tokenizer)
        return make_speaker(
            base.language_model,
            base.tokenizer,
            self._generator(base, end_token_ids),
            team.agents,
            team.workflow,
            team.samplings,
            settings,
            end_token_ids,
            without_model=[agent.name for agent in team.agents if team.critic is None and not agent.has_policy],
            max_model_len=self._engines[base.model].max_model_len if self._engines else None,
            own=base.names,
        )

    def _generator(self, base: Base, end_token_ids: list[int]) -> Generator:
        """
        Make what samples turns. Another generator gets its line here. If its log-probabilities differ from those of
        scoring, set `_needs_old` (`_make_scoring`) and `_correction` (`_make_learning`) as for vLLM.
        """
        trainer, passes, policies = self._trainer, self.pass_of[base.names[0]], self._team.policies
        # Generation settings of an agent that overrides none
        settings = Sampling.from_agent(AgentSpec("solo"), self._args).as_generation_kwargs()
        calls: TrlEngine | ModelEngine = TrlEngine(trainer, settings)
        if base is not self._bases[0]:
            tokens = {name: getattr(base.tokenizer, name) for name in ("pad_token_id", "bos_token_id")}
            tokens["eos_token_id"] = end_token_ids
            if any(other.images for other in self._bases):  # TRL's are the first base's
                tokens["suppress_tokens"] = [base.model.config.image_token_id] if base.images else None
            half = HALF.get(trainer.accelerator.mixed_precision)
            calls = ModelEngine(base.model, base.tokenizer, tokens, half, calls.settings)
        is_exact = passes.sample_what_they_score()
        if not self._engines:
            records, samplings = self._needs_old and is_exact, {n: self._team.samplings[n] for n in base.names}
            is_sharded = self.processes.is_base_sharded
            return TransformersGenerator(calls, policies, samplings, passes.share, records, is_sharded, base.images)
        from ..extras.engines.setup import make_vllm_generator

        return make_vllm_generator(
            self._team,
            self._context,
            self._engines[base.model].servers,
            base.model,
            calls.settings,
            base.tokenizer,
            end_token_ids=end_token_ids,
            vocabulary=base.language_model.get_input_embeddings().weight.size(0),
            is_exact=is_exact,
            next_token=self.log_probs.next_token,
        )

    def _make_rollouts(self) -> None:
        """Episodes with rewards, and what they are made with."""
        team, run, args, failures = self._team, self._context, self._args, self._code.failures
        rewards = self._rewards = TrlRewards(self._trainer)
        # Whether agents learn from their own returns may be known with the first batch only
        own = self._own_returns = AgentReturns(args.returns, rewards, self.processes)
        reach = self._reach = RewardReachChecker(team.trained)
        scorer = self._scorer = RewardScorer(run, rewards, self._code.turn_rewards, self._randomness, failures)
        branches = uses_candidates(args) or CREDITS[args.credit].reruns
        self._alternatives = Alternatives(team, run, self.runner, scorer, own) if branches else None
        self.look_ahead, ahead = None, None  # what reads rows of later generation batches, and samples them
        if args.max_staleness:
            from ..extras.engines.prefetch import Prefetcher, UpcomingRows

            self.look_ahead = UpcomingRows(self.state, self._schedule, args.max_staleness)
            ahead = Prefetcher(run, self.runner, self.look_ahead, failures)
        self.rollouts = Rollouts(
            run, self.runner, team.workflow, scorer, rewards, own, reach, failures, self._alternatives, ahead
        )

    def _make_learning(self) -> None:
        """From rows to losses."""
        trainer, team, run, args, batcher = self._trainer, self._team, self._context, self._args, self.batcher
        credit = CreditAssigner(run, self._scorer, self._own_returns, team.workflow.earns, self._alternatives)
        self.critic = self._running = self._scale = None
        if team.critic is not None:
            # The heads are no part of the base, so accelerate does not move them
            team.critic.heads.to(trainer.accelerator.device)
            self._scale = ValueScale(args.normalize_values, team.critic.parts, self.processes)
            self.critic = CriticLearner(team, run, batcher, self.runner, self._scale, self.pass_of)
            self._estimator: Estimator = CriticEstimator(team, run, credit, self._scale)
        else:
            make_state = BASELINES[args.advantage].state
            self._running = make_state(args) if make_state is not None else None
            self._estimator = BaselineEstimator(team, run, credit, self._rewards, self._running)
        random_states = RandomStates(self.processes.device, others=self._other_devices())
        out_of_memory, trl_loss = OutOfMemory(run, batcher, self.updates, random_states), TrlLoss(trainer)
        self.loss = TeamLoss(
            team, run, trl_loss, self.log_probs, batcher, self._collate, self.critic, self.updates, out_of_memory
        )
        trainer.add_callback(self.loss)
        self.sequential = SequentialFactors(team, run, self.log_probs)
        self._correction = None
        if args.use_vllm:
            from ..extras.engines.setup import sampling_correction

            is_exact = all(passes.sample_what_they_score() for passes in dict.fromkeys(self.pass_of.values()))
            self._correction = sampling_correction(run, self.runner.generator, is_exact)

    def _make_reports(self) -> None:
        """What users are told: metrics, tables, transcripts, and warnings when a run learns nothing."""
        team, run, code = self._team, self._context, self._code
        # Agents have returns of their own only where a workflow rewards them by name, or the setting says so
        has_games = team.workflow.earns or self._args.returns == "agent"
        games = GameMetrics(team, self._own_returns) if has_games else None
        self.reporter = Reporter(
            team,
            run,
            self._rewards,
            lambda agent: self.runner.prompts.for_agent(agent).tokenizer,
            self._randomness,
            code.eval_metrics,
            code.vote,
            games,
        )
        self.loss.out_of_memory.plan = lambda: self.planner.memory_plan()
        self.loss.out_of_memory.release = self.runner.generator.drop_cache
        sizes = {name: passes.base.config.get_text_config().vocab_size for name, passes in self.pass_of.items()}
        self.health = Health(team, run, self.updates.trained_parameters, sizes)
        # Copies of all adapters and of their moments: only where they may be put back
        restores = self._args.on_collapse == "restore"
        self._best = BestAdapters(team.policies, lambda: self._trainer.optimizer) if restores else None
        self.collapse = None  # compares evaluations, and may restore adapters
        if self._args.on_collapse != "ignore" and self._trainer.eval_dataset is not None:
            self.collapse = Collapse(run, lambda: self.reporter.evaluation_error, team.policies, self._best)
        self.evaluations = EvaluationOptions(run, team.names, self.reporter, self.collapse)

    def _make_batch_maker(self) -> None:
        trainer, run, self._sampling = self._trainer, self._context, None
        if self._args.dynamic_sampling:
            self._sampling = DynamicSampling(run, self.rollouts, lambda: trainer.train_dataset, self._own_returns)
        has_kl = run.settings.beta != 0.0
        self.batch_maker = BatchMaker(
            self._team,
            run,
            self._schedule,
            self._sampling or self.rollouts,
            ModelOutputs(self.log_probs, self._needs_old, has_kl, self.critic, self._correction),
            self._estimator,
            self.batcher,
            self.reporter,
            self._reach,
            collapse=self.collapse if self._best is not None else None,  # else there is nothing to go back to
        )

    def _make_checkpoints(self) -> None:
        """The state of a resumed run, and the files of the team."""
        trainer, team, run, args = self._trainer, self._team, self._context, self._args
        owners: dict[str, Stateful | None] = {
            "user_randomness": self._randomness,
            "rollouts": self.rollouts,
            "dynamic_sampling": self._sampling,
            "collapse": self.collapse,
            "reach": self._reach,
            "own_returns": self._own_returns,
            "running_baselines": self._running,
            "value_scale": self._scale if args.normalize_values else None,
            "updates": self.updates,
            "sequential": self.sequential if args.update_order == "sequential" else None,
            "health": self.health,
            "users": self._users,
            "runner": self.runner.keys,
            "reporter": self.reporter,
        }
        # Do not rename: existing checkpoints have these names
        stateful = {name: owner for name, owner in owners.items() if owner is not None}
        revision = (args.model_init_kwargs or {}).get("revision")
        first, *others = self._bases
        template = trainer.chat_template or first.tokenizer.chat_template
        describe = functools.partial(describe_base, first.language_model, first.tokenizer, template, revision=revision)
        prompts_of = self.runner.prompts.for_agent
        further = {base: base.describe(prompts_of(base.names[0]).template.source) for base in others}
        settings = RunSettings(
            team,
            args,
            self._model,
            lambda: [describe(), *further.values()],
            rewards={"": self._rewards.functions, **self._code.turn_rewards},
            weights=self._rewards.weights.tolist(),
            view=lambda: self.runner.prompts.view,
            dataset=trainer.train_dataset,
            num_processes=self.processes.count,
        )
        self.checkpoints = Checkpoints(
            team, run, stateful, self._schedule, self._other_devices(), trainer.ref_model, settings, self._best
        )
        is_lora = [isinstance(base.model, PeftModel) for base in self._bases]
        inference = {
            "chat_template_kwargs": dict(trainer.chat_template_kwargs),
            "share_prefixes": any(passes.share for passes in self.pass_of.values()),
            "mixed_precision": "no" if all(is_lora) else trainer.accelerator.mixed_precision,
        }
        self.files = TeamFiles(
            team, trainer, self.runner, describe(), lambda: self.planner.draw_workflow(), inference, further
        )
        # Weights and both moments of Adam; a warning compares it with the room on the disk
        models = (trainer.model, *team.policies.further)
        trained = [parameter for model in models for parameter in model.parameters() if parameter.requires_grad]
        size = 3 * sum(parameter.numel() * parameter.element_size() for parameter in trained)
        save = functools.partial(save_checkpoint_now, trainer)
        self.run = Run(self.checkpoints, args, self.processes, save, size, self.files.try_out, self.rollouts.close)
