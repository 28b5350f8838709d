# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Settings of `GRPOConfig` that have no effect for a team: one line each where they are set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from accelerate.logging import get_logger


logger = get_logger(__name__)


class Unused(NamedTuple):
    """
    A setting without effect.

    Args:
        why (`str`): the reason, for a message.
        where (`Callable`, *optional*): `where(args, shares)` tells whether it has no effect, `shares` being whether
            passes share prefixes; always, if left out.
        when (`str`, *optional*): the same in words, for the docs.
    """

    why: str
    where: Callable[[Any, bool], bool] | None = None
    when: str = "always"


def _with_servers(args: Any, shares: bool) -> bool:
    return args.use_vllm and args.vllm_mode == "server"


_OF_SERVER = Unused("the server has been started with its own.", _with_servers, '`vllm_mode="server"`')
UNUSED: dict[str, Unused] = {
    "data_seed": Unused("rows are ordered by `seed`."),
    "train_sampling_strategy": Unused("the episodes of a prompt stay together."),
    "length_column_name": Unused("rows are not grouped by length."),
    "torch_compile": Unused("the passes of a team call the layers of the base, which are not compiled."),
    "torch_compile_backend": Unused("nothing is compiled."),
    "torch_compile_mode": Unused("nothing is compiled."),
    "log_multimodal": Unused("a team has texts alone."),
    "transformers_continuous_batching_config": Unused("continuous batching serves one policy."),
    "vllm_group_port": Unused("adapters reach servers as files."),
    "pad_to_multiple_of": Unused(
        "passes with shared prefixes have widths of their own.", lambda args, shares: shares, "`share_prefixes`"
    ),
    **dict.fromkeys(
        (
            *("vllm_enable_sleep_mode", "vllm_gpu_memory_utilization", "vllm_max_model_length"),
            *("vllm_model_impl", "vllm_tensor_parallel_size"),
        ),
        _OF_SERVER,
    ),
}


def warn_of_unused(args: Any, shares: bool) -> None:
    """One line for each setting that is not its default and has no effect."""
    for name, (why, where, _) in UNUSED.items():
        field = type(args).__dataclass_fields__.get(name)
        if (
            field is not None
            and getattr(args, name) not in (field.default, None)
            and (where is None or where(args, shares))
        ):
            logger.warning(f"`{name}={getattr(args, name)!r}` has no effect: {why} Leave it out.")


def table() -> str:
    """The table of the docs."""
    lines = ["| setting | has no effect | because |", "|---|---|---|"]
    return "\n".join(
        [*lines, *(f"| `{name}` | {it.when} | {it.why.removesuffix('.')} |" for name, it in UNUSED.items())]
    )
