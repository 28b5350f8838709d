# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""The objects that a trainer is composed of, and how they are put together, in the order of a step."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from transformers import PreTrainedModel
from trl import GRPOTrainer

from ..adapters.copies import PastCopies, PastCopiesCallback
from ..adapters.manifest import BaseModel, describe_base
from ..agents import AgentSpec
from ..algorithms.baselines import BASELINES, CREDITS, RunningBaselines
from ..config.checks import uses_candidates
from ..config.marft_config import MARFTConfig
from ..config.options import warn_of_unused
from ..config.team_setup import RunContext, Sampling, TeamSetup
from ..learning.adapter_updates import AdapterUpdates, Schedule, SequentialFactors
from ..learning.advantages import BaselineEstimator, CreditAssigner, CriticEstimator, Estimator
from ..learning.batching import Collator, MicroBatcher
from ..learning.critic_learner import CriticLearner, ValueScale
from ..learning.log_probs import LogProbs, ModelPass
from ..learning.losses import MixedPass, OutOfMemory, TeamLoss
from ..prompts.builder import PromptBuilder, is_plain, is_single_agent, make_window, warn_of_unprotected
from ..prompts.chat_template import ChatTemplate
from ..prompts.tool_calls import prepare_tools
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
from ..rollout.runner import EpisodeRunner, Limits, RunMode
from ..rollout.transformers_generator import Decoding, TransformersGenerator
from ..rollout.turn_reader import TurnReader
from ..runs.checkpoints import BestAdapters, Checkpoints
from ..runs.collapse import Collapse
from ..runs.resume import RunSettings
from ..runs.run import Run
from ..seams.generation import TrlEngine
from ..seams.lora_layers import MixedLora
from ..seams.models import ScoringTemperature, check_fused_head
from ..seams.runs import save_checkpoint_now
from ..seams.trl import TrlLoss, TrlPrompts, TrlRewards, TrlSettings, TrlState, trl_log_probs
from ..system.processes import Processes, other_devices
from ..system.randomness import RandomStates, UserRandomness, UserState
from ..system.run_metrics import Metrics
from . import setup
from .experience import BatchMaker, EvaluationOptions, make_output_steps
from .team_files import TeamFiles


if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful

    from ..extras.engines.prefetch import UpcomingRows
    from ..extras.engines.setup import Engine
    from ..extras.engines.vllm_generator import SamplingCorrection


@dataclass(frozen=True, eq=False)
class UserCode:
    """Functions of users, after all checks."""

    view: View  # observations of agents as messages
    turn_rewards: Mapping[str, Sequence[Callable]]  # by agent, for its own turns
    eval_metrics: Sequence[EvalMetric]
    vote: Vote  # what is compared of answers when the samples of an evaluation vote
    failures: Failures | None  # what they have failed in, unless that ends the run


@dataclass(frozen=True, eq=False)
class Parts:
    """The objects of a trainer, in the order in which a step uses them. A feature that is off has none."""

    state: TrlState
    processes: Processes
    metrics: Metrics
    runner: EpisodeRunner  # runs episodes; has the prompts and the generator
    rollouts: Rollouts
    experience: BatchMaker  # from dataset rows to training data
    batcher: MicroBatcher  # micro-batches that fit into memory
    passes: ModelPass  # how rows go through the model
    log_probs: LogProbs
    critic: CriticLearner | None  # values and their loss
    loss: TeamLoss
    updates: AdapterUpdates
    sequential: SequentialFactors | None
    reporter: Reporter  # metrics, tables, transcripts
    evaluations: EvaluationOptions
    make_planner: Callable[[], Planner]  # see `planner`
    files: TeamFiles  # manifest and model card
    checkpoints: Checkpoints  # state of a resumed run
    run: Run
    look_ahead: UpcomingRows | None  # reads rows of later generation batches
    health: Health  # warns when a run learns nothing
    collapse: Collapse | None  # compares evaluations, and may restore adapters
    seeds: random.Random  # of samples without a seed

    @functools.cached_property
    def planner(self) -> Planner:
        """Describes the run before it starts."""
        return self.make_planner()


