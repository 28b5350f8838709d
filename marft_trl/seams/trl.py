# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Seams of `GRPOTrainer`: its constructor, state, settings, prompts, engine, rewards, loss and loss types."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from trl import GRPOTrainer
from trl.trainer import grpo_trainer
from trl.trainer.utils import get_callable_name

from .libraries import get_logger
from .swapping import swapped


logger = get_logger(__name__)

_OF_CLIPPING = tuple(f"clip_ratio/{name}" for name in ("low_mean", "high_mean", "region_mean", "low_min", "high_max"))


@dataclass(frozen=True)
class LossType:
    """
    A loss type.

    Args:
        by_rows: whether the loss of a micro-batch is a mean over rows; else it is divided by a number of tokens.
        fits_actions: whether a turn may be a single action, which does not weigh more with more tokens. `luspo` weighs
            by length on purpose.
        one_advantage: whether all tokens of a turn need the same advantage.
    """

    by_rows: bool = False
    fits_actions: bool = False
    one_advantage: bool = False
    metrics: tuple[str, ...] = ()


LOSSES = {
    "grpo": LossType(by_rows=True, fits_actions=True, metrics=_OF_CLIPPING),
    "dr_grpo": LossType(by_rows=True, metrics=_OF_CLIPPING),
    "dapo": LossType(metrics=_OF_CLIPPING),
    "bnpo": LossType(metrics=_OF_CLIPPING),
    "cispo": LossType(metrics=("cispo_clip_ratio",)),
    "sapo": LossType(by_rows=True, fits_actions=True),
    "luspo": LossType(by_rows=True, fits_actions=True, metrics=_OF_CLIPPING),
    "vespo": LossType(one_advantage=True, metrics=("vespo/phi_seq_mean",)),
}


# ---- TRL: the constructor ----


@contextlib.contextmanager
def without_vllm(args: Any) -> Iterator[None]:
    """
    Context manager: `args.use_vllm` is off. `GRPOTrainer.__init__` (TRL 1.16) would import vLLM, and connect it to a
    generator that serves one policy, merged into the base.
    """
    with swapped(args, {"use_vllm": False}):
        yield


@contextlib.contextmanager
def without_reference(args: Any, if_: bool) -> Iterator[None]:
    """
    Context manager: `args.beta` is 0 and `args.sync_ref_model` is off if the condition holds.

    `GRPOTrainer.__init__` (TRL 1.16) keeps a reference of an adapter named `default`, fails without one, and refuses
    to move it (trl#4723). The references of agents are the starts of their own adapters.
    """
    beta, sync = args.beta, args.sync_ref_model
    if if_:
        args.beta, args.sync_ref_model = 0.0, False
    try:
        yield
    finally:
        args.beta, args.sync_ref_model = beta, sync


@contextlib.contextmanager
def _without_records(text: str | None) -> Iterator[None]:
    """Context manager: `GRPOTrainer` logs nothing that has this text."""
    parents = logging.getLogger("trl.trainer.grpo_trainer")

    def keep(record: logging.LogRecord) -> bool:
        return text is None or text not in record.getMessage()

    parents.addFilter(keep)
    try:
        yield
    finally:
        parents.removeFilter(keep)


def without_false_warning(model_was_named: bool) -> contextlib.AbstractContextManager[None]:
    """
    Context manager: `GRPOTrainer.__init__` (TRL 1.16) does not warn that `model_init_kwargs` are ignored. It is given
    a loaded model, but the arguments were used for loading it.
    """
    return _without_records("`model_init_kwargs` to the `GRPOConfig`" if model_was_named else None)


def without_unscored_rows_in_the_log() -> contextlib.AbstractContextManager[None]:
    """
    Context manager: `GRPOTrainer._calculate_rewards` (TRL 1.16) does not write a whole row into the log whenever no
    function has scored it: logs are read by others than datasets. `frac_unscored` has their share.
    """
    return _without_records("All reward functions returned None")


@contextlib.contextmanager
def accepting_one_generation(config: Any) -> Iterator[None]:
    """
    Context manager: `GRPOConfig.__post_init__` (TRL 1.16) accepts `num_generations=1`, which is enough with a critic.
    The checks that it would make after this one concern vLLM alone.
    """
    try:
        yield
    except ValueError as error:
        if config.num_generations != 1 or "at least 2 generations" not in str(error):
            raise


