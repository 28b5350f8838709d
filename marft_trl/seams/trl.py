# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Access to internals of `GRPOTrainer`: constructor, state, settings, prompts, rewards, loss and loss types."""

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
from peft import PeftModel
from torch import nn
from trl import GRPOTrainer
from trl.trainer import grpo_trainer
from trl.trainer.utils import add_fused_lm_head, disable_dropout_in_model, get_callable_name

from .libraries import get_logger
from .swapping import swapped


logger = get_logger(__name__)

CLIP_METRICS = tuple(f"clip_ratio/{name}" for name in ("low_mean", "high_mean", "region_mean", "low_min", "high_max"))


@dataclass(frozen=True)
class LossType:
    """Properties of a loss type of TRL."""

    is_row_mean: bool = False  # over the rows of a micro-batch; otherwise, the loss is divided by a number of tokens
    supports_actions: bool = False  # with weights in the loss that do not depend on lengths (but for `luspo`)
    needs_same_advantage: bool = False  # for all tokens of a turn
    metrics: tuple[str, ...] = ()  # that the loss logs


LOSSES = {
    "grpo": LossType(is_row_mean=True, supports_actions=True, metrics=CLIP_METRICS),
    "dr_grpo": LossType(is_row_mean=True, metrics=CLIP_METRICS),
    "dapo": LossType(metrics=CLIP_METRICS),
    "bnpo": LossType(metrics=CLIP_METRICS),
    "cispo": LossType(metrics=("cispo_clip_ratio",)),
    "sapo": LossType(is_row_mean=True, supports_actions=True),
    "luspo": LossType(is_row_mean=True, supports_actions=True, metrics=CLIP_METRICS),
    "vespo": LossType(needs_same_advantage=True, metrics=("vespo/phi_seq_mean",)),
}


@contextlib.contextmanager
def _without_messages(text: str | None) -> Iterator[None]:
    """Drop log messages of `GRPOTrainer` that contain a text; none if `text` is `None`."""
    trl_logger = logging.getLogger("trl.trainer.grpo_trainer")

    def keep(record: logging.LogRecord) -> bool:
        return text is None or text not in record.getMessage()

    trl_logger.addFilter(keep)
    try:
        yield
    finally:
        trl_logger.removeFilter(keep)


@contextlib.contextmanager
def accepting_one_generation(config: Any) -> Iterator[None]:
    """Let `GRPOConfig.__post_init__` (TRL 1.16) accept `num_generations=1`; what this skips is only about vLLM."""
    try:
        yield
    except ValueError as error:
        if config.num_generations != 1 or "at least 2 generations" not in str(error):
            raise


@contextlib.contextmanager
def constructing_grpo_trainer(
    args: Any,
    model: Any,
    is_model_name: bool,  # the user passed the name of a model
    ratio: str | None = None,  # `importance_sampling_level`, which the constructor checks; `None`: of the arguments
    reward_weights: list[float] | None = None,  # of all reward functions; `None`: those of the arguments
) -> Iterator[None]:
    """
    Change arguments for `GRPOTrainer.__init__` (TRL 1.16). A reference model that TRL loads goes to the device of the
    process. The arguments are restored, because the user may create another trainer from them. So are the adapters of
    a quantized base, which TRL rounds to bfloat16: there, updates at the rates of LoRAs are lost.
    """
    is_quantized = getattr(model, "is_quantized", False)
    has_adapters = isinstance(model, PeftModel)
    adapters = [(param, param.data) for param in model.parameters() if is_quantized and param.requires_grad]
    kwargs, is_placed = copy.copy(args.model_init_kwargs), False  # a copy, because TRL changes it for reward models
    if args.beta != 0.0 and not has_adapters and args.world_size == 1 and args.device.type not in ("cpu", "mps"):
        # TRL would distribute the reference model over all devices
        kwargs, is_placed = {"device_map": {"": args.device}, **(kwargs or {})}, True
    overrides = {"importance_sampling_level": ratio or args.importance_sampling_level, "model_init_kwargs": kwargs}
    overrides["use_vllm"] = False  # TRL would create a vLLM with a single policy
    if has_adapters:  # TRL requires an adapter named `default` for its reference, and cannot sync it (trl#4723)
        overrides |= {"beta": 0.0, "sync_ref_model": False}
    if reward_weights is not None:
        overrides["reward_weights"] = reward_weights
    # The model was loaded with `model_init_kwargs`
    warning = "`model_init_kwargs` to the `GRPOConfig`" if is_model_name or is_placed else None
    try:
        with swapped(args, overrides), _without_messages(warning):
            yield
    finally:
        for parameter, data in adapters:
            parameter.data = data.to(parameter.device)