def assemble(
    trainer: GRPOTrainer,
    args: MARFTConfig,
    team: TeamSetup,
    schedule: Schedule,
    code: UserCode,
    engine: Engine | None = None,
) -> Parts:
    """The parts of a trainer whose parent's constructor has run."""
    state, processes = TrlState(trainer), Processes(trainer.accelerator)
    metrics = Metrics(state.metrics, functools.partial(getattr, state, "is_training"))
    run = RunContext(args, TrlSettings(trainer), state, metrics, processes)
    # In the order in which they need one another. Only what a retry after running out of memory shows and frees is set
    # afterwards.
    scoring = _scoring_parts(trainer, team, run, schedule)
    acting = _acting_parts(trainer, team, run, code, scoring, engine)
    rolling = _rollout_parts(trainer, team, run, schedule, code, acting)
    learning = _learning_parts(trainer, team, run, schedule, scoring, acting, rolling)
    telling = _reporting_parts(trainer, team, run, code, scoring, acting, rolling, learning)
    # Copies of all adapters and of their moments: only where they may be put back
    best = BestAdapters(team.policies, lambda: trainer.optimizer) if args.on_collapse == "restore" else None
    has_evaluations = args.on_collapse != "ignore" and trainer.eval_dataset is not None
    collapse = _collapse(team, run, telling.reporter, best, acting.past_copies) if has_evaluations else None
    further = (run, rolling.rollouts, lambda: trainer.train_dataset, rolling.own)
    sampling = DynamicSampling(*further) if args.dynamic_sampling else None
    source, reporter = sampling or rolling.rollouts, telling.reporter
    output_steps = make_output_steps(run, scoring.log_probs, learning.critic, learning.correction, scoring.needs_old)
    experience = BatchMaker(
        *(team, run, schedule, source, output_steps, learning.estimator, scoring.batcher, reporter, rolling.reach),
        collapse=collapse if best is not None else None,  # without copies, there is nothing to go back to
    )
    owners: dict[str, Stateful | None] = {
        "user_randomness": acting.randomness,
        "rollouts": rolling.rollouts,
        "dynamic_sampling": sampling,
        "collapse": collapse,
        "reach": rolling.reach,
        "own_returns": rolling.own,
        "running_baselines": learning.running,
        "value_scale": learning.scale if args.normalize_values else None,
        "updates": scoring.updates,
        "sequential": learning.sequential,
        "health": telling.health,
        "users": acting.users,
        "copies": acting.past_copies,
        "runner": acting.runner.keys,
        "reporter": telling.reporter,
    }
    # By name: checkpoints of earlier versions have the same names
    stateful = {name: owner for name, owner in owners.items() if owner is not None}
    template = trainer.chat_template or trainer.processing_class.chat_template
    revision = (args.model_init_kwargs or {}).get("revision")
    base = functools.partial(describe_base, scoring.base, trainer.processing_class, template, revision=revision)
    settings = _settings(trainer, team, run, code, acting, rolling, base)
    checkpoints = Checkpoints(
        team, run, stateful, schedule, trainer.model, trainer.ref_model, settings, acting.past_copies, best
    )
    files = _files(trainer, team, args, acting.runner, telling.make_planner, scoring, base())
    return Parts(
        state=state,
        processes=processes,
        metrics=metrics,
        runner=acting.runner,
        rollouts=rolling.rollouts,
        experience=experience,
        batcher=scoring.batcher,
        passes=scoring.passes,
        log_probs=scoring.log_probs,
        critic=learning.critic,
        loss=learning.loss,
        updates=scoring.updates,
        sequential=learning.sequential,
        reporter=telling.reporter,
        evaluations=EvaluationOptions(run, [agent.name for agent in team.agents], telling.reporter, collapse),
        make_planner=telling.make_planner,
        files=files,
        checkpoints=checkpoints,
        run=_run(trainer, run, checkpoints, rolling.rollouts, files),
        look_ahead=rolling.look_ahead,
        health=telling.health,
        collapse=collapse,
        seeds=random.Random(args.seed),  # noqa: S311
    )


class _Scoring(NamedTuple):
    """How rows go through the model."""

    base: PreTrainedModel
    passes: ModelPass
    updates: AdapterUpdates
    batcher: MicroBatcher
    collate: Collator
    log_probs: LogProbs
    needs_old: bool  # rows need log-probabilities of the policy that sampled them


