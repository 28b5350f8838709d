# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""The objects that a trainer is composed of. Each has named inputs and its own state."""

from __future__ import annotations

import random
from dataclasses import dataclass

from trl import GRPOTrainer

from ..learning.adapter_updates import AdapterUpdates
from ..learning.critic_learner import CriticLearner
from ..learning.log_probs import LogProbs, Passes
from ..learning.losses import TeamLoss
from ..learning.micro_batcher import MicroBatcher
from ..learning.sequential import SequentialFactors
from ..reporting.health import Health
from ..reporting.plan import Planner
from ..reporting.reporter import Reporter
from ..rollout.rollouts import Rollouts
from ..rollout.runner import EpisodeRunner
from ..runs.checkpointing import Checkpoints, Stateful
from ..runs.collapse import Collapse
from ..runs.run import Run
from ..seams.trl import TrlState
from ..servers.look_ahead import LookAhead
from ..system.processes import Processes
from ..system.run_metrics import Metrics
from .builder import Builder
from .choices import Choices
from .evaluations import Evaluations
from .experience import Experience
from .team_files import TeamFiles


@dataclass(frozen=True, eq=False)
class Parts:
    """
    The objects of a trainer, in the order in which a step uses them.

    Args:
        state ([`TrlState`]): position in the run, and the training rows in use.
        processes ([`Processes`]): the processes of the run.
        metrics ([`Metrics`]): metrics since the last log.
        runner ([`EpisodeRunner`]): runs episodes; has the prompts and the generator.
        rollouts ([`Rollouts`]): episodes with rewards.
        experience ([`Experience`]): from dataset rows to training data.
        batcher ([`MicroBatcher`]): micro-batches that fit into memory.
        passes ([`Passes`]): how rows go through the model.
        log_probs ([`LogProbs`]): log-probabilities.
        critic ([`CriticLearner`], *optional*): values and their loss.
        loss ([`TeamLoss`]): losses of slices.
        updates ([`AdapterUpdates`]): optimizer steps.
        sequential ([`SequentialFactors`]): factors of sequential updates.
        reporter ([`Reporter`]): metrics, tables, transcripts.
        evaluations ([`Evaluations`]): how evaluations sample.
        planner ([`Planner`]): what the run will do.
        files ([`TeamFiles`]): manifest and model card.
        checkpoints ([`Checkpoints`]): state of a resumed run.
        run ([`Run`]): the course of the run.
        look_ahead ([`LookAhead`], *optional*): reads rows of later generation batches.
        health ([`Health`]): says when a run learns nothing.
        collapse ([`Collapse`]): says when a run falls, and may undo it.
        seeds (`random.Random`): source of seeds for samples without a seed.
    """

    state: TrlState
    processes: Processes
    metrics: Metrics
    runner: EpisodeRunner
    rollouts: Rollouts
    experience: Experience
    batcher: MicroBatcher
    passes: Passes
    log_probs: LogProbs
    critic: CriticLearner | None
    loss: TeamLoss
    updates: AdapterUpdates
    sequential: SequentialFactors
    reporter: Reporter
    evaluations: Evaluations
    planner: Planner
    files: TeamFiles
    checkpoints: Checkpoints
    run: Run
    look_ahead: LookAhead | None
    health: Health
    collapse: Collapse
    seeds: random.Random


def assemble(trainer: GRPOTrainer, choices: Choices) -> Parts:
    """
    The parts of a trainer whose parent's constructor has run.

    Args:
        trainer ([`~trl.GRPOTrainer`]): has the model, the reward functions and the accelerator.
        choices ([`Choices`]): the team and how it is trained.
    """
    builder = Builder(trainer, choices)
    scorer, reach, alternatives, rollouts = builder.rewards()
    sampling = builder.dynamic_sampling(rollouts)
    batcher, log_probs, learner, loss, updates, sequential = builder.learning()
    reporter, planner = builder.reporting(batcher, learner)
    collapse = builder.collapse(rollouts, reporter)
    health = builder.health(updates)
    owners: dict[str, Stateful] = {
        "user_randomness": builder.randomness,
        "rollouts": rollouts,
        "dynamic_sampling": sampling,
        "collapse": collapse,
        "reach": reach,
        "own_returns": builder.own_returns,
        "running_baselines": builder.running,
        "value_scale": builder.value_scale,
        "updates": updates,
        "sequential": sequential,
        "health": health,
        "users": builder.users,
        "copies": builder.past,
        "runner": builder.runner,
        "reporter": reporter,
    }
    checkpoints = builder.checkpoints(owners)
    return Parts(
        state=builder.state,
        processes=builder.processes,
        metrics=builder.metrics,
        runner=builder.runner,
        rollouts=rollouts,
        experience=builder.experience(
            sampling, collapse, alternatives, scorer, log_probs, batcher, learner, reporter, reach
        ),
        batcher=batcher,
        passes=builder.passes,
        log_probs=log_probs,
        critic=learner,
        loss=loss,
        updates=updates,
        sequential=sequential,
        reporter=reporter,
        evaluations=builder.evaluations(reporter),
        planner=planner,
        files=builder.files(planner),
        checkpoints=checkpoints,
        run=builder.run(checkpoints, rollouts),
        look_ahead=builder.look_ahead,
        health=health,
        collapse=collapse,
        seeds=random.Random(choices.args.seed),  # noqa: S311
    )