def configure_grpo_trainer(trainer: GRPOTrainer, beta: float, ratio: str | None) -> None:
    """Correct settings that `GRPOTrainer.__init__` (TRL 1.16) derives differently. `beta` weights the KL."""
    trainer.beta = beta
    if ratio is not None:
        trainer.importance_sampling_level = ratio
    # TRL stops generation at these tokens, but does not recognize them as the end when it removes padding
    end_ids = (trainer.args.generation_kwargs or {}).get("eos_token_id")
    end_ids = [end_ids] if isinstance(end_ids, int) else end_ids or []
    trainer.eos_token_ids = list(dict.fromkeys([*trainer.eos_token_ids, *end_ids]))
    if not trainer.use_vllm:
        trainer.generation_kwargs["eos_token_id"] = trainer.eos_token_ids


def prepare_further_model(trainer: GRPOTrainer, model: Any, tokenizer: Any) -> None:
    """
    Prepare a model that TRL does not know as `GRPOTrainer.__init__` (TRL 1.16) and `Trainer` prepare their own:
    padding, checkpointing, dropout, TRL's LM head, and the device, unless the model is on another accelerator. All
    processes get the trained weights of the first.
    """
    args, is_peft = trainer.args, isinstance(model, PeftModel)
    base = model.get_base_model() if is_peft else model
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    if args.disable_dropout:
        disable_dropout_in_model(model)
    add_fused_lm_head(base, temperature=trainer.temperature, outputs=("log_probs", "entropy"))
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=args.gradient_checkpointing_kwargs)
        if is_peft:
            model.enable_input_require_grads()
    if model.device.type == "cpu" and not getattr(base, "is_quantized", False):
        model.to(trainer.accelerator.device)
    if trainer.accelerator.num_processes > 1:
        for parameter in model.parameters():
            if parameter.requires_grad:
                torch.distributed.broadcast(parameter.data, 0)


class TrlState:
    """State in private attributes of `GRPOTrainer` (TRL 1.16). It stays there, because methods of TRL use it."""

    def __init__(self, trainer: GRPOTrainer):
        self._trainer = trainer

    @property
    def is_training(self) -> bool:
        """`True` if the model is in training mode, which is how TRL distinguishes training from evaluation."""
        return self._trainer.model.training

    @property
    def micro_step(self) -> int:
        """Number of calls to `training_step` so far."""
        return self._trainer._step

    @micro_step.setter
    def micro_step(self, step: int) -> None:
        self._trainer._step = step

    @property
    def optimizer_step(self) -> int:
        return self._trainer.state.global_step

    @property
    def best_checkpoint(self) -> str | None:
        return self._trainer.state.best_model_checkpoint

    @property
    def accumulation_steps(self) -> int:
        """Number of micro-steps in the current optimizer step; 1 in evaluation."""
        return self._trainer.current_gradient_accumulation_steps if self.is_training else 1

    @property
    def is_update(self) -> bool:
        """`True` in the last micro-step of an optimizer step."""
        return self._trainer.accelerator.sync_gradients

    @property
    def slices(self) -> list | None:
        """Slices of the current generation batch; `None` before the first one."""
        return self._trainer._buffered_inputs

    @slices.setter
    def slices(self, slices: list | None) -> None:
        self._trainer._buffered_inputs = slices

    @property
    def num_tokens_seen(self) -> int:
        """Number of prompt and generated tokens so far, over all processes."""
        return self._trainer.state.num_input_tokens_seen

    def count_tokens(self, count: int) -> None:
        self._trainer.state.num_input_tokens_seen += count

    @property
    def metrics(self) -> dict[str, dict[str, list[float]]]:
        """Values since the last log, by mode (`"train"` or `"eval"`) and metric."""
        return self._trainer._metrics

    @property
    def has_entropy_bonus(self) -> bool:
        return self._trainer._entropy_bonus_enabled

    @property
    def entropy_coef(self) -> float:
        return self._trainer.entropy_coef

    @property
    def entropy(self) -> tuple[float, float]:
        """Coefficient and entropy, as set by [`set_entropy`]."""
        return self._trainer.entropy_coef, self._trainer._last_world_entropy

    def set_entropy(self, coefficient: float, entropy: float) -> None:
        """Set the coefficient and the entropy that TRL saves in its checkpoints and logs."""
        self._trainer.entropy_coef, self._trainer._last_world_entropy = coefficient, entropy

    def capture_log_window(self) -> dict[str, Any]:
        """Metrics and losses since the last log, JSON-serializable, which transformers (5.23) and TRL do not save."""
        trainer, metrics = self._trainer, self.metrics.items()
        return {
            "metrics": {mode: {name: list(value) for name, value in names.items()} for mode, names in metrics},
            "loss": trainer._tr_loss.item() if hasattr(trainer, "_tr_loss") else 0.0,
            "total_loss": getattr(trainer, "_total_loss_scalar", 0.0),
            "last_logged": getattr(trainer, "_globalstep_last_logged", 0),
        }

    def restore_log_window(self, window: Mapping[str, Any]) -> None:
        """Restore the log window, in `on_train_begin` or later: the `Trainer` resets the losses before."""
        trainer = self._trainer
        for mode, names in window["metrics"].items():
            self.metrics[mode].clear()
            self.metrics[mode].update({name: list(value) for name, value in names.items()})
        trainer._tr_loss = torch.full_like(trainer._tr_loss, window["loss"])
        trainer._total_loss_scalar, trainer._globalstep_last_logged = window["total_loss"], window["last_logged"]

    def take_user_metrics(self) -> dict[str, list[float]]:
        """Return the values that reward functions passed to `log_metric`, and clear them."""
        values_by_name = {name: list(values) for name, values in self._trainer._pending_metrics.items()}
        self._trainer._pending_metrics.clear()
        return values_by_name

    def take_user_columns(self) -> dict[str, list]:
        """Return the values that reward functions passed to `log_extra`, and clear them."""
        columns = {name: list(values) for name, values in self._trainer._pending_extra_logs.items()}
        self._trainer._pending_extra_logs.clear()
        return columns

    def set_user_columns(self, columns: Mapping[str, list]) -> None:
        self._trainer._pending_extra_logs.clear()
        self._trainer._pending_extra_logs.update(columns)

    def fill_table(self, prompts, completions, advantages, rewards: Mapping, extra: Mapping) -> None:
        """Set the table of `GRPOTrainer.log`, a value per turn in each column; TRL's deques have a fixed length."""
        self._trainer._logs = {
            "images": deque(),
            "prompt": deque(prompts),
            "completion": deque(completions),
            "rewards": defaultdict(deque, {name: deque(column) for name, column in rewards.items()}),
            "advantages": deque(advantages),
            "extra": defaultdict(deque, {name: deque(column) for name, column in extra.items()}),
        }