@contextlib.contextmanager
def constructing_parent(
    args: Any,
    has_adapters: bool,
    model_was_named: bool,
    ratio: str | None = None,
    reward_weights: list[float] | None = None,
) -> Iterator[None]:
    """
    Context manager around `GRPOTrainer.__init__` (TRL 1.16): [`without_reference`], [`without_vllm`] and
    [`without_false_warning`]. A reference that TRL loads goes to the device of the process. What the constructor says
    of `importance_sampling_level` is about the ratio that will be used. The arguments are the user's, who may make a
    second trainer from them, so they are unchanged afterwards.

    Args:
        reward_weights: of all reward functions; `None` for that of the training arguments.
    """
    kwargs, is_placed = copy.copy(args.model_init_kwargs), False  # a copy, since TRL completes it for reward models
    if args.beta != 0.0 and not has_adapters and args.world_size == 1 and args.device.type not in ("cpu", "mps"):
        # Of the reference, which TRL would spread over all devices
        kwargs, is_placed = {"device_map": {"": args.device}, **(kwargs or {})}, True
    bent = {
        "importance_sampling_level": ratio or args.importance_sampling_level,
        "model_init_kwargs": kwargs,
    }
    if reward_weights is not None:
        bent["reward_weights"] = reward_weights
    quiet = without_false_warning(model_was_named or is_placed)
    with without_reference(args, if_=has_adapters), without_vllm(args), swapped(args, bent), quiet:
        yield


def configure_parent(trainer: GRPOTrainer, beta: float, ratio: str | None) -> None:
    """
    Settings that `GRPOTrainer.__init__` (TRL 1.16) derives otherwise from the training arguments.

    Args:
        trainer: its constructor has run, in [`without_reference`].
        beta: coefficient of the KL to the references.
    """
    trainer.beta = beta
    if ratio is not None:
        trainer.importance_sampling_level = ratio
    # Upstream generates until one of these tokens, but does not take them for the end when it cuts padding off
    end_ids = (trainer.args.generation_kwargs or {}).get("eos_token_id")
    ends = [*trainer.eos_token_ids, *([end_ids] if isinstance(end_ids, int) else end_ids or [])]
    trainer.eos_token_ids = list(dict.fromkeys(ends))
    if not trainer.use_vllm:
        trainer.generation_kwargs["eos_token_id"] = trainer.eos_token_ids


# ---- TRL: the state of a run ----