def _scoring_parts(trainer: GRPOTrainer, team: TeamSetup, run: RunContext, schedule: Schedule) -> _Scoring:
    args, accelerator, policies = run.args, trainer.accelerator, team.policies
    model = accelerator.unwrap_model(trainer.model)
    base = model.get_base_model() if policies.has_adapters else model
    # Before anything is scored: the head is compared with the model's own once
    temperature = ScoringTemperature(
        [base] if trainer.ref_model is None else [base, trainer.ref_model],
        [sampling.temperature for sampling in team.samplings.values()],
        default=trainer.temperature,
        head={"cast_lm_head_to_fp32": args.cast_lm_head_to_fp32, "outputs": ("log_probs", "entropy")},
    )
    check_fused_head(base, trainer.temperature)
    has_aux_loss = trainer.aux_loss_enabled
    passes = ModelPass(trainer.model, policies.has_adapters, args, accelerator, trainer.ref_model, has_aux_loss)
    warn_of_unused(args, passes.share)
    updates = AdapterUpdates(team, run, accelerator)

    def trained():
        return [parameter for part in updates.trained_parameters().values() for parameter in part.values()]

    def has_optimizer_state():
        return trainer.optimizer is not None and bool(trainer.optimizer.state)

    batcher = MicroBatcher(passes, policies, args, trained, has_optimizer_state)
    collate = Collator(trainer.processing_class.pad_token_id, trainer.pad_to_multiple_of, accelerator.device)
    log_probs = LogProbs(team, temperature, trl_log_probs(trainer), passes, batcher.cut, collate)
    # As in TRL: rows of the policy that is about to be updated need no old log-probabilities
    needs_old = args.gradient_accumulation_steps % schedule.generate_every != 0
    needs_old &= args.use_policy_ratio or args.update_order == "sequential"
    needs_old |= args.use_vllm  # what servers have sampled is compared with them
    if needs_old:
        passes.warn_of_dropout(policies)
    return _Scoring(base, passes, updates, batcher, collate, log_probs, needs_old)


class _Acting(NamedTuple):
    """How the team acts, with the random states and the objects of users' code."""

    runner: EpisodeRunner
    randomness: UserRandomness
    users: UserState
    past_copies: PastCopies | None


def _acting_parts(
    trainer: GRPOTrainer,
    team: TeamSetup,
    run: RunContext,
    code: UserCode,
    scoring: _Scoring,
    engine: Engine | None,
) -> _Acting:
    args, tokenizer, trl = run.args, trainer.processing_class, TrlPrompts(trainer)
    uses_tools = team.workflow.uses_tools or any(agent.tools for agent in team.agents)
    if uses_tools:
        trainer.chat_template = prepare_tools(tokenizer, team.agents, team.workflow)
    # Places of copies are filled now, so that the first batch has opponents
    past_copies = None
    if any(agent.copy_of is not None for agent in team.agents):
        past_copies = PastCopies(team.policies, team.agents)
        past_copies.take(0)
        trainer.add_callback(PastCopiesCallback(past_copies))
    without_model = [agent.name for agent in team.agents if team.critic is None and not agent.has_policy]
    longest = engine.max_model_len if engine is not None else None
    prompts = PromptBuilder(
        tokenizer,
        tokenize=trl.tokenize,
        view=code.view,
        chat_template=ChatTemplate(tokenizer, trainer.chat_template, trainer.chat_template_kwargs),
        keeps_text_prompts=is_plain(team.agents, uses_tools),
        window=make_window(trainer.model, team.samplings, args.context_overflow, without_model, longest),
        end_token_ids=trainer.eos_token_ids,
        aliases=team.aliases,
        is_single_agent=is_single_agent(team.agents, team.workflow),
        show_reasoning=args.show_reasoning,
    )
    warn_of_unprotected(prompts, uses_tools)
    device = trainer.accelerator.device
    randomness = UserRandomness(args.seed + args.process_index, device, other_devices(trainer.model, device))
    # Functions were wrapped to name the one that fails; their state is that of the users' own
    functions = [getattr(function, "__wrapped__", function) for function in TrlRewards(trainer).functions]
    users = UserState(setup.user_objects(functions, code.turn_rewards, team.workflow, team.agents))
    generator = _generator(trainer, team, run, scoring, past_copies, engine)
    reader = TurnReader(tokenizer, trainer.eos_token_ids, prompts.template, uses_tools, len(team.agents) == 1)
    vocabulary = scoring.base.get_input_embeddings().weight.size(0)
    limits = Limits(setup.tool_limits(args), args.workflow_timeout, args.max_episode_turns, vocabulary)
    runner = EpisodeRunner(
        team.agents, team.workflow, prompts, generator, reader, randomness, limits, users, args.seed, past_copies
    ).changed(RunMode(trains=True))
    return _Acting(runner, randomness, users, past_copies)


