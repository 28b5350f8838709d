# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""
Every place where TRL, PEFT, transformers or bitsandbytes is bent, and every private name of TRL that is used outside
of an override. Each entry says which version it was checked against, what upstream does, and why it is bent. The tests
that guard the entries are in `tests/test_seams.py`, under the name of the entry.

Nothing of this package is imported here, so that every module may use it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import types
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import convert_to_fp32
from torch import nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOTrainer
from trl.trainer import grpo_trainer
from trl.trainer.utils import RepeatSampler, add_fused_lm_head, get_callable_name


logger = get_logger(__name__)


@contextlib.contextmanager
def swapped(owner: Any, attributes: Mapping[str, Any]) -> Iterator[None]:
    """Context manager: an object has other attributes. Those that its class had before are its class's again after."""
    own = {name: owner.__dict__[name] for name in attributes if name in owner.__dict__}
    owner.__dict__.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del owner.__dict__[name]
        owner.__dict__.update(own)


# ---- TRL: the constructor ----


@contextlib.contextmanager
def without_reference(args: Any, if_: bool) -> Iterator[None]:
    """
    Context manager: `args.beta` is 0 and `args.sync_ref_model` is off if the condition holds.

    `GRPOTrainer.__init__` (TRL 1.16) keeps a reference of an adapter named `default`, fails without one, and refuses
    to move it. The references of agents are the starts of their own adapters.
    """
    beta, sync = args.beta, args.sync_ref_model
    if if_:
        args.beta, args.sync_ref_model = 0.0, False
    try:
        yield
    finally:
        args.beta, args.sync_ref_model = beta, sync


@contextlib.contextmanager
def without_false_warning(model_was_named: bool) -> Iterator[None]:
    """
    Context manager: `GRPOTrainer.__init__` (TRL 1.16) does not warn that `model_init_kwargs` are ignored. It is given
    a loaded model, but the arguments were used for loading it.
    """
    parents = logging.getLogger("trl.trainer.grpo_trainer")

    def keep(record: logging.LogRecord) -> bool:
        return not (model_was_named and "`model_init_kwargs` to the `GRPOConfig`" in record.getMessage())

    parents.addFilter(keep)
    try:
        yield
    finally:
        parents.removeFilter(keep)


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


def configure_parent(trainer: GRPOTrainer, beta: float, ratio: str | None) -> None:
    """
    Settings that `GRPOTrainer.__init__` (TRL 1.16) derives otherwise from the training arguments.

    Args:
        trainer ([`~trl.GRPOTrainer`]): its constructor has run, in [`without_reference`].
        beta (`float`): coefficient of the KL to the references.
        ratio (`str`, *optional*): unit of the policy ratio; `None` for that of the training arguments.
    """
    trainer.beta = beta
    if ratio is not None:
        trainer.importance_sampling_level = ratio
    if trainer.args.ddp_broadcast_buffers is None:
        trainer.args.ddp_broadcast_buffers = False  # a collective in forward, which processes run unequally often


# ---- TRL: the state of a run ----


class TrlState:
    """
    The state that `GRPOTrainer` (TRL 1.16) keeps in private attributes, under public names. It stays the trainer's,
    because methods of TRL read and write it.

    Args:
        trainer ([`~trl.GRPOTrainer`]): the trainer.
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
    def accumulation_steps(self) -> int:
        """Number of micro-steps of the present optimizer step; 1 in evaluation."""
        return self._trainer.current_gradient_accumulation_steps if self.is_training else 1

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

    def see_tokens(self, count: int) -> None:
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

    def note_entropy(self, coefficient: float, entropy: float) -> None:
        """Set the coefficient and the entropy that TRL writes into its checkpoints and logs."""
        self._trainer.entropy_coef, self._trainer._last_world_entropy = coefficient, entropy

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

    def fill_table(self, prompts, completions, advantages, rewards: Mapping, extra: Mapping) -> None:
        """
        Set the rows of the completions table that `GRPOTrainer.log` writes. TRL's own deques hold a fixed number of
        completions; a team has as many turns as its workflow asks for.

        Args:
            prompts, completions, advantages (`Sequence`): one value per turn.
            rewards, extra (`Mapping[str, Sequence]`): columns, one value per turn.
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

    Args:
        trainer ([`~trl.GRPOTrainer`]): the trainer.

    Attributes:
        beta (`float`): coefficient of the KL to the references.
        loss_type (`str`): loss type.
        aux_loss_enabled (`bool`): whether the routers of a mixture of experts have a loss of their own.
        top_entropy_quantile (`float`): share of the tokens that is trained, those of the highest entropy.
        scale_rewards (`str`): deviation that advantages are divided by: `"group"`, `"batch"` or `"none"`.
        multi_objective_aggregation (`str`): order of summing and normalizing reward functions.
        mask_truncated_completions (`bool`): whether truncated turns are left out of the loss.
        log_completions (`bool`): whether completions are logged.
        num_completions_to_print (`int`, *optional*): number of transcripts at a log; `None` for the default.
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