class TrlState:
    """
    The state that `GRPOTrainer` (TRL 1.16) keeps in private attributes, under public names. It stays the trainer's,
    because methods of TRL read and write it.
    """

    def __init__(self, trainer: GRPOTrainer):
        self._trainer = trainer

    @property
    def is_training(self) -> bool:
        """`True` if the model is in training mode, by which TRL tells training from evaluation."""
        return self._trainer.model.training

    @property
    def micro_step(self) -> int:
        """Number of calls of `training_step` so far."""
        return self._trainer._step

    @micro_step.setter
    def micro_step(self, step: int) -> None:
        self._trainer._step = step

    @property
    def optimizer_step(self) -> int:
        """Number of optimizer steps so far."""
        return self._trainer.state.global_step

    @property
    def best_checkpoint(self) -> str | None:
        """The checkpoint with the best metric."""
        return self._trainer.state.best_model_checkpoint

    @property
    def accumulation_steps(self) -> int:
        """Number of micro-steps of the present optimizer step; 1 in evaluation."""
        return self._trainer.current_gradient_accumulation_steps if self.is_training else 1

    @property
    def is_update(self) -> bool:
        """`True` in the last micro-step of an optimizer step."""
        return self._trainer.accelerator.sync_gradients

    @property
    def slices(self) -> list | None:
        """Training data of the present generation batch; `None` before the first one."""
        return self._trainer._buffered_inputs

    @slices.setter
    def slices(self, slices: list | None) -> None:
        self._trainer._buffered_inputs = slices

    @property
    def num_tokens_seen(self) -> int:
        """Number of tokens that were generated and read so far, over all processes."""
        return self._trainer.state.num_input_tokens_seen

    def count_tokens(self, count: int) -> None:
        """Add to [`num_tokens_seen`]."""
        self._trainer.state.num_input_tokens_seen += count

    @property
    def metrics(self) -> dict[str, dict[str, list[float]]]:
        """Values since the last log, by mode (`"train"` or `"eval"`) and metric."""
        return self._trainer._metrics

    @property
    def has_entropy_bonus(self) -> bool:
        """`True` if the loss has an entropy bonus."""
        return self._trainer._entropy_bonus_enabled

    @property
    def entropy_coef(self) -> float:
        """Coefficient of the entropy bonus that TRL logs."""
        return self._trainer.entropy_coef

    @property
    def entropy(self) -> tuple[float, float]:
        """What [`note_entropy`] sets."""
        return self._trainer.entropy_coef, self._trainer._last_world_entropy

    def note_entropy(self, coefficient: float, entropy: float) -> None:
        """Set the coefficient and the entropy that TRL writes into its checkpoints and logs."""
        self._trainer.entropy_coef, self._trainer._last_world_entropy = coefficient, entropy

    def window(self) -> dict[str, Any]:
        """
        What was measured since the last log; JSON-serializable. transformers (5.23) and TRL start with an empty window
        after a resume, so the first log of a resumed run would lack the steps before it.
        """
        trainer = self._trainer
        return {
            "metrics": {
                mode: {name: list(value) for name, value in names.items()} for mode, names in self.metrics.items()
            },
            "loss": trainer._tr_loss.item() if hasattr(trainer, "_tr_loss") else 0.0,
            "total_loss": getattr(trainer, "_total_loss_scalar", 0.0),
            "last_logged": getattr(trainer, "_globalstep_last_logged", 0),
        }

    def open_window(self, window: Mapping[str, Any]) -> None:
        """Go on from a [`window`]. `Trainer` resets its part before `on_train_begin`, so call it then or later."""
        trainer = self._trainer
        for mode, names in window["metrics"].items():
            self.metrics[mode].clear()
            self.metrics[mode].update({name: list(value) for name, value in names.items()})
        trainer._tr_loss = torch.full_like(trainer._tr_loss, window["loss"])
        trainer._total_loss_scalar, trainer._globalstep_last_logged = window["total_loss"], window["last_logged"]

    def take_user_metrics(self) -> dict[str, list[float]]:
        """Take the values that reward functions passed to `log_metric`."""
        taken = {name: list(values) for name, values in self._trainer._pending_metrics.items()}
        self._trainer._pending_metrics.clear()
        return taken

    def take_user_columns(self) -> dict[str, list]:
        """Take the values that reward functions passed to `log_extra`."""
        taken = {name: list(values) for name, values in self._trainer._pending_extra_logs.items()}
        self._trainer._pending_extra_logs.clear()
        return taken

    def set_user_columns(self, columns: Mapping[str, list]) -> None:
        """Set the values that [`~TrlState.take_user_columns`] takes next."""
        self._trainer._pending_extra_logs.clear()
        self._trainer._pending_extra_logs.update(columns)

    def fill_table(self, prompts, completions, advantages, rewards: Mapping, extra: Mapping) -> None:
        """
        Set the rows of the completions table that `GRPOTrainer.log` writes. TRL's own deques hold a fixed number of
        completions; a team has as many turns as its workflow asks for.

        Args:
            prompts, completions, advantages: one value per turn.
            rewards, extra: columns, one value per turn.
        """
        self._trainer._logs = {
            "images": deque(),
            "prompt": deque(prompts),
            "completion": deque(completions),
            "rewards": defaultdict(deque, {name: deque(column) for name, column in rewards.items()}),
            "advantages": deque(advantages),
            "extra": defaultdict(deque, {name: deque(column) for name, column in extra.items()}),
        }