def _generator(
    trainer: GRPOTrainer,
    team: TeamSetup,
    run: RunContext,
    scoring: _Scoring,
    past_copies: PastCopies | None,
    engine: Engine | None,
) -> Generator:
    """
    What samples turns. A further generator gets its line here. One whose log-probabilities differ from those of
    scoring also sets `needs_old` and needs a [`SamplingCorrection`], as vLLM does.
    """
    args, passes, model = run.args, scoring.passes, trainer.accelerator.unwrap_model(trainer.model)
    # Settings that no agent has are those of an agent without any
    calls = TrlEngine(trainer, Sampling.from_agent(AgentSpec("solo"), args).as_generation_kwargs())
    is_exact = passes.sample_what_they_score()
    if engine is None:
        may_mix = args.mixed_passes is not False and not run.processes.is_base_sharded and passes.share
        mixed = MixedLora(model) if may_mix and MixedLora.find_obstacle(model, team.policies.names) is None else None
        records = scoring.needs_old and is_exact
        decoding = Decoding(passes.share, records, mixed, captures=not run.processes.is_base_sharded)
        return TransformersGenerator(calls, team.policies, team.samplings, decoding, past_copies)
    from ..extras.engines.setup import make_vllm_generator

    return make_vllm_generator(
        team,
        run,
        engine.servers,
        model,
        calls.settings,
        trainer.processing_class,
        end_token_ids=trainer.eos_token_ids,
        vocabulary=scoring.base.get_input_embeddings().weight.size(0),
        is_exact=is_exact,
        next_token=scoring.log_probs.next_token,
        past=past_copies,
    )


class _Rolling(NamedTuple):
    """Episodes with rewards, and what they are made with."""

    rollouts: Rollouts
    rewards: TrlRewards
    scorer: RewardScorer
    own: AgentReturns
    reach: RewardReachChecker
    alternatives: Alternatives | None
    look_ahead: UpcomingRows | None


def _rollout_parts(
    trainer: GRPOTrainer, team: TeamSetup, run: RunContext, schedule: Schedule, code: UserCode, acting: _Acting
) -> _Rolling:
    args, rewards = run.args, TrlRewards(trainer)
    # Whether agents learn from their own returns may be known with the first batch only
    own, reach = AgentReturns(args.returns, rewards, run.processes), RewardReachChecker(team.trained)
    scorer = RewardScorer(run, rewards, code.turn_rewards, acting.randomness, code.failures)
    branches = uses_candidates(args) or CREDITS[args.credit].reruns
    alternatives = Alternatives(team, run, acting.runner, scorer, own) if branches else None
    look_ahead, ahead = None, None
    if args.max_staleness:
        from ..extras.engines.prefetch import Prefetcher, UpcomingRows

        look_ahead = UpcomingRows(run.state, schedule, args.max_staleness)
        ahead = Prefetcher(run, acting.runner, look_ahead, code.failures)
    rollouts = Rollouts(
        run, acting.runner, team.workflow, scorer, rewards, own, reach, code.failures, alternatives, ahead
    )
    return _Rolling(rollouts, rewards, scorer, own, reach, alternatives, look_ahead)


class _Learning(NamedTuple):
    """From rows to losses."""

    estimator: Estimator
    critic: CriticLearner | None
    loss: TeamLoss
    sequential: SequentialFactors | None
    correction: SamplingCorrection | None
    running: RunningBaselines | None
    scale: ValueScale | None


def _learning_parts(
    trainer: GRPOTrainer,
    team: TeamSetup,
    run: RunContext,
    schedule: Schedule,
    scoring: _Scoring,
    acting: _Acting,
    rolling: _Rolling,
) -> _Learning:
    args, processes = run.args, run.processes
    credit = CreditAssigner(
        run, rolling.scorer, rolling.rewards, rolling.own, team.workflow.earns, rolling.alternatives
    )
    learner = running = scale = None
    if team.critic is not None:
        # The heads are no part of the base, so accelerate does not move them
        team.critic.heads.to(trainer.accelerator.device)
        scale = ValueScale(args.normalize_values, team.critic.parts, processes)
        learner = CriticLearner(team, run, schedule, scoring.batcher, acting.runner, scale)
        estimator: Estimator = CriticEstimator(team, run, credit, scale)
    else:
        make_state = BASELINES[args.advantage].state
        running = make_state(args) if make_state is not None else None
        estimator = BaselineEstimator(team, run, credit, rolling.rewards, running)
    model = trainer.accelerator.unwrap_model(trainer.model)
    places, shards = scoring.passes.give_positions, processes.is_base_sharded
    mixing = MixedPass.create(model, team.policies, args, scoring.batcher, places, shards)
    scores, batcher, collate, updates = scoring.log_probs, scoring.batcher, scoring.collate, scoring.updates
    randomness = RandomStates(processes.device, others=other_devices(model, processes.device))
    again = OutOfMemory(run, batcher, updates, randomness)
    loss = TeamLoss(team, run, TrlLoss(trainer), scores, batcher, collate, learner, updates, mixing, again)
    trainer.add_callback(loss)
    is_sequential = args.update_order == "sequential"
    sequential = SequentialFactors(team, run, scoring.log_probs) if is_sequential else None
    correction = None
    if args.use_vllm:
        from ..extras.engines.setup import sampling_correction

        correction = sampling_correction(run, acting.runner.generator, scoring.passes.sample_what_they_score())
    return _Learning(estimator, learner, loss, sequential, correction, running, scale)


