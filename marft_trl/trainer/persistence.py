# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""The trainer's part that saves, loads and pushes a team."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from accelerate.logging import get_logger
from datasets import Dataset
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOTrainer

from ..agents import AgentSpec
from ..manifest import MANIFEST_NAME, BaseModel, Inference, TeamManifest
from ..progress import say
from ..rollout.transformers_generator import TransformersGenerator, general_settings, own_settings
from ..rollout.views import team_view
from ..tools import tool_name
from ..workflows import Workflow
from ..workflows.base import callable_name
from . import checkpointing, gradients
from .adapters import Policies, load_adapter_weights
from .cards import team_card
from .critic import CRITIC_NAME, Critic
from .references import load_references, save_references
from .schedules import Schedule
from .setup import tool_limits


if TYPE_CHECKING:
    from ..team import Team


logger = get_logger(__name__)


class TeamPersistence(GRPOTrainer):
    """Overrides of `Trainer` and `GRPOTrainer` (checked against TRL 1.16) around files and the Hub."""

    agents: list[AgentSpec]
    policies: Policies
    workflow: Workflow
    critic: Critic | None
    anonymous: str | None
    schedule: Schedule
    _generator: TransformersGenerator
    _base_description: BaseModel
    _team_seeds: random.Random
    _entropy_control: dict[str, tuple[float, float]]

    def manifest(self) -> TeamManifest:
        """What is saved beside the adapters, so that the team can be run again with the settings it acts by."""
        names = self.policies.names if self.policies.has_adapters else []
        return TeamManifest(
            agents=self.agents,
            workflow=self.workflow.describe(),
            adapters={name: {"folder": name, "trained": name in self.policies.trained} for name in names},
            base=self._base_description,
            inference=self._inference(),
            anonymous=self.anonymous,
        )

    def _inference(self) -> Inference:
        views = {agent.name: callable_name(agent.view) for agent in self.agents if agent.view is not None}
        return Inference(
            sampling={agent.name: own_settings(self._generator.settings(agent.name)) for agent in self.agents},
            generation=general_settings(self._generator.settings(self.agents[0].name)),
            share_prefixes=self._shares_prefixes,
            # Adapters generate outside of the wrapper that casts
            mixed_precision="no" if self.policies.has_adapters else self.accelerator.mixed_precision,
            chat_template_kwargs=dict(self.chat_template_kwargs),
            context_overflow=self.args.context_overflow,
            tools={agent.name: list(map(tool_name, agent.functions)) for agent in self.agents if agent.functions},
            tool_limits=asdict(tool_limits(self.args)),
            view=None if self.view is team_view else callable_name(self.view),
            agent_views=views,
            workflow_timeout=self.args.workflow_timeout,
        )

    @property
    def team(self) -> Team:
        """The team with its present weights, to be run: `trainer.team("question")`."""
        from ..team import Team  # which needs other modules of this package first

        model = self.accelerator.unwrap_model(self.model)
        return Team(self.agents, self.workflow, self._runner, model, seeds=self._team_seeds)

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        super()._save(output_dir, state_dict)
        if self.args.should_save:
            folder = Path(output_dir or self.args.output_dir)
            self.manifest().save(folder)
            if self.critic is not None:
                self.critic.save(folder)
            self._card(folder.name).save(folder / "README.md")  # PEFT's own names a local base, which the Hub refuses

    def create_model_card(self, model_name: str | None = None, dataset_name: str | None = None, tags=None) -> None:
        if self.is_world_process_zero():
            folder = Path(self.args.output_dir)
            tags = [tags] if isinstance(tags, str) else list(tags or [])
            self._card(model_name or folder.name, dataset_name, tags).save(folder / "README.md")

    def _card(self, model_name: str, dataset_name: str | None = None, tags: Sequence[str] = ()):
        latest: dict[str, float] = {}
        for entry in self.state.log_history:
            latest |= {key: value for key, value in entry.items() if isinstance(value, (int, float))}
        wanted = ("reward", "eval_reward", "agents/", "eval_agents/")
        figures = {
            key: value
            for key, value in latest.items()
            if key in wanted[:2] or (key.startswith(wanted[2:]) and key.endswith(("/reward", "/kl", "/mean_length")))
        }
        configs = [self.model.peft_config[name] for name in self.policies.names] if self.policies.has_adapters else []
        return team_card(
            self.manifest(),
            model_name,
            repo=self.hub_model_id,
            dataset_name=dataset_name,
            tags=[*tags, *self._tag_names],
            figures=figures,
            max_rank=max((getattr(config, "r", 0) for config in configs), default=0),
            picture=self._picture(),
        )

    def _picture(self) -> str:
        with self._runner.rehearsing():
            return self.workflow.mermaid([agent.name for agent in self.agents], self._links())

    def _get_train_sampler(self, dataset: Dataset | None = None):
        theirs = super()._get_train_sampler(dataset)
        return checkpointing.EpochSampler(
            theirs.data_source,
            mini_repeat_count=theirs.mini_repeat_count,
            batch_size=theirs.batch_size,
            repeat_count=theirs.repeat_count * self.schedule.phases,
            shuffle=theirs.shuffle,
            seed=theirs.seed,
        )

    def train(self, resume_from_checkpoint: str | bool | None = None, *args, **kwargs):
        if resume_from_checkpoint is True:
            # The parent takes the newest folder, also one that a killed run left half written, and needs one
            resume_from_checkpoint = checkpointing.newest_complete(self.args.output_dir)
        if isinstance(resume_from_checkpoint, Path):
            resume_from_checkpoint = str(resume_from_checkpoint)
        if self.is_world_process_zero():  # launchers may start fewer processes than they were asked for
            count, names = self.accelerator.num_processes, ", ".join(agent.name for agent in self.agents)
            say(f"Training {names} on {count} process{'es' if count > 1 else ''} ({self.accelerator.device.type})")
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _run_epoch(self, *args, **kwargs) -> None:
        # The parent looks whether training is over after a step, so a finished run would train one more
        if self.state.global_step >= self.state.max_steps:
            logger.info(f"All {self.state.max_steps} steps are done already; nothing is trained.")
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **kwargs)

    def _save_checkpoint(self, model, trial) -> None:
        folder = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        if self.args.should_save and folder.exists() and not checkpointing.is_complete(folder):
            shutil.rmtree(folder)  # what a killed run left: old and new files must not mix
        self.accelerator.wait_for_everyone()
        super()._save_checkpoint(model, trial)

    def _save_rng_state(self, output_dir: str) -> None:
        # Called on every process, before the checkpoint is pushed and older ones are removed
        super()._save_rng_state(output_dir)
        rank, world_size = self.args.process_index, self.args.world_size
        is_spent = self._step % self.schedule.generate_every == 0  # new episodes are due anyway
        slices = None if is_spent else self._buffered_inputs
        extra = {"entropy_control": self._entropy_control, "user_randomness": self._runner.randomness.state_dict()}
        checkpointing.save_rollouts(output_dir, rank, world_size, self._step, slices, extra)
        if self.args.sync_ref_model and self.args.should_save:
            save_references(self.policies, self.ref_model, output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model=None) -> None:
        if self.policies.has_adapters:
            checkpointing.load_team_adapters(
                self.model, self.policies, self.agents, resume_from_checkpoint, self.anonymous
            )
            self._load_critic(resume_from_checkpoint)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        hook = optimizer.register_load_state_dict_pre_hook(
            lambda mine, saved: gradients.check_groups(saved["param_groups"], mine.param_groups)
        )
        try:
            super()._load_optimizer_and_scheduler(checkpoint)
        finally:
            hook.remove()
        if self.args.sync_ref_model:
            load_references(self.policies, self.ref_model, checkpoint)
        restored = checkpointing.load_rollouts(checkpoint, self.args.process_index, self.args.world_size)
        if restored is not None:
            self._step, self._buffered_inputs, extra = restored
            self._entropy_control |= {name: tuple(pair) for name, pair in extra.get("entropy_control", {}).items()}
            if "user_randomness" in extra:
                self._runner.randomness.load_state_dict(extra["user_randomness"])

    def _load_critic(self, folder: str) -> None:
        if self.critic is None:
            return
        self.critic.load(folder)
        for part in self.critic.parts if self.critic.kind != "frozen" else []:
            load_adapter_weights(self.model, part, Path(folder) / part)
        self.policies.release()

    def _load_best_model(self) -> None:
        if self.policies.has_adapters:
            checkpointing.load_team_adapters(
                self.model, self.policies, self.agents, self.state.best_model_checkpoint, self.anonymous
            )
            self._load_critic(self.state.best_model_checkpoint)
        else:
            super()._load_best_model()

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        # The parent copies only files in the root of the checkpoint; the agents' adapters lie in folders
        if self.is_world_process_zero():
            source, target = Path(checkpoint_folder), Path(self.args.output_dir)
            parts = [CRITIC_NAME, *self.critic.parts] if self.critic is not None else []
            names = self.policies.names if self.policies.has_adapters else []
            for name in dict.fromkeys([*names, *(part for part in parts if (source / part).is_dir())]):
                shutil.copytree(source / name, target / name, dirs_exist_ok=True)
            shutil.copy(source / MANIFEST_NAME, target / MANIFEST_NAME)
        super()._push_from_checkpoint(checkpoint_folder)

    def _finish_current_push(self) -> None:
        super()._finish_current_push()
        for job in getattr(getattr(self, "push_in_progress", None), "jobs", []):
            if job.done() and job.exception() is not None:
                raise RuntimeError(
                    f"A checkpoint could not be pushed to {self.hub_model_id}: {job.exception()}. The files are in "
                    f"{self.args.output_dir}; push them again with `trainer.push_to_hub()`."
                ) from job.exception()