class TrlSettings:
    """Settings that `GRPOTrainer.__init__` (TRL 1.16) copies to the trainer, where callbacks may change them."""

    beta: float
    loss_type: str
    aux_loss_enabled: bool  # the router loss of a mixture of experts
    top_entropy_quantile: float  # fraction of tokens to train on, those with the highest entropy
    scale_rewards: str  # `"group"`, `"batch"` or `"none"`
    multi_objective_aggregation: str
    mask_truncated_completions: bool
    log_completions: bool
    num_completions_to_print: int | None  # transcripts per log; `None` for the default

    def __init__(self, trainer: GRPOTrainer):
        self._trainer = trainer

    def __getattr__(self, name: str) -> Any:
        if name not in type(self).__annotations__:
            raise AttributeError(name)
        return getattr(self._trainer, name)

    def group_size(self, training: bool) -> int:
        return self._trainer.num_generations if training else self._trainer.num_generations_eval

    def override_eval_group_size(self, num_samples: int | None) -> contextlib.AbstractContextManager[None]:
        """Set the number of episodes per prompt in evaluations, unless it is `None`, within the context."""
        return swapped(self._trainer, {"num_generations_eval": num_samples or self._trainer.num_generations_eval})


def logging_completions(trainer: GRPOTrainer, has_new: bool) -> contextlib.AbstractContextManager[None]:
    """
    `GRPOTrainer.log` (TRL 1.16) prints no table of completions, since transcripts are printed, and writes the file of
    the step only with new turns. The log at the end of training would write it again, without those of an evaluation.
    """
    return swapped(trainer, {"num_completions_to_print": 0, "log_completions": trainer.log_completions and has_new})


class TrlPrompts:
    """Tokenizes prompts with `GRPOTrainer._tokenize_prompts` (TRL 1.16) and the tools of the agent."""

    def __init__(self, trainer: GRPOTrainer):
        self._trainer = trainer
        self.tokenizer = trainer._tokenizer

    def tokenize(self, prompts: list, functions: Sequence[Callable] = ()) -> list[list[int]]:
        with swapped(self._trainer, {"tools": list(functions)}):
            return self._trainer._tokenize_prompts(prompts)[0]


