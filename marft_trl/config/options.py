# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""
How a setting is declared: default, limits, the settings it depends on, and what it is about. Of the settings of
`GRPOConfig` and `TrainingArguments`: their limits, and those without effect for a team.
"""

from __future__ import annotations

import dataclasses
import re
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from trl import GRPOConfig

from ..seams.libraries import get_logger
from ..system.hints import did_you_mean
from ..system.redaction import without_secrets


logger = get_logger(__name__)
_Value = TypeVar("_Value")


class Bound(NamedTuple):
    """A range of numbers: `holds(value)`, and its words in messages."""

    holds: Callable[[float], bool]
    words: str


AT_LEAST_0 = Bound(lambda value: value >= 0, "of at least 0")
ABOVE_0 = Bound(lambda value: value > 0, "above 0")
AT_MOST_1 = Bound(lambda value: value <= 1, "of at most 1")
SHARE = Bound(lambda value: 0 <= value <= 1, "in [0, 1]")


@dataclasses.dataclass(frozen=True)
class Rule:
    """The values that a setting may have, and what it affects."""

    bounds: tuple[Bound, ...] = ()
    integer: bool = False
    needed: bool = False  # whether a number may not be `None`
    none: str | None = None  # meaning of `None`, for messages
    choices: Iterable[str] | None = None  # known values: names, or a table by name, which may get further entries
    also: tuple[str | None, ...] = ()  # values in addition to those of a table
    # Other settings, each with the value that this setting has an effect with. Where the other setting names the entry
    # of a table, entries with `settings` say which settings they read.
    only_if: Sequence[tuple[str, str]] = ()
    about: str = "results"  # which a resumed run compares, or "evaluations", "machines", "files"

    @property
    def known(self) -> list[str | None]:
        first, last = [None] if None in self.also else [], [item for item in self.also if item is not None]
        return [*first, *(self.choices or ()), *last]


class Option(dataclasses.Field):
    """A field of a dataclass, with its rule. Its metadata is that of TRL's fields, which command lines read."""

    __slots__ = ("rule",)
    rule: Rule


def option(default: Any, *bounds: Bound, **settings: Any) -> Any:
    """Declare a setting by its default and its [`Rule`]. The docstring of its class describes it (`documented`)."""
    is_number = bool(bounds) or settings.get("integer", False)
    needed = is_number and default is not None and settings.get("none") is None
    rule = Rule(bounds, needed=needed, **settings)
    shown = {"choices": [item for item in rule.known if item is not None]} if rule.choices is not None else {}
    field = dataclasses.field(default=default, metadata=shown)
    setting = object.__new__(Option)
    for slot in dataclasses.Field.__slots__:
        setattr(setting, slot, getattr(field, slot))
    setting.rule = rule
    return setting


def documented(config: type) -> type:
    """Class decorator: the help of each setting on a command line is the first sentence of its docstring."""
    text = re.sub(r"\s+", " ", config.__doc__ or "")
    for item in dataclasses.fields(config):
        found = re.search(rf" {item.name} \([^)]*\): (.+?[.:])(?: |$)", text)
        if isinstance(item, Option) and found is not None:
            item.metadata = types.MappingProxyType({"help": found.group(1).rstrip(":"), **item.metadata})
    return config


def collect_rules(config: type, inherited: Mapping[str, Rule]) -> dict[str, Rule]:
    """The rules of a class of settings; `inherited` has those of fields that were not declared by [`option`]."""
    own: dict[str, Rule] = {}
    for base in reversed(config.__mro__):  # a subclass that gives a setting another default keeps its rule
        declared = vars(base).get("__dataclass_fields__", {}).values()
        own |= {item.name: item.rule for item in declared if isinstance(item, Option)}
    return {**inherited, **own}


def check_number(name: str, value: Any, rule: Rule) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number and (value is not None or rule.needed):
        raise ValueError(f"`{name}` must be a number, got {value!r}.")
    if value is None:
        return
    if rule.integer and not isinstance(value, int):
        raise ValueError(f"`{name}` must be an integer, got {value!r}.")
    for bound in rule.bounds:
        if not (abs(value) <= sys.float_info.max and bound.holds(value)):
            instead = f", or None for {rule.none}" if rule.none is not None else ""
            raise ValueError(f"`{name}` must be a finite number {bound.words}{instead}; got {value!r}.")