@contextlib.contextmanager
def without_printed_table(trainer: GRPOTrainer) -> Iterator[None]:
    """
    Context manager: `GRPOTrainer.log` (TRL 1.16) prints no sample of completions. Its table of columns is not readable
    with several agents; transcripts are printed in its place.
    """
    with swapped(trainer, {"num_completions_to_print": 0}):
        yield


class EpochSampler(RepeatSampler):
    """
    TRL's `RepeatSampler` (1.16) with an order that depends on the epoch alone, so that a resumed run finds the order
    of its epoch. Upstream draws on from the generator of the run before. An uninterrupted run gets the same order.
    """

    @classmethod
    def of(cls, sampler: RepeatSampler, phases: int) -> EpochSampler:
        """The sampler in place of TRL's; every generation batch is repeated for so many phases."""
        return cls(
            sampler.data_source,
            mini_repeat_count=sampler.mini_repeat_count,
            batch_size=sampler.batch_size,
            repeat_count=sampler.repeat_count * phases,
            shuffle=sampler.shuffle,
            seed=sampler.seed,
        )

    def set_epoch(self, epoch: int) -> None:
        """Set the random state for `epoch`, counted from 0. accelerate calls this method before each epoch."""
        if self.shuffle:
            self.generator.manual_seed(self.seed)
            for _ in range(epoch):
                torch.randperm(self.num_samples, generator=self.generator)


