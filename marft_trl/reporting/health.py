# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Warnings about runs that learn nothing, without an error. Each names the agent and the setting, once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import TrainerCallback

from ..config.team_setup import RunContext, TeamSetup
from ..seams.libraries import get_logger


logger = get_logger(__name__)

# Measurements in a row after which a lasting symptom is reported
PATIENCE = 10
# Entropy per token below which a policy has collapsed; share of its maximum above which it is noise. In nats
_LOWEST_ENTROPY, _NOISE = 0.01, 0.9
_LARGEST_KL = 10.0
_LARGEST_CLIPPED_SHARE = 0.9
# How many times larger than at first the norm of weights, or than its targets the mean of values, can be
_GROWTH = 100.0
_LARGEST_VALUE_LOSS = 1e6


class Symptom(NamedTuple):
    """
    What a measurement says about a run.

    Args:
        name: what it is about, and whom; each is reported once.
        patience: measurements in a row after which it is reported.
        message: what is wrong, and what to change.
    """

    name: str
    is_present: bool
    patience: int
    message: str


class Health(TrainerCallback):
    """
    Watches the metrics of every optimizer step. All processes have the same ones.

    Args:
        parameters: `parameters()` gives the trained parameters of each adapter and part of the critic.
        vocabulary: number of tokens that can be drawn.
    """

    def __init__(
        self,
        team: TeamSetup,
        run: RunContext,
        parameters: Callable[[], Mapping[str, Mapping[str, nn.Parameter]]],
        vocabulary: int,
    ):
        self._agents, self._trained, self._policies = team.names, team.trained, team.policies
        self._vocabulary, self._args, self._metrics, self._parameters = vocabulary, run.args, run.metrics, parameters
        self._in_a_row: dict[str, int] = {}
        self._reported: set[str] = set()
        self._norms: dict[str, float] = {}
        self._samples: dict[str, torch.Tensor] = {}
        self._still: dict[str, bool] = {}
        self._first_norms: dict[str, float] = {}

    def state_dict(self) -> dict[str, Any]:
        """State for a resumed run; JSON-serializable."""
        norms = {"norms": dict(self._norms), "first_norms": dict(self._first_norms)}
        return {"in_a_row": dict(self._in_a_row), "said": sorted(self._reported), **norms}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a [`state_dict`]."""
        self._in_a_row, self._reported = dict(state["in_a_row"]), set(state["said"])
        self._norms, self._first_norms = dict(state["norms"]), dict(state["first_norms"])

    # ---- Called by the Trainer ----

    def on_train_begin(self, args, state, control, **kwargs):
        self._metrics.take_latest()
        self._look(self._check_precision())
        if not self._first_norms:
            self._first_norms = self._measure()

    def on_optimizer_step(self, args, state, control, **kwargs):
        self._norms, before = self._measure(), self._samples
        self._samples = {name: _sample(parameter) for name, parameter in self._parameters().items()}
        self._still = {name: name in before and before[name].equal(sample) for name, sample in self._samples.items()}
        for name, norm in self._norms.items():
            if not math.isfinite(norm):
                raise FloatingPointError(
                    f"The weights of {self._whose(name)} are not finite after step {state.global_step + 1}. They are "
                    "not saved. Lower the learning rate, and resume from the latest checkpoint "
                    "(`train(resume_from_checkpoint=True)`)."
                )
        self._look(self._check_weights())

    def on_step_end(self, args, state, control, **kwargs):
        latest = self._metrics.take_latest()
        symptoms = [*self._check_batch(latest), *self._check_agents(latest), *self._check_critic(latest)]
        self._look([*symptoms, *self._check_updates(latest)])

    # ---- Symptoms ----

    def _look(self, symptoms: Sequence[Symptom]) -> None:
        for name, is_present, patience, message in symptoms:
            self._in_a_row[name] = self._in_a_row.get(name, 0) + 1 if is_present else 0
            if self._in_a_row[name] >= patience and name not in self._reported:
                self._reported.add(name)
                logger.warning(message)

    def _measure(self) -> dict[str, float]:
        """Norms of the weights, by adapter and part of the critic, on the CPU with one transfer."""
        parameters = self._parameters()
        if not parameters:
            return {}
        norms = [
            torch.nn.utils.get_total_norm(p.detach() for p in parameter.values()) for parameter in parameters.values()
        ]
        return dict(zip(parameters, torch.stack([norm.double().cpu() for norm in norms]).tolist(), strict=True))

    def _whose(self, adapter: str) -> str:
        agents = ", ".join(map(repr, self._policies.get_agents(adapter)))
        return f"the adapter {adapter!r} (agents {agents})" if agents else f"the critic ({adapter!r})"

    def _check_precision(self) -> list[Symptom]:
        halves = {
            name: dtype
            for name, parameter in self._parameters().items()
            for dtype in {p.dtype for p in parameter.values()} & {torch.float16, torch.bfloat16}
        }
        return [
            Symptom(
                f"precision/{name}",
                self._policies.has_adapters,
                1,
                f"The weights of {self._whose(name)} are {dtype}, so updates below this precision are lost. "
                "Keep trained adapters in float32 unless memory is short.",
            )
            for name, dtype in halves.items()
        ]

    def _check_weights(self) -> list[Symptom]:
        symptoms = []
        for name, norm in self._norms.items():
            whose, first = self._whose(name), self._first_norms.get(name, norm)
            rate = "learning_rate" if name in self._policies.trained else "critic_learning_rate"
            grown = norm > _GROWTH * max(first, 1.0)
            symptoms += [
                Symptom(
                    f"grown/{name}",
                    grown,
                    1,
                    f"THE WEIGHTS OF {whose} HAVE GROWN {norm / max(first, 1e-12):.0f}-FOLD (norm {norm:.3g}, at "
                    f"first {first:.3g}). `{rate}={getattr(self._args, rate):g}` is probably far too high.",
                ),
            ]
        return symptoms

    def _check_updates(self, latest: Mapping[str, float]) -> list[Symptom]:
        """Check that weights change in steps in which they have a gradient."""
        found = []
        for name, is_still in self._still.items():
            is_policy = name in self._policies.trained
            names = [f"agents/{agent}" for agent in self._policies.get_agents(name)] if is_policy else ["critic"]
            if not any(f"{item}/grad_norm" in latest for item in names):
                continue  # other agents were updated in this step
            rate = "learning_rate" if is_policy else "critic_learning_rate"
            message = (
                f"THE WEIGHTS OF {self._whose(name)} HAVE NOT CHANGED in the last {PATIENCE} optimizer steps that "
                f"train them. Check `grad_norm`: if it is 0, all advantages are 0; otherwise `{rate}` is 0 or too "
                "small for the precision of the weights."
            )
            found.append(Symptom(f"still/{name}", is_still, PATIENCE, message))
        return found

    def _check_batch(self, latest: Mapping[str, float]) -> list[Symptom]:
        if "frac_reward_zero_std" not in latest:
            return []
        return [
            Symptom(
                "no signal",
                latest["frac_reward_zero_std"] == 1.0,
                PATIENCE,
                f"THE REWARDS GIVE NO SIGNAL: in {PATIENCE} generation batches in a row, all episodes of a prompt got "
                "the same reward, so all advantages are 0. Check the reward functions (constant?), the prompts (too "
                "hard or too easy?), and `temperature` and `num_generations` (do the episodes differ?).",
            )
        ]

    def _check_agents(self, latest: Mapping[str, float]) -> list[Symptom]:
        found = []
        for agent in self._agents:
            prefix = f"agents/{agent}/"
            metrics = {name.removeprefix(prefix): value for name, value in latest.items() if name.startswith(prefix)}
            found += self._check_turns(agent, metrics)
            if agent in self._trained:
                found += self._check_policy(agent, metrics)
        return found

    def _check_turns(self, agent: str, metrics: Mapping[str, float]) -> list[Symptom]:
        symptoms = []
        if "turns" in metrics:
            is_first = f"silent/{agent}" not in self._in_a_row
            first = (
                f"Agent {agent!r} had no turn in the first generation batch. If the workflow should always call it, "
                f"check `episode.turn({agent!r})` in the workflow."
            )
            message = (
                f"THE AGENT {agent!r} HAS NO TURNS: it had none in {PATIENCE} generation batches in a row. Check "
                f"`episode.turn({agent!r})` in the workflow and the prompt of the agent that chooses the next "
                "speaker, or remove the agent."
            )
            symptoms.append(Symptom(f"unasked/{agent}", is_first and metrics["turns"] == 0, 1, first))
            symptoms.append(Symptom(f"silent/{agent}", metrics["turns"] == 0, PATIENCE, message))
        if "completions/clipped_ratio" in metrics:
            masked = " Truncated turns are masked (`mask_truncated_completions`), so the agent learns nothing."
            message = (
                f"EVERY TURN OF {agent!r} IS TRUNCATED, in {PATIENCE} generation batches in a row."
                f"{masked if self._args.mask_truncated_completions else ''} Set a larger `max_completion_length`, for "
                "all agents or in its `AgentSpec`, or ask for shorter turns in its prompt."
            )
            is_present = metrics["completions/clipped_ratio"] == 1.0
            symptoms.append(Symptom(f"truncated/{agent}", is_present, PATIENCE, message))
        return symptoms

    def _check_policy(self, agent: str, metrics: Mapping[str, float]) -> list[Symptom]:
        symptoms = []
        if "entropy" in metrics:
            entropy, most = metrics["entropy"], _NOISE * math.log(self._vocabulary)
            low = (
                f"THE POLICY OF {agent!r} HAS COLLAPSED: the token entropy is {entropy:.2g}, so its episodes hardly "
                "differ. Lower its learning rate, or set `entropy_coef`, `beta` or a higher `temperature`."
            )
            high = (
                f"THE POLICY OF {agent!r} IS NEARLY RANDOM: the token entropy is {entropy:.2f}, and the maximum is "
                f"{math.log(self._vocabulary):.2f}. Lower its learning rate or `entropy_coef`, or set `beta`."
            )
            symptoms += [
                Symptom(f"collapsed/{agent}", entropy < _LOWEST_ENTROPY, PATIENCE, low),
                Symptom(f"noise/{agent}", entropy > most, PATIENCE, high),
            ]
        if "kl" in metrics:
            message = (
                f"THE POLICY OF {agent!r} IS FAR FROM ITS REFERENCE: the KL is {metrics['kl']:.3g} per token. Lower "
                "its learning rate, or set a larger `beta`."
            )
            symptoms.append(Symptom(f"kl/{agent}", not metrics["kl"] <= _LARGEST_KL, 3, message))
        if "clip_ratio/region_mean" in metrics:
            message = (
                f"ALMOST ALL TOKENS OF {agent!r} ARE CLIPPED, in {PATIENCE} optimizer steps in a row: the policy "
                "moves too far from the one that sampled the turns. Lower its learning rate or `num_iterations`."
            )
            is_present = metrics["clip_ratio/region_mean"] > _LARGEST_CLIPPED_SHARE
            symptoms.append(Symptom(f"clipped/{agent}", is_present, PATIENCE, message))
        return symptoms

    def _check_critic(self, latest: Mapping[str, float]) -> list[Symptom]:
        if "critic/value_loss" not in latest:
            return []
        loss, value = latest["critic/value_loss"], abs(latest.get("critic/value_mean", 0.0))
        target = abs(latest.get("critic/target_mean", 0.0))
        message = (
            f"THE VALUES OF THE CRITIC HAVE EXPLODED: the value loss is {loss:.3g}, the mean value {value:.3g} and "
            f"the mean target {target:.3g}. Lower `critic_learning_rate`, or scale the rewards down."
        )
        exploded = not loss <= _LARGEST_VALUE_LOSS or not value <= _GROWTH * max(target, 1.0)
        return [Symptom("values", exploded, 3, message)]


def _sample(parameters: Mapping[str, nn.Parameter], tensors: int = 16, elements: int = 64) -> torch.Tensor:
    """Some elements of some of the tensors: those of a policy that learns move in every step."""
    chosen = list(parameters.values())
    chosen = chosen[:: max(len(chosen) // tensors, 1)]
    parts = [p.detach().reshape(-1)[:elements].float() for p in chosen]
    return torch.cat([part.to(parts[0].device) for part in parts]) if parts else torch.zeros(0)
