# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""The files of a team other than its weights: the manifest, the critic's heads, the model card."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCard
from trl import GRPOTrainer

from ..adapters.files import forget_local_bases, save_base, warn_of_leftovers
from ..adapters.manifest import MANIFEST_NAME, BaseModel, FurtherBaseModel, Inference, TeamManifest
from ..algorithms.critics import CRITIC_NAME
from ..config.team_setup import TeamSetup, general_settings, own_settings
from ..episodes.tools import tool_name
from ..prompts.views import team_view
from ..reporting.model_card import CARD_NAME, TAGS, team_card
from ..reporting.progress import differ
from ..rollout.runner import EpisodeRunner
from ..system.redaction import without_secrets
from ..workflows.base import callable_name
from .bases import Base
from .setup import tool_limits


_OF_METHOD = ("preset", "advantage", "critic", "credit", "level", "loss_type", "num_generations")
_CARD_METRICS = re.compile("(eval_)?(reward|agents/.*/(reward|return|kl|mean_length))")


class TeamFiles:
    """Writes what makes adapters a team."""

    def __init__(
        self,
        team: TeamSetup,
        trainer: GRPOTrainer,
        runner: EpisodeRunner,
        base: BaseModel,
        draw_workflow: Callable[[], str],
        inference: Mapping[str, Any],
        further: Mapping[Base, FurtherBaseModel],
    ):
        self._further = further
        self._team, self._trainer, self._args, self._runner = team, trainer, trainer.args, runner
        self._base, self._draw_workflow, self._inference = base, draw_workflow, without_secrets(dict(inference))
        self._adapters = [name for name in team.policies.names if team.policies.is_lora(name)]
        configs = (getattr(model, "peft_config", {}) for model in (trainer.model, *team.policies.further))
        self._configs = {name: config for by_name in configs for name, config in by_name.items()}

    def manifest(self) -> TeamManifest:
        agents, trained = self._team.agents, self._team.policies.trained
        view, settings = self._runner.prompts.view, self._runner.generator.settings
        return TeamManifest(
            agents=agents,
            workflow=self._team.workflow.describe(),
            adapters={name: {"folder": name, "trained": name in trained} for name in self._adapters},
            base=self._base,
            inference=Inference(
                sampling={agent.name: own_settings(settings(agent.name)) for agent in agents},
                generation=without_secrets(general_settings(settings(agents[0].name))),
                **self._inference,
                context_overflow=self._args.context_overflow,
                tools={
                    agent.name: list(map(tool_name, agent.functions)) for agent in agents if agent.tools is not None
                },
                tool_limits=asdict(tool_limits(self._args)),
                view=None if view is team_view else callable_name(view),
                agent_views={agent.name: callable_name(agent.view) for agent in agents if agent.view is not None},
                workflow_timeout=self._args.workflow_timeout,
                replies={agent.name: callable_name(agent.reply) for agent in agents if agent.reply is not None},
                show_reasoning=self._args.show_reasoning,
            ),
            anonymous=self._team.anonymous,
            further_bases=list(self._further.values()),
        )

    def save(self, folder: Path, log_history: Sequence[Mapping[str, Any]]) -> None:
        for base, description in self._further.items():
            save_base(
                base.model, base.processing_class, folder, description, self._team.policies.get_adapters(base.model)
            )
        manifest = self.manifest()
        manifest.save(folder)
        if self._team.critic is not None:
            self._team.critic.save(folder)
        # A folder may be that of a run whose team had other agents
        warn_of_leftovers(folder, self._team.policies.saved_adapters if self._adapters else [])
        forget_local_bases(folder, manifest)
        # PEFT's own card names a local base, which the Hub refuses
        self.card(log_history, folder.name).save(folder / CARD_NAME)

    def try_out(self) -> None:
        """Write all but weights into a folder that is removed. What cannot be saved raises here, before training."""
        with tempfile.TemporaryDirectory(prefix="marft_trial_") as name:
            folder = Path(name)
            self.manifest().save(folder)
            for adapter, config in self._configs.items():
                config.save_pretrained(str(folder / adapter))
            torch.save(self._args, folder / "training_args.bin")
            # Without the picture, for which the workflow would run
            team_card(self.manifest(), folder.name, facts=self._facts({}, None)).save(folder / CARD_NAME)

    def card(
        self,
        log_history: Sequence[Mapping[str, Any]],
        model_name: str,
        dataset_name: str | None = None,
        tags: str | Sequence[str] | None = None,
    ) -> ModelCard:
        numbers = ((key, value) for entry in log_history for key, value in entry.items())
        latest = {key: value for key, value in numbers if isinstance(value, (int, float))}
        shown = {key: value for key, value in latest.items() if _CARD_METRICS.fullmatch(key)}
        for prefix in ("", "eval_"):  # without returns of their own, agents only repeat the team's reward
            rewards = [key for key in shown if key.startswith(f"{prefix}agents/") and key.endswith("/reward")]
            if not differ([shown[key] for key in rewards]):
                shown = {key: value for key, value in shown.items() if key not in rewards}
        return team_card(
            self.manifest(),
            model_name,
            repo=self._trainer.hub_model_id,
            dataset_name=dataset_name,
            tags=[*([tags] if isinstance(tags, str) else tags or ()), *TAGS],
            metrics=shown,
            max_rank=max((getattr(self._configs[name], "r", 0) for name in self._adapters), default=0),
            facts=self._facts(latest, dataset_name),
            picture=self._draw_workflow(),
            seeing=[name for name in self._team.names if self._runner.prompts.for_agent(name).template.images],
        )

    def _facts(self, latest: Mapping[str, float], dataset_name: str | None) -> dict[str, str]:
        args, names = self._args, [key.split("/")[1] for key in latest if key.startswith("rewards/")]
        rates = {agent.learning_rate or args.learning_rate for agent in self._team.agents if agent.trainable}
        facts = {
            "base model": self.manifest().base_names,
            "data": _described(self._trainer.train_dataset, dataset_name),
            "reward functions": ", ".join(dict.fromkeys(names)),
            "method": ", ".join(f"{name}={getattr(args, name)!r}" for name in _OF_METHOD if getattr(args, name)),
            "optimizer steps": f"{latest['step']:.0f}" if "step" in latest else "",
            "learning rate": ", ".join(f"{rate:g}" for rate in sorted(rates)),
        }
        return {name: text for name, text in facts.items() if text}

    def copy_checkpoint(self, source: Path, target: Path) -> None:
        """Copy the files of the team to the folder that is pushed. The parent copies only those of one model."""
        # With the critic, as `save` does. The Hub does not get it: transformers uploads no name that begins with "_"
        critic = [CRITIC_NAME, *self._team.critic.parts] if self._team.critic is not None else []
        bases = [description.folder for description in self._further.values()]
        for name in dict.fromkeys([MANIFEST_NAME, *self._adapters, *bases, *critic]):
            if (source / name).is_dir():
                shutil.copytree(source / name, target / name, dirs_exist_ok=True)
            elif (source / name).exists():
                shutil.copy(source / name, target / name)


def _described(dataset: Any, dataset_name: str | None) -> str:
    # `datasets` keeps no id; the addresses of the files that were downloaded have it
    sources = getattr(getattr(dataset, "info", None), "download_checksums", None) or {}
    found = [re.match(r"hf://datasets/([^@]+)@", source) for source in sources]
    name = dataset_name or next((match[1] for match in found if match), "")
    rows = f"{len(dataset):,} rows" if hasattr(dataset, "__len__") else "a stream"
    return f"{name}, {rows}" if name else rows