def checkpoint_folder(trainer: GRPOTrainer, trial: Any) -> Path:
    """
    The folder that `Trainer._save_checkpoint` (transformers 5.23) is about to write. It has no public name; with a
    hyperparameter search it lies in the folder of the trial.
    """
    return Path(trainer._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"


# ---- TRL: prompts and generation ----


class TrlPrompts:
    """
    Tokenization of prompts by `GRPOTrainer._tokenize_prompts` (TRL 1.16), which renders the functions in
    `trainer.tools`. Each agent has its own functions, so they are set for the time of a call.

    Args:
        trainer ([`~trl.GRPOTrainer`]): does the tokenization.
    """

    def __init__(self, trainer: GRPOTrainer):
        self._trainer = trainer
        self.tokenizer = trainer._tokenizer

    def tokenize(self, prompts: list, functions: Sequence[Callable] = ()) -> list[list[int]]:
        """Token ids of prompts for an agent that may call these functions."""
        with swapped(self._trainer, {"tools": list(functions)}):
            return self._trainer._tokenize_prompts(prompts)[0]


class TrlEngine:
    """
    Generation by `GRPOTrainer._generate_single_turn` (TRL 1.16), which reads the settings of `generate` from
    attributes of the trainer and takes no further arguments of `generate`. The settings and arguments of an agent are
    put there for the time of a call.

    Args:
        trainer ([`~trl.GRPOTrainer`]): does the generation.
        general (`Mapping[str, Any]`): settings of `generate` for an agent that sets none itself.
    """

    def __init__(self, trainer: GRPOTrainer, general: Mapping[str, Any]):
        self._trainer, self._general = trainer, dict(general)
        self.tokenizer = trainer._tokenizer

    @property
    def model(self) -> Any:
        """The model without wrappers of data parallelism."""
        return self._trainer.accelerator.unwrap_model(self._trainer.model_wrapped)

    def settings(self, sampling: Any) -> dict[str, Any]:
        """
        Settings of `generate` for the [`Sampling`] of an agent. As in TRL, `generation_kwargs` win over the settings
        of the trainer; an agent's own settings win over both.
        """
        explicit = set(self._trainer.args.generation_kwargs or {})
        own = sampling.as_generation_kwargs()
        own = {key: value for key, value in own.items() if key not in explicit or value != self._general[key]}
        return {**self._trainer.generation_kwargs, **own}

    def generate(
        self, prompt_ids: list[list[int]], settings: Mapping[str, Any], options: Mapping[str, Any]
    ) -> list[list[int]]:
        """Sample a completion for each prompt, up to and including its end-of-sequence token."""
        trainer = self._trainer
        config, kwargs = trainer.generation_config, trainer.generation_kwargs
        trainer.generation_kwargs = dict(settings)
        trainer.generation_config = GenerationConfig(**settings, disable_compile=True)
        try:
            with _generating_with(self.model, options):
                return trainer._generate_single_turn(prompt_ids, None, {}, 1)[0]
        finally:
            trainer.generation_config, trainer.generation_kwargs = config, kwargs


@contextlib.contextmanager
def _generating_with(model: Any, options: Mapping[str, Any]) -> Iterator[None]:
    """Context manager: `model.generate` gets further arguments."""
    own = model.__dict__.get("generate")  # the instance may already have a patched `generate`
    model.generate = functools.partial(model.generate, **options)
    try:
        yield
    finally:
        if own is None:
            del model.generate
        else:
            model.generate = own


# ---- TRL: rewards ----


class TrlRewards:
    """
    Reward functions, run by `GRPOTrainer._calculate_rewards` (TRL 1.16), which scores one generation batch with the
    functions of the trainer and gathers the result over processes.

    Args:
        trainer ([`~trl.GRPOTrainer`]): has the functions.
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
        return self._trainer._calculate_rewards(rows, prompts, completions, completion_ids)

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


class TrlLoss:
    """
    The loss of a micro-batch by `GRPOTrainer._compute_loss` (TRL 1.16), as if its rows were all there is: the rows of
    one agent on one process. TRL reads the agent's settings from attributes of the trainer, gathers metrics over
    processes inside the loss and adds them to those of the trainer; for the time of a call these attributes are the
    micro-batch's own.

    The loss asks `_get_per_token_logps_and_entropies` for log-probabilities first and reads
    `inputs["old_per_token_logps"]` after that, so the answer may still change them: action level relies on it.

    Args:
        trainer ([`~trl.GRPOTrainer`]): computes the loss.
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
            model (`nn.Module`): whose active adapter is the agent's.
            inputs (`dict[str, torch.Tensor]`): tensors of the rows, see [`collate`].
            entropy_coef (`float`): coefficient of the entropy bonus.
            max_completion_length (`int`): of the agent, in tokens.
            entropy_mask (`Callable`, *optional*): in place of TRL's choice of the tokens of high entropy.

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


class ScoringTemperature:
    """
    Switches the temperature of TRL's fused LM head (1.16), which is built into the forward pass of a model for one
    temperature. Agents have their own.

    Args:
        models (`Iterable[PreTrainedModel]`):
            Models with TRL's head at `default`: the base and, without adapters, the reference.
        temperatures (`Iterable[float]`):
            Temperatures of all agents.
        default (`float`):
            Temperature of the trainer.
        head (`dict`):
            Further arguments of TRL's `add_fused_lm_head`.
    """

    def __init__(self, models: Iterable[PreTrainedModel], temperatures: Iterable[float], default: float, head: dict):
        self._current = default
        if set(temperatures) == {default}:
            return
        for model in models:
            self._install(model, {*temperatures, default}, default, head)

    def switch_to(self, temperature: float) -> None:
        """Score at this temperature from now on."""
        self._current = temperature

    def _install(self, model: PreTrainedModel, temperatures: set[float], default: float, head: dict) -> None:
        forwards = {default: model.forward}
        for temperature in temperatures - {default}:
            add_fused_lm_head(model, temperature=temperature, **head)
            forwards[temperature] = model.forward
            model.forward = forwards[default]

        # Keep the original signature: `generate` validates its model kwargs against it
        @functools.wraps(type(model).forward)
        def forward(_, *args, **kwargs):
            return forwards[self._current](*args, **kwargs)

        model.forward = types.MethodType(forward, model)


def fused_head(model: PreTrainedModel, hidden: torch.Tensor, tokens: torch.Tensor) -> Any:
    """
    Output of TRL's fused LM head (1.16) for known hidden states. The head runs the backbone itself, so for the time of
    a call the backbone returns the states that were computed before.

    Args:
        model ([`~transformers.PreTrainedModel`]): causal language model with TRL's head.
        hidden (`torch.Tensor` of shape `(N, H)`): hidden states that predict the tokens.
        tokens (`torch.Tensor` of shape `(N,)`): token ids.
    """
    backbone = model.base_model
    known = BaseModelOutputWithPast(last_hidden_state=hidden.unsqueeze(0))
    with swapped(backbone, {"forward": lambda *args, **kwargs: known}):
        return model(shift_labels=tokens.unsqueeze(0), fused_lm_head=True)


# ---- transformers ----


@contextlib.contextmanager
def checkpointing_with_caches(backbone: nn.Module) -> Iterator[None]:
    """
    Context manager: checkpointed layers keep the cache that they are given. transformers (5.23) takes it from them,
    because a cache that grows would grow again when a layer is run again in the backward pass. [`KeptLayer`] does not.
    """
    with contextlib.ExitStack() as stack:
        for module in backbone.modules():
            if getattr(module, "gradient_checkpointing", False):
                is_layer = isinstance(module, GradientCheckpointingLayer)
                # Whole models would not hand the cache on
                bent = {"_can_checkpoint_with_cache": True} if is_layer else {"gradient_checkpointing": False}
                stack.enter_context(swapped(module, bent))
        yield


@contextlib.contextmanager
def generation_defaults(model: Any, settings: Mapping[str, Any]) -> Iterator[None]:
    """
    Context manager: the model's own generation config has these settings too. `generate` (transformers 5.23) takes
    values from it where a setting equals the default of transformers (transformers#42762).
    """
    own = model.generation_config
    before = {name: getattr(own, name) for name in settings if hasattr(own, name)}
    own.update(**{name: settings[name] for name in before})
    try:
        yield
    finally:
        own.update(**before)


@contextlib.contextmanager
def forward_in_precision(model: Any, dtype: torch.dtype | None) -> Iterator[None]:
    """
    Context manager: forward passes of the whole model are cast, as `Accelerator.prepare_model` (1.15) casts them in
    training. `None` for no change.
    """
    if dtype is None:
        yield
        return
    forward = model.forward
    cast = torch.autocast(model.device.type, dtype=dtype)(forward)

    @functools.wraps(forward)  # `generate` reads the signature
    def casting(*args: Any, **kwargs: Any) -> Any:
        return convert_to_fp32(cast(*args, **kwargs))

    with swapped(model, {"forward": casting}):
        yield


def pad_token_of(config: GenerationConfig) -> torch.Tensor | None:
    """The padding token as a tensor on the device, which `generate` (transformers 5.23) leaves in a private field."""
    return config._pad_token_tensor


def commit_of(config: Any) -> str | None:
    """The commit of the Hub that a config (transformers 5.23) was loaded from; `None` for a local one."""
    return getattr(config, "_commit_hash", None)


# ---- PEFT and bitsandbytes ----


@contextlib.contextmanager
def without_adapter_name_warning() -> Iterator[None]:
    """
    Context manager: silence the warning of PEFT (0.21) about adapter names that are part of "lora_", such as "a".
    Adapters with such names are saved and loaded correctly. Names that do fail are refused by [`add_adapters`].
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Adapter name .* should not be contained in the prefix")
        yield


def keep_4bit_weights(model: nn.Module) -> None:
    """
    Keep the 4-bit layers of a model on the CPU as they were loaded.

    On a CPU with AVX512-BF16, bitsandbytes (0.50) repacks the weights of a `Linear4bit` at its first forward pass in
    evaluation mode without gradients. From then on the layer computes in bfloat16, whatever its compute dtype, also
    back in training mode. A trainer would then score otherwise than the model it was given, and otherwise than on a
    machine without these instructions. The layer's own switch turns this off.

    Args:
        model (`nn.Module`): the base; may carry adapters. Layers that are not on the CPU are left alone.
    """
    if not getattr(model, "is_loaded_in_4bit", False):
        return
    from bitsandbytes.nn import Linear4bit

    layers = [module for module in model.modules() if isinstance(module, Linear4bit)]
    on_cpu = [layer for layer in layers if layer.weight.device.type == "cpu"]
    for layer in on_cpu:
        layer.support_avx512bf16_for_cpu = False
    if any(getattr(layer.weight.quant_state, "packing_format_for_cpu", False) for layer in on_cpu):
        logger.warning(
            "The 4-bit model was used in evaluation mode before, so bitsandbytes repacked its weights for bfloat16 "
            "and it no longer computes as it was loaded. Load it again to keep its compute dtype."
        )
