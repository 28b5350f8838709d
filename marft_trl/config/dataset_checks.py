# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Checks of datasets and prompts, before the first generation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from datasets import Dataset, IterableDataset
from trl import is_conversational

from ..episodes.images import is_parts
from ..system.hints import did_you_mean


# Arguments that the trainer passes to reward functions. Dataset columns must not have these names.
REWARD_ARGUMENTS = (
    *("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "turns", "earned"),
    "environments",
)
TURN_ARGUMENTS = (*REWARD_ARGUMENTS, "turn", "answer_turn")  # arguments of reward functions of single turns
_SCAN_ROWS = 1000
# Roles of messages: those of TRL, and others that chat templates of model families have
ROLES = (
    *("user", "assistant", "system", "tool", "developer", "function", "ipython", "observation", "documents"),
    *("context", "environment", "model"),
)
# Prompt of a row whose prompt the environment provides, as in TRL
PLACEHOLDER = [{"role": "user", "content": ""}]


def check_datasets(train_dataset, eval_dataset, prompts_per_generation: int) -> None:
    """
    Raise a `TypeError` for what is not a dataset, and a `ValueError` unless it has enough usable prompts. No row of a
    stream is read: its source may be slow, or give each row once. Its rows are checked when training reads them.
    """
    if train_dataset is None:
        raise ValueError("`train_dataset` is None. Pass a dataset with a `prompt` column or an `environment_factory`.")
    check_dataset(train_dataset, "train_dataset")
    if isinstance(train_dataset, Dataset) and len(train_dataset) < prompts_per_generation:
        raise ValueError(
            f"`train_dataset` has {len(train_dataset)} prompts, but one generation batch needs "
            f"{prompts_per_generation} (`generation_batch_size / num_generations`), so training could not take a "
            "single step. Add prompts, or lower `per_device_train_batch_size` or `steps_per_generation`."
        )
    for name, dataset in named_sets(eval_dataset).items():
        check_dataset(dataset, name)


def named_sets(eval_dataset) -> dict[str, Any]:
    """Evaluation datasets by the names that error messages use for them."""
    if isinstance(eval_dataset, Mapping):
        return {f"eval_dataset[{name!r}]": dataset for name, dataset in eval_dataset.items()}
    return {} if eval_dataset is None else {"eval_dataset": eval_dataset}


def _no_dataset(value: object, what: str) -> str:
    cure = "Convert a list of rows with `Dataset.from_list(rows)`."
    if isinstance(value, str):
        cure = f"Load it: `load_dataset({value!r}, split='train')`."
    elif isinstance(value, Mapping) and value:
        cure = f"Pass one of the splits: `dataset[{next(iter(value))!r}]`."
    elif type(value).__name__ == "DataFrame":
        cure = "Convert it with `Dataset.from_pandas(frame)`."
    elif what.startswith("eval") and isinstance(value, Sequence) and value and isinstance(value[0], Dataset):
        cure = 'Pass several sets by name: `eval_dataset={"easy": easy, "hard": hard}`.'
    return f"`{what}` must be a `Dataset` or `IterableDataset`, got `{type(value).__name__}`. {cure}"


def check_dataset(dataset: Dataset | IterableDataset, what: str) -> None:
    """Raise if a row has no usable `prompt`. Of a stream, only known columns are checked."""
    if not isinstance(dataset, (Dataset, IterableDataset)):
        raise TypeError(_no_dataset(dataset, what))
    columns = dataset.column_names
    if columns is None:  # a stream that does not know them before it is read
        return
    if isinstance(dataset, Dataset) and len(dataset) == 0:
        raise ValueError(f"`{what}` is empty: it has 0 rows to take prompts from (columns: {columns}).")
    if "prompt" not in columns:
        raise ValueError(
            f"`{what}` has no column `prompt`; it has {columns}. Rename the column that holds the prompts: "
            "`dataset.rename_column('question', 'prompt')`."
        )
    if collisions := sorted(set(columns) & set(TURN_ARGUMENTS)):
        raise ValueError(
            f"`{what}` has columns named {collisions}, which are arguments of reward functions. Rename them."
        )
    if isinstance(dataset, Dataset):
        check_prompts(read_prompts(dataset), what, start=0)


def has_other_content(message: Mapping[str, Any]) -> bool:
    """`True` if a message without text has other content: an assistant message with tool calls or reasoning."""
    return message["role"] == "assistant" and any(message.get(name) for name in ("tool_calls", "reasoning_content"))


def read_prompts(dataset: Dataset) -> Iterable[dict[str, Any]]:
    """Rows with their prompts alone, read in parts."""
    for part in dataset.select_columns("prompt").iter(_SCAN_ROWS):
        for prompt in part["prompt"]:
            yield {"prompt": prompt}


def check_prompts(rows: Iterable[dict[str, Any]], what: str, start: int | None = None) -> None:
    """Raise at the first row whose prompt is missing, empty, or of another kind. `start` is the index of the first."""
    first_kind = None
    for offset, row in enumerate(rows):
        where = f"row {start + offset} of `{what}`" if start is not None else f"a row of `{what}`"
        if "prompt" not in row:
            raise ValueError(f"There is no `prompt` in {where}; it has {sorted(row)}.")
        kind = _find_kind(row["prompt"], where)
        first_kind = first_kind or kind
        if kind != first_kind:
            raise ValueError(
                f"The prompt in {where} is {kind}, but the first prompt is {first_kind}. Use the same format for all "
                "prompts: strings, or lists of messages."
            )


def _find_kind(prompt: object, where: str) -> str:
    if prompt is None:
        raise ValueError(f"The prompt in {where} is None. Remove the row: `dataset.filter(lambda r: r['prompt'])`.")
    if isinstance(prompt, str):
        if not prompt.strip():
            raise ValueError(f"The prompt in {where} is empty. Remove it: `filter(lambda r: r['prompt'].strip())`.")
        return "text"
    if not isinstance(prompt, list):
        raise TypeError(f"The prompt in {where} is a {type(prompt).__name__}, not a string or a list of messages.")
    if not prompt or not is_conversational({"prompt": prompt}):
        raise ValueError(
            f"The prompt in {where} is a list, but not a list of messages: {str(prompt)[:80]}. Write messages as "
            '`[{"role": "user", "content": "..."}]`.'
        )
    for message in prompt:
        if "content" not in message:
            raise ValueError(f"The prompt in {where} has a message without `content`; it has {sorted(message)}.")
        if message["role"] not in ROLES:
            known = f" Roles are {', '.join(map(repr, ROLES[:4]))}." if isinstance(message["role"], str) else ""
            hint = did_you_mean(message["role"], ROLES) or known
            raise ValueError(f"{where} has the role {message['role']!r}, which is not a known role.{hint}")
        if message["content"] in (None, ""):
            if has_other_content(message) or prompt == PLACEHOLDER:
                continue
            raise ValueError(f"The prompt in {where} has a {message['role']!r} message without content.")
        if not isinstance(message["content"], str) and not is_parts(message["content"]):
            raise ValueError(
                f"The prompt in {where} has a {message['role']!r} message whose content is neither a text nor a list "
                "of parts such as `{'type': 'text', 'text': ...}` and `{'type': 'image', 'image': ...}`."
            )
    if prompt[-1]["role"] == "assistant":
        raise ValueError(
            f"The prompt in {where} ends with an assistant message, so there is nothing to answer. Remove that "
            "message, or add the message that the team should answer."
        )
    return "a list of messages"