class TrlSettings:
    """
    Settings that `GRPOTrainer` (TRL 1.16) copies from the training arguments in its constructor and reads from itself
    afterwards, so that a callback may change them.

    Attributes:
        beta: coefficient of the KL to the references.
        loss_type: loss type.
        aux_loss_enabled: whether the routers of a mixture of experts have a loss of their own.
        top_entropy_quantile: share of the tokens that is trained, those of the highest entropy.
        scale_rewards: deviation that advantages are divided by: `"group"`, `"batch"` or `"none"`.
        multi_objective_aggregation: order of summing and normalizing reward functions.
        mask_truncated_completions: whether truncated turns are left out of the loss.
        log_completions: whether completions are logged.
        num_completions_to_print: number of transcripts at a log; `None` for the default.
    """

    beta: float
    loss_type: str
    aux_loss_enabled: bool
    top_entropy_quantile: float
    scale_rewards: str
    multi_objective_aggregation: str
    mask_truncated_completions: bool
    log_completions: bool
    num_completions_to_print: int | None

    def __init__(self, trainer: GRPOTrainer):
        self._trainer = trainer

    def __getattr__(self, name: str) -> Any:
        if name not in type(self).__annotations__:
            raise AttributeError(name)
        return getattr(self._trainer, name)

    def group_size(self, training: bool) -> int:
        """Episodes of a prompt, in training or in evaluation."""
        return self._trainer.num_generations if training else self._trainer.num_generations_eval

    def override_evaluation(self, num_samples: int | None) -> contextlib.AbstractContextManager[None]:
        """Context manager: evaluations have so many episodes of a prompt; as many as before if `None`."""
        number = num_samples or self._trainer.num_generations_eval
        return swapped(self._trainer, {"num_generations_eval": number})


@contextlib.contextmanager
def without_printed_table(trainer: GRPOTrainer) -> Iterator[None]:
    """
    Context manager: `GRPOTrainer.log` (TRL 1.16) prints no sample of completions. Its table of columns is not readable
    with several agents; transcripts are printed in its place.
    """
    with swapped(trainer, {"num_completions_to_print": 0}):
        yield


# ---- TRL: prompts and generation ----


class TrlPrompts:
    """
    Tokenization of prompts by `GRPOTrainer._tokenize_prompts` (TRL 1.16), which renders the functions in
    `trainer.tools`. Each agent has its own functions, so they are set for the time of a call.

    Args:
        trainer: does the tokenization.
    """

    def __init__(self, trainer: GRPOTrainer):
        self._trainer = trainer
        self.tokenizer = trainer._tokenizer

    def tokenize(self, prompts: list, functions: Sequence[Callable] = ()) -> list[list[int]]:
        """Token ids of prompts for an agent that may call these functions."""
        with swapped(self._trainer, {"tools": list(functions)}):
            return self._trainer._tokenize_prompts(prompts)[0]


# ---- TRL: rewards ----


class TrlRewards:
    """
    Reward functions, run by `GRPOTrainer._calculate_rewards` (TRL 1.16), which scores one generation batch with the
    functions of the trainer and gathers the result over processes.
    """

    def __init__(self, trainer: GRPOTrainer):
        self._trainer = trainer

    @property
    def functions(self) -> list:
        """Reward functions and reward models of the team."""
        return self._trainer.reward_funcs

    @property
    def names(self) -> list[str]:
        """Their names."""
        return self._trainer.reward_func_names

    @property
    def weights(self) -> torch.Tensor:
        """Their weights, `(F,)`."""
        return self._trainer.reward_weights

    def __call__(self, rows, prompts, completions, completion_ids) -> torch.Tensor:
        """Rewards `(E, F)` of the completions of all processes; NaN where a function does not apply."""
        with without_unscored_rows_in_the_log():
            return self._trainer._calculate_rewards(rows, prompts, completions, completion_ids)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """
        Context manager: rewards are those of this process. TRL gathers them as soon as it has them, so a function that
        fails on one process would leave the others waiting.
        """
        with swapped(grpo_trainer, {"gather": lambda tensor: tensor}):
            yield

    @contextlib.contextmanager
    def locally(self, functions: Sequence[Callable] | None = None) -> Iterator[None]:
        """
        Context manager: rewards are those of this process `(N, F)`, by other functions if some are given. Processes
        score different numbers of turns and re-runs, so a collective would wait forever. What functions log is left
        out, because it does not belong to an episode of the batch.
        """
        trainer = self._trainer
        metrics, extra = trainer._pending_metrics, trainer._pending_extra_logs
        inner: dict[str, Any] = {
            "_pending_metrics": type(metrics)(list),
            "_pending_extra_logs": type(extra)(list),
        }
        if functions is not None:
            inner["reward_funcs"] = list(functions)
            inner["reward_func_names"] = [get_callable_name(function) for function in functions]
            inner["reward_processing_classes"] = [None] * len(functions)
        with swapped(grpo_trainer, {"gather": lambda tensor: tensor}), swapped(trainer, inner):
            yield