def check_choice(name: str, value: object, known: Iterable[str | None]) -> None:
    """Raise a `ValueError` if the value is not among the known ones. The message suggests the nearest one."""
    known = list(known)
    if value in known:
        return
    if None in known and str(value).lower() in ("none", ""):
        raise ValueError(f"`{name}` must be one of {', '.join(map(repr, known))}; got the string {value!r}.")
    hint = did_you_mean(value, [name for name in known if name is not None])
    raise ValueError(f"`{name}` must be one of {', '.join(map(repr, known))}; got {value!r}.{hint}")


def has_effect(args: Any, name: str, other: str, value: str, rules: Mapping[str, Rule]) -> bool:
    """Return `True` if the setting `name`, which needs the value `value` of the setting `other`, has an effect."""
    present, table = getattr(args, other), rules[other].choices
    entry = table.get(present) if isinstance(table, Mapping) else None
    return present == value if entry is None else name in entry.settings


def _each(value: _Value, *names: str) -> dict[str, _Value]:
    return dict.fromkeys(names, value)


# A setting without a line here or in `UNUSED` may be anything, and is compared by a resumed run; so is a new one
INHERITED: dict[str, Rule] = {
    **_each(
        Rule((AT_LEAST_0,)),
        *("beta", "epsilon_high", "max_grad_norm", "delta", "entropy_coef", "entropy_coef_min"),
        *("entropy_coef_max", "entropy_coef_delta", "entropy_target", "weight_decay", "router_aux_loss_coef"),
        *("off_policy_mask_threshold", "num_train_epochs"),
    ),
    **_each(
        Rule((ABOVE_0,)),
        *("temperature", "sapo_temperature_neg", "sapo_temperature_pos", "repetition_penalty", "adam_epsilon"),
    ),
    **_each(
        Rule((ABOVE_0,), integer=True),
        *("num_generations", "num_iterations", "steps_per_generation", "max_completion_length"),
        "max_tool_calling_iterations",
    ),
    "epsilon": Rule((AT_LEAST_0,), needed=True),
    "top_p": Rule((ABOVE_0, AT_MOST_1)),
    "min_p": Rule((AT_LEAST_0, AT_MOST_1)),
    "scale_rewards": Rule(choices=("group", "batch", "none")),
    "importance_sampling_level": Rule(choices=("token", "sequence")),
    "multi_objective_aggregation": Rule(choices=("sum_then_normalize", "normalize_then_sum")),
    "vllm_server_timeout": Rule((ABOVE_0,), needed=True, about="machines"),
    **_each(
        Rule(about="files"),
        *("output_dir", "overwrite_output_dir", "run_name", "project", "resume_from_checkpoint"),
        *("save_only_model", "save_strategy", "save_steps", "save_on_each_node", "save_total_limit"),
        *("push_to_hub", "hub_token", "hub_private_repo", "hub_model_id", "hub_strategy", "hub_always_push"),
        *("hub_revision", "enable_jit_checkpoint", "restore_callback_states_from_checkpoint"),
        *("logging_strategy", "logging_steps", "logging_first_step", "logging_nan_inf_filter", "log_on_each_node"),
        *("log_level", "log_level_replica", "log_completions", "log_completions_hub_repo"),
        *("log_unique_prompts", "num_completions_to_print", "report_to", "disable_tqdm"),
        *("include_num_input_tokens_seen", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"),
        *("debug", "skip_memory_metrics"),
    ),
    **_each(Rule(about="evaluations"), "per_device_eval_batch_size", "num_generations_eval", "include_for_metrics"),
    **_each(
        Rule(about="machines"),
        *("local_rank", "use_cpu", "torch_empty_cache_steps", "fsdp", "fsdp_config", "deepspeed"),
        *("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph"),
        *("ddp_backend", "ddp_timeout", "parallelism_config"),
        *("dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers"),
        *("dataloader_prefetch_factor", "dataloader_multiprocessing_context", "dataloader_in_order"),
        *("vllm_model_impl", "vllm_enable_sleep_mode", "vllm_server_host", "vllm_server_port"),
        *("vllm_gpu_memory_utilization", "vllm_max_model_length", "vllm_tensor_parallel_size"),
    ),
}


class Unused(NamedTuple):
    why: str
    # Whether it has no effect, from the arguments and whether passes share prefixes; `None`: it never has an effect
    where: Callable[[Any, bool], bool] | None = None
    when: str = "always"  # the same condition in words, for the docs
    is_said: bool = True  # whether a warning is logged; otherwise, only the docs mention the setting


UNUSED: dict[str, Unused] = {
    "data_seed": Unused("`seed` sets the order of rows."),
    "train_sampling_strategy": Unused("the episodes of a prompt stay together."),
    "length_column_name": Unused("rows are not grouped by length."),
    "average_tokens_across_devices": Unused("losses are always normalized over all processes."),
    "label_smoothing_factor": Unused("the loss of a policy has no labels."),
    "log_multimodal": Unused("logs have the sizes of images, and transcripts small copies."),
    "transformers_continuous_batching_config": Unused("continuous batching supports only one policy."),
    "ds3_gather_for_generation": Unused("DeepSpeed is not supported."),
    "vllm_group_port": Unused("servers load adapters from files."),
    "enable_jit_checkpoint": Unused("SIGTERM always saves a checkpoint after the current step."),
    "local_rank": Unused("launchers set it in the environment.", is_said=False),
    **_each(Unused("only scripts read it.", is_said=False), "do_train", "do_eval", "do_predict"),
    **_each(
        Unused("evaluations have episodes and rewards, but no predictions."),
        *("prediction_loss_only", "eval_do_concat_batches", "eval_use_gather_object", "eval_accumulation_steps"),
        *("batch_eval_metrics", "label_names"),
    ),
    "pad_to_multiple_of": Unused(
        "passes with shared prefixes have their own widths.", lambda args, shares: shares, "`share_prefixes`"
    ),
    **_each(
        Unused(
            "the server was started with separate settings.",
            lambda args, shares: args.use_vllm and args.vllm_mode == "server",
            '`vllm_mode="server"`',
        ),
        *("vllm_enable_sleep_mode", "vllm_gpu_memory_utilization", "vllm_max_model_length"),
        *("vllm_model_impl", "vllm_tensor_parallel_size"),
    ),
    **_each(
        Unused("turns are generated by transformers.", lambda args, shares: not args.use_vllm, "`use_vllm=False`"),
        *("vllm_mode", "vllm_python", "vllm_server_base_url", "vllm_server_host", "vllm_server_port"),
        *("vllm_server_timeout", "vllm_request_timeout", "vllm_max_inflight", "vllm_adapter_dir"),
        *("vllm_structured_outputs_regex", "vllm_importance_sampling_correction", "vllm_importance_sampling_mode"),
        *("vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min"),
        *("vllm_importance_sampling_cap", "fidelity_tolerance"),
    ),
}
ALWAYS_UNUSED = frozenset(name for name, it in UNUSED.items() if it.where is None)


def warn_of_unused(args: Any, shares: bool) -> None:
    """Warn of each setting that has no effect and differs from its defaults here and in TRL."""
    for name, unused in UNUSED.items():
        field = type(args).__dataclass_fields__.get(name)
        if field is None or not unused.is_said or not (unused.where is None or unused.where(args, shares)):
            continue
        of_trl = GRPOConfig.__dataclass_fields__.get(name, field)
        if getattr(args, name) not in (_default(field), _default(of_trl), None):
            say_unused(name, getattr(args, name))


def say_unused(name: str, value: Any) -> None:
    logger.warning(f"`{name}={without_secrets(value)!r}` has no effect: {UNUSED[name].why} Leave it out.")


def _default(field: dataclasses.Field) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def table() -> str:
    names: dict[tuple[str, str], list[str]] = {}
    for name, unused in UNUSED.items():
        names.setdefault((unused.when, unused.why.removesuffix(".")), []).append(f"`{name}`")
    rows = (f"| {', '.join(alike)} | {when} | {why} |" for (when, why), alike in names.items())
    return "\n".join(["| setting | has no effect | because |", "|---|---|---|", *rows])