class TrlRewards:
    """Computes rewards with `GRPOTrainer._calculate_rewards` (TRL 1.16), and gathers them over processes."""

    def __init__(self, trainer: GRPOTrainer):
        self._trainer = trainer

    @property
    def functions(self) -> list:
        return self._trainer.reward_funcs

    @property
    def names(self) -> list[str]:
        return self._trainer.reward_func_names

    @property
    def weights(self) -> torch.Tensor:
        """Weights of the reward functions, `(F,)`."""
        return self._trainer.reward_weights

    def __call__(self, rows, prompts, completions, completion_ids) -> torch.Tensor:
        """Return the rewards `(E, F)` of the completions of all processes, NaN where a function returned `None`."""
        with _without_messages("All reward functions returned None"):  # they quote rows; `frac_unscored` counts them
            return self._trainer._calculate_rewards(rows, prompts, completions, completion_ids)

    def without_gathering(self) -> contextlib.AbstractContextManager[None]:
        """Keep rewards on their process. If a function failed on one process, the others would hang in a gather."""
        return swapped(grpo_trainer, {"gather": lambda tensor: tensor})

    @contextlib.contextmanager
    def locally(self, functions: Sequence[Callable] | None = None) -> Iterator[None]:
        """
        Compute rewards `(N, F)` of `functions`, by default the trainer's, without gathering them: processes score
        different numbers of turns and re-runs. Values that functions log belong to no episode, and are dropped.
        """
        overrides: dict[str, Any] = {name: defaultdict(list) for name in ("_pending_metrics", "_pending_extra_logs")}
        if functions is not None:
            overrides["reward_funcs"] = list(functions)
            overrides["reward_func_names"] = [get_callable_name(function) for function in functions]
            overrides["reward_processing_classes"] = [None] * len(functions)
        with self.without_gathering(), swapped(self._trainer, overrides):
            yield


class LocalAccelerator:
    """
    Accelerator whose collectives return the tensors of this process: TRL gathers metrics inside the loss, of which
    processes run different numbers for different agents. [`StepMetrics`] joins the metrics afterwards.
    """

    def __init__(self, accelerator):
        self._accelerator = accelerator

    def __getattr__(self, name):
        return getattr(self._accelerator, name)

    def gather(self, tensor, **kwargs):
        return tensor.reshape(1) if tensor.ndim == 0 else tensor

    def reduce(self, tensor, **kwargs):
        return tensor

    gather_for_metrics, pad_across_processes = gather, reduce


# Key of the sampling policy's log-probabilities in the inputs of TRL's loss. Without it, the ratio is 1
OLD_LOGPS = "old_per_token_logps"
# Key of the importance weights of tokens that another policy has sampled
SAMPLING_WEIGHTS = "importance_sampling_ratio"


class TrlLoss:
    """
    Computes the loss of a micro-batch with `GRPOTrainer._compute_loss` (TRL 1.16), which reads settings and adds
    metrics in attributes of the trainer, which are replaced for each call. It calls
    `_get_per_token_logps_and_entropies` before it reads `inputs["old_per_token_logps"]`, so this function may still
    change the inputs. The action level relies on it.
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
        """Loss and metrics of the tensors of [`collate`]. `entropy_mask` replaces TRL's `get_high_entropy_mask`."""
        trainer = self._trainer
        metrics: dict[str, dict[str, list[float]]] = {"train": defaultdict(list), "eval": defaultdict(list)}
        overrides: dict[str, Any] = {
            "accelerator": LocalAccelerator(trainer.accelerator),
            "_metrics": metrics,
            "entropy_coef": entropy_coef,
            "use_adaptive_entropy": False,  # each adapter has its own controller
            "max_completion_length": max_completion_length,
            "get_high_entropy_mask": entropy_mask or trainer.get_high_entropy_mask,
            "use_vllm": SAMPLING_WEIGHTS in inputs,  # multiplies the loss by these weights
            "vllm_importance_sampling_correction": True,
        }
        with swapped(trainer, overrides):
            loss = trainer._compute_loss(model, inputs)
        return loss, metrics["train" if trainer.model.training else "eval"]


def trl_log_probs(trainer: GRPOTrainer) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None, Any]]:
    """TRL's own log-probabilities and entropies `(B, T)` and auxiliary loss (1.16), which the trainer overrides."""
    return functools.partial(GRPOTrainer._get_per_token_logps_and_entropies, trainer)