# ---- TRL: log-probabilities and the loss ----


class LocalAccelerator:
    """
    The accelerator as one process alone sees it: what TRL gathers inside the loss stays local.

    Processes run different numbers of micro-batches, so a collective inside one would wait forever or mix rows of
    different agents. [`StepMetrics`] joins the metrics afterwards.
    """

    def __init__(self, accelerator):
        self._accelerator = accelerator

    def __getattr__(self, name):
        return getattr(self._accelerator, name)

    def gather(self, tensor):
        return tensor.reshape(1) if tensor.ndim == 0 else tensor

    def gather_for_metrics(self, tensor, **kwargs):
        return self.gather(tensor)

    def reduce(self, tensor, **kwargs):
        return tensor

    def pad_across_processes(self, tensor, **kwargs):
        return tensor


# The key under which TRL's loss reads the log-probabilities of the policy that sampled; without it, the ratio is 1
OLD_LOGPS = "old_per_token_logps"
# The key under which it reads the weights that tokens have in the loss, where another policy has sampled them
SAMPLING_WEIGHTS = "importance_sampling_ratio"


class TrlLoss:
    """
    The loss of a micro-batch by `GRPOTrainer._compute_loss` (TRL 1.16), as if its rows were all there is: the rows of
    one agent on one process. TRL reads the agent's settings from attributes of the trainer, gathers metrics over
    processes inside the loss and adds them to those of the trainer; for the time of a call these attributes are the
    micro-batch's own.

    The loss asks `_get_per_token_logps_and_entropies` for log-probabilities first and reads
    `inputs["old_per_token_logps"]` after that, so the answer may still change them: action level relies on it.
    """

    def __init__(self, trainer: GRPOTrainer):
        self._trainer = trainer

    def __call__(
        self,
        model: nn.Module,
        inputs: dict[str, torch.Tensor],
        entropy_coef: float,
        max_completion_length: int,
        entropy_mask: Callable[..., torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, dict[str, list[float]]]:
        """
        Args:
            model: whose active adapter is the agent's.
            inputs: tensors of the rows, see [`collate`].
            max_completion_length: of the agent, in tokens.
            entropy_mask: instead of TRL's choice of the tokens of high entropy.

        Returns: the loss, and the metrics of the micro-batch.
        """
        trainer = self._trainer
        metrics: dict[str, dict[str, list[float]]] = {"train": defaultdict(list), "eval": defaultdict(list)}
        inner: dict[str, Any] = {
            "accelerator": LocalAccelerator(trainer.accelerator),
            "_metrics": metrics,
            "entropy_coef": entropy_coef,
            "use_adaptive_entropy": False,  # each adapter has a controller of its own
            "max_completion_length": max_completion_length,
            "get_high_entropy_mask": entropy_mask or trainer.get_high_entropy_mask,
            "use_vllm": SAMPLING_WEIGHTS in inputs,  # whether the loss is to be multiplied by these weights
            "vllm_importance_sampling_correction": True,
        }
        with swapped(trainer, inner):
            loss = trainer._compute_loss(model, inputs)
        return loss, metrics["train" if trainer.model.training else "eval"]


def trl_log_probs(trainer: GRPOTrainer) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None, Any]]:
    """
    `GRPOTrainer._get_per_token_logps_and_entropies` (TRL 1.16) of a trainer that overrides it: log-probabilities and
    entropies `(B, T)`, and the auxiliary loss.
    """
    return functools.partial(GRPOTrainer._get_per_token_logps_and_entropies, trainer)