class _Telling(NamedTuple):
    """Reports for users."""

    reporter: Reporter
    make_planner: Callable[[], Planner]  # made when a plan is asked for
    health: Health


def _reporting_parts(
    trainer: GRPOTrainer,
    team: TeamSetup,
    run: RunContext,
    code: UserCode,
    scoring: _Scoring,
    acting: _Acting,
    rolling: _Rolling,
    learning: _Learning,
) -> _Telling:
    tokenizer, runner = trainer.processing_class, acting.runner
    # Agents have returns of their own only where a workflow rewards them by name, or the setting says so
    has_games = team.workflow.earns or acting.past_copies is not None or run.args.returns == "agent"
    games = GameMetrics(team, rolling.own, acting.past_copies) if has_games else None
    reporter = Reporter(team, run, rolling.rewards, tokenizer, acting.randomness, code.eval_metrics, code.vote, games)
    model, window = trainer.accelerator.unwrap_model(trainer.model), runner.prompts.window_size
    make_planner = functools.partial(
        Planner,
        team,
        run,
        runner,
        scoring.batcher,
        model,
        tokenizer,
        window,
        train_dataset=lambda: trainer.train_dataset,
        learner=learning.critic,
        past_copies=acting.past_copies,
    )
    learning.loss.out_of_memory.plan = lambda: make_planner().memory_plan()
    learning.loss.out_of_memory.release = runner.generator.drop_cache
    vocabulary = scoring.base.config.get_text_config().vocab_size
    return _Telling(reporter, make_planner, Health(team, run, scoring.updates.trained_parameters, vocabulary))


def _settings(
    trainer: GRPOTrainer,
    team: TeamSetup,
    run: RunContext,
    code: UserCode,
    acting: _Acting,
    rolling: _Rolling,
    base: Callable[[], BaseModel],
) -> RunSettings:
    return RunSettings(
        team,
        run.args,
        trainer.model,
        base,
        rewards={"": rolling.rewards.functions, **code.turn_rewards},
        weights=rolling.rewards.weights.tolist(),
        view=lambda: acting.runner.prompts.view,
        dataset=trainer.train_dataset,
        num_processes=run.processes.count,
    )


def _collapse(
    team: TeamSetup, run: RunContext, reporter: Reporter, best: BestAdapters | None, past_copies: PastCopies | None
) -> Collapse:
    error = functools.partial(getattr, reporter, "evaluation_error")
    return Collapse(run, error, team.policies, best, past_copies)


def _run(trainer: GRPOTrainer, run: RunContext, checkpoints: Checkpoints, rollouts: Rollouts, files: TeamFiles) -> Run:
    trained = [p for p in trainer.model.parameters() if p.requires_grad]
    # Weights and both moments; a warning compares it with the room on the disk
    size = 3 * sum(parameter.numel() * parameter.element_size() for parameter in trained)  # with Adam's moments
    save = functools.partial(save_checkpoint_now, trainer)
    try_out = functools.partial(files.try_out, getattr(trainer.model, "peft_config", {}))
    return Run(checkpoints, run.args, run.processes, save, lambda: size, try_out, clean_up=rollouts.close)


def _files(
    trainer: GRPOTrainer,
    team: TeamSetup,
    args: MARFTConfig,
    runner: EpisodeRunner,
    make_planner: Callable[[], Planner],
    scoring: _Scoring,
    base: BaseModel,
) -> TeamFiles:
    has_adapters = team.policies.has_adapters
    configs = [trainer.model.peft_config[name] for name in team.policies.names] if has_adapters else []
    return TeamFiles(
        team,
        args,
        runner,
        base,
        make_planner,
        max_rank=max((getattr(config, "r", 0) for config in configs), default=0),
        repo=lambda: trainer.hub_model_id,
        inference={
            "chat_template_kwargs": dict(trainer.chat_template_kwargs),
            "share_prefixes": scoring.passes.share,
            # Adapters generate outside of the wrapper that casts
            "mixed_precision": "no" if has_adapters else trainer.accelerator.mixed_precision,
        },
        dataset=lambda: trainer.train_dataset,
    )
