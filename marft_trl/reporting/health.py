# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Warnings about runs that fail to learn without raising an error. Each is logged once and says what to change."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import TrainerCallback

from ..config.team_setup import RunContext, TeamSetup
from ..seams.libraries import get_logger


logger = get_logger(__name__)

PATIENCE = 10  # number of consecutive measurements after which most symptoms are reported
_MIN_ENTROPY = 0.01  # a policy has collapsed below this token entropy (in nats)
_MAX_ENTROPY_FRACTION = 0.9  # a policy is nearly random above this fraction of the maximum token entropy
_MAX_KL = 10.0
_MAX_CLIPPED_FRACTION = 0.9
# Largest ratio of a weight norm to its initial value, and of the mean predicted value to the mean target
_MAX_RATIO = 100.0
_MAX_VALUE_LOSS = 1e6


class Symptom(NamedTuple):
    """A sign that a run does not learn, and whether the latest measurement shows it."""

    name: str  # with that of the agent or adapter; each name is reported once
    is_present: bool
    patience: int  # measurements in a row with the symptom before it is reported
    message: str  # what is wrong, and what to change


class Health(TrainerCallback):
    """Checks metrics, which are the same on all processes, and weights after every step, and warns about symptoms."""

    def __init__(
        self,
        team: TeamSetup,
        run: RunContext,
        get_parameters: Callable[[], Mapping[str, Mapping[str, nn.Parameter]]],
        vocab_sizes: Mapping[str, int],  # of each agent's model
    ):
        self._agents, self._trained, self._policies = team.names, team.trained, team.policies
        self._max_entropies = {agent: math.log(size) for agent, size in vocab_sizes.items()}
        self._get_parameters = get_parameters
        self._args, self._metrics = run.args, run.metrics
        self._num_consecutive: dict[str, int] = {}
        self._reported: set[str] = set()
        self._norms: dict[str, float] = {}
        self._weight_samples: dict[str, torch.Tensor] = {}
        self._is_unchanged: dict[str, bool] = {}
        self._initial_norms: dict[str, float] = {}

    def state_dict(self) -> dict[str, Any]:
        norms = {"norms": dict(self._norms), "first_norms": dict(self._initial_norms)}
        return {"in_a_row": dict(self._num_consecutive), "said": sorted(self._reported), **norms}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._num_consecutive, self._reported = dict(state["in_a_row"]), set(state["said"])
        self._norms, self._initial_norms = dict(state["norms"]), dict(state["first_norms"])

    # ---- Called by the Trainer ----

    def on_train_begin(self, args, state, control, **kwargs):
        self._metrics.take_latest()
        self._report(self._check_precision())
        if not self._initial_norms:
            self._initial_norms = self._compute_norms()

    def on_optimizer_step(self, args, state, control, **kwargs):
        self._norms, before = self._compute_norms(), self._weight_samples
        self._weight_samples = {name: _sample(parameters) for name, parameters in self._get_parameters().items()}
        samples = self._weight_samples.items()
        self._is_unchanged = {name: name in before and before[name].equal(sample) for name, sample in samples}
        for name, norm in self._norms.items():
            if not math.isfinite(norm):
                raise FloatingPointError(
                    f"The weights of {self._describe(name)} are not finite after step {state.global_step + 1}. They "
                    "are not saved. Lower the learning rate, and resume from the latest checkpoint "
                    "(`train(resume_from_checkpoint=True)`)."
                )
        self._report(self._check_norms())

    def on_step_end(self, args, state, control, **kwargs):
        latest = self._metrics.take_latest()
        symptoms = [*self._check_batch(latest), *self._check_agents(latest), *self._check_critic(latest)]
        self._report([*symptoms, *self._check_updates(latest)])

    def _report(self, symptoms: Iterable[Symptom]) -> None:
        for name, is_present, patience, message in symptoms:
            self._num_consecutive[name] = self._num_consecutive.get(name, 0) + 1 if is_present else 0
            if self._num_consecutive[name] >= patience and name not in self._reported:
                self._reported.add(name)
                logger.warning(message)

    def _compute_norms(self) -> dict[str, float]:
        parameters = self._get_parameters()
        if not parameters:
            return {}
        norms = [torch.nn.utils.get_total_norm(p.detach() for p in part.values()) for part in parameters.values()]
        return dict(zip(parameters, torch.stack([norm.double().cpu() for norm in norms]).tolist(), strict=True))

    def _describe(self, adapter: str) -> str:
        agents = ", ".join(map(repr, self._policies.get_agents(adapter)))
        return f"the adapter {adapter!r} (agents {agents})" if agents else f"the critic ({adapter!r})"

    def _check_precision(self) -> Iterator[Symptom]:
        for name, parameters in self._get_parameters().items():
            for dtype in {p.dtype for p in parameters.values()} & {torch.float16, torch.bfloat16}:
                message = (
                    f"The weights of {self._describe(name)} are {dtype}, so updates below this precision are lost. "
                    "Keep trained adapters in float32 unless memory is short."
                )
                is_lora = name not in self._policies.trained or self._policies.is_lora(name)
                yield Symptom(f"precision/{name}", is_lora, 1, message)

    def _check_norms(self) -> Iterator[Symptom]:
        for name, norm in self._norms.items():
            initial = self._initial_norms.get(name, norm)
            rate = "learning_rate" if name in self._policies.trained else "critic_learning_rate"
            message = (
                f"THE WEIGHTS OF {self._describe(name)} HAVE GROWN {norm / max(initial, 1e-12):.0f}-FOLD (norm "
                f"{norm:.3g}, initially {initial:.3g}). `{rate}={getattr(self._args, rate):g}` is probably far too "
                "high."
            )
            yield Symptom(f"grown/{name}", norm > _MAX_RATIO * max(initial, 1.0), 1, message)

    def _check_updates(self, latest: Mapping[str, float]) -> Iterator[Symptom]:
        for name, is_unchanged in self._is_unchanged.items():
            is_policy = name in self._policies.trained
            prefixes = [f"agents/{agent}" for agent in self._policies.get_agents(name)] if is_policy else ["critic"]
            if not any(f"{prefix}/grad_norm" in latest for prefix in prefixes):
                continue  # other agents were updated in this step
            rate = "learning_rate" if is_policy else "critic_learning_rate"
            message = (
                f"THE WEIGHTS OF {self._describe(name)} HAVE NOT CHANGED in the last {PATIENCE} optimizer steps that "
                f"train them. Check `grad_norm`: if it is 0, all advantages are 0; otherwise `{rate}` is 0 or too "
                "small for the precision of the weights."
            )
            yield Symptom(f"still/{name}", is_unchanged, PATIENCE, message)

    def _check_batch(self, latest: Mapping[str, float]) -> Iterator[Symptom]:
        if "frac_reward_zero_std" in latest:
            yield Symptom(
                "no signal",
                latest["frac_reward_zero_std"] == 1.0,
                PATIENCE,
                f"THE REWARDS GIVE NO SIGNAL: in {PATIENCE} generation batches in a row, all episodes of a prompt got "
                "the same reward, so all advantages are 0. Check the reward functions (constant?), the prompts (too "
                "hard or too easy?), and `temperature` and `num_generations` (do the episodes differ?).",
            )

    def _check_agents(self, latest: Mapping[str, float]) -> Iterator[Symptom]:
        for agent in self._agents:
            prefix = f"agents/{agent}/"
            metrics = {name.removeprefix(prefix): value for name, value in latest.items() if name.startswith(prefix)}
            yield from self._check_turns(agent, metrics)
            if agent in self._trained:
                yield from self._check_policy(agent, metrics)

    def _check_turns(self, agent: str, metrics: Mapping[str, float]) -> Iterator[Symptom]:
        if "turns" in metrics:
            is_first = f"silent/{agent}" not in self._num_consecutive
            first_message = (
                f"Agent {agent!r} had no turn in the first generation batch. If the workflow should always call it, "
                f"check `episode.turn({agent!r})` in the workflow, or for an application the model of its requests."
            )
            message = (
                f"THE AGENT {agent!r} HAS NO TURNS: it had none in {PATIENCE} generation batches in a row. Check "
                f"`episode.turn({agent!r})` in the workflow and the prompt of the agent that chooses the next "
                "speaker, or remove the agent."
            )
            yield Symptom(f"unasked/{agent}", is_first and metrics["turns"] == 0, 1, first_message)
            yield Symptom(f"silent/{agent}", metrics["turns"] == 0, PATIENCE, message)
        if "completions/clipped_ratio" in metrics:
            masked = ""
            if self._args.mask_truncated_completions:
                masked = " Truncated turns are masked (`mask_truncated_completions`), so the agent learns nothing."
            message = (
                f"EVERY TURN OF {agent!r} IS TRUNCATED, in {PATIENCE} generation batches in a row.{masked} Set a "
                "larger `max_completion_length`, for all agents or in its `AgentSpec`, or ask for shorter turns in "
                "its prompt."
            )
            # Turns of one token, such as moves in a game, have no room for an end
            is_present = metrics["completions/clipped_ratio"] == 1.0 and metrics["completions/mean_length"] > 1
            yield Symptom(f"truncated/{agent}", is_present, PATIENCE, message)

    def _check_policy(self, agent: str, metrics: Mapping[str, float]) -> Iterator[Symptom]:
        if "entropy" in metrics:
            entropy, max_entropy = metrics["entropy"], self._max_entropies[agent]
            collapsed = (
                f"THE POLICY OF {agent!r} HAS COLLAPSED: the token entropy is {entropy:.2g}, so its episodes hardly "
                "differ. Lower its learning rate, or set `entropy_coef`, `beta` or a higher `temperature`."
            )
            random = (
                f"THE POLICY OF {agent!r} IS NEARLY RANDOM: the token entropy is {entropy:.2f}, and the maximum is "
                f"{max_entropy:.2f}. Lower its learning rate or `entropy_coef`, or set `beta`."
            )
            is_random = entropy > _MAX_ENTROPY_FRACTION * max_entropy
            yield Symptom(f"collapsed/{agent}", entropy < _MIN_ENTROPY, PATIENCE, collapsed)
            yield Symptom(f"noise/{agent}", is_random, PATIENCE, random)
        if "kl" in metrics:
            message = (
                f"THE POLICY OF {agent!r} IS FAR FROM ITS REFERENCE: the KL is {metrics['kl']:.3g} per token. Lower "
                "its learning rate, or set a larger `beta`."
            )
            yield Symptom(f"kl/{agent}", not metrics["kl"] <= _MAX_KL, 3, message)
        if "clip_ratio/region_mean" in metrics:
            message = (
                f"ALMOST ALL TOKENS OF {agent!r} ARE CLIPPED, in {PATIENCE} optimizer steps in a row: the policy "
                "moves too far from the policy that sampled the turns. Lower its learning rate or `num_iterations`."
            )
            is_present = metrics["clip_ratio/region_mean"] > _MAX_CLIPPED_FRACTION
            yield Symptom(f"clipped/{agent}", is_present, PATIENCE, message)

    def _check_critic(self, latest: Mapping[str, float]) -> Iterator[Symptom]:
        if "critic/value_loss" not in latest:
            return
        loss, value = latest["critic/value_loss"], abs(latest.get("critic/value_mean", 0.0))
        target = abs(latest.get("critic/target_mean", 0.0))
        message = (
            f"THE VALUES OF THE CRITIC HAVE EXPLODED: the value loss is {loss:.3g}, the mean value {value:.3g} and "
            f"the mean target {target:.3g}. Lower `critic_learning_rate`, or scale the rewards down."
        )
        is_present = not loss <= _MAX_VALUE_LOSS or not value <= _MAX_RATIO * max(target, 1.0)  # also if NaN
        yield Symptom("values", is_present, 3, message)


def _sample(parameters: Mapping[str, nn.Parameter], tensors: int = 16, elements: int = 64) -> torch.Tensor:
    """Return a few elements of a few tensors, enough to see whether an optimizer step has changed the weights."""
    chosen = list(parameters.values())
    chosen = chosen[:: max(len(chosen) // tensors, 1)]
    parts = [p.detach().reshape(-1)[:elements].float() for p in chosen]
    return torch.cat([part.to(parts[0].device) for part in parts]) if parts else torch.zeros(0)
