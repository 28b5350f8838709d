# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""
Changes between a checkpoint and the run that resumes from it. Some would make the state of the checkpoint mean
something else; they are refused. Others take effect and are announced.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..system.hints import did_you_mean


# Parts of the settings that a resumed run may change if it says so, and what the change costs
ACCEPTABLE = {
    "dataset": "the position in the dataset is counted in batches, so other rows are used",
    "seed": "rows come in another order",
    "workflow": "episodes take another course",
    "base": "the adapters were trained on another base",
    "tokenizer": "the adapters were trained on other tokens",
    "batch": "the position in the dataset is counted in batches of another size",
    "processes": "random states and rows in use cannot be divided among another number of processes",
}
# Parts that cannot be accepted: the state would not fit
_FIXED = ("agents", "adapters", "critic", "optimizer")
_UNKNOWN = "(not recorded)"


@dataclass(frozen=True)
class ResumeChanges:
    """
    Intended changes of a resumed run, from `MARFTConfig(resume_changes=...)`.

    Args:
        add (`Sequence[str]`): adapters that start anew.
        remove (`Sequence[str]`): adapters of the checkpoint that are left out.
        rename (`Mapping[str, str]`): new names of adapters, by their names in the checkpoint.
        accept (`Sequence[str]`): parts of the settings that may differ, among [`ACCEPTABLE`].
    """

    add: Sequence[str] = ()
    remove: Sequence[str] = ()
    rename: Mapping[str, str] = field(default_factory=dict)
    accept: Sequence[str] = ()

    @classmethod
    def of(cls, changes: Mapping[str, Any] | None) -> ResumeChanges:
        """
        Check the changes that a user names.

        Raises:
            ValueError, TypeError: an unknown kind of change, or names of the wrong type.
        """
        if changes is None:
            return cls()
        if not isinstance(changes, Mapping):
            raise TypeError(f"`resume_changes` must be a dictionary, got {type(changes).__name__}.")
        kinds = ("add", "remove", "rename", "accept")
        for kind, value in changes.items():
            if kind not in kinds:
                raise ValueError(
                    f"`resume_changes` has the keys {', '.join(map(repr, kinds))}; got {kind!r}."
                    f"{did_you_mean(kind, kinds)}"
                )
            names = [*value.keys(), *value.values()] if kind == "rename" and isinstance(value, Mapping) else value
            if (
                isinstance(value, Mapping) != (kind == "rename")
                or isinstance(names, str)
                or not isinstance(names, Collection)
                or not all(isinstance(name, str) for name in names)
            ):
                wanted = "a dictionary of names" if kind == "rename" else "a list of names"
                raise TypeError(f"`resume_changes[{kind!r}]` must be {wanted}, got {value!r}.")
        for part in changes.get("accept", ()):
            if part not in ACCEPTABLE:
                raise ValueError(
                    f"`resume_changes['accept']` can name {', '.join(map(repr, ACCEPTABLE))}; got {part!r}."
                    f"{did_you_mean(part, list(ACCEPTABLE))}"
                )
        return cls(**changes)

    @property
    def is_empty(self) -> bool:
        """`True` if nothing is to change."""
        return not (self.add or self.remove or self.rename or self.accept)

    def source_of(self, adapter: str) -> str | None:
        """Name that an adapter of the team has in the checkpoint; `None` if it starts anew."""
        if adapter in self.add:
            return None
        return next((old for old, new in self.rename.items() if new == adapter), adapter)

    def check_names(self, saved: Collection[str], present: Collection[str]) -> None:
        """
        Raise unless the changes lead from the adapters of the checkpoint to those of the team.

        Raises:
            ValueError: the message has both and names what is left over.
        """
        wrong = [f"adds {name!r}, which the team does not have" for name in self.add if name not in present]
        wrong += [f"removes {name!r}, which the checkpoint does not have" for name in self.remove if name not in saved]
        wrong += [f"renames {old!r}, which the checkpoint does not have" for old in self.rename if old not in saved]
        if len(set(self.rename.values())) < len(self.rename):
            wrong.append("gives two adapters the same name")
        after = ({self.rename.get(name, name) for name in saved if name not in self.remove}) | set(self.add)
        if not wrong and after == set(present):
            return
        missing, extra = sorted(set(present) - after), sorted(after - set(present))
        hints = [f"`add` {missing} (start anew)"] if missing else []
        hints += [f"`remove` {extra}"] if extra else []
        hints += [f"`rename` {extra[0]!r} to {missing[0]!r}"] if missing and extra else []
        said = f" `resume_changes` {'; '.join(wrong)}." if wrong else ""
        fix = f" Say with `resume_changes` what is meant: {', '.join(hints)}." if hints else ""
        raise ValueError(
            f"The checkpoint has the agents and adapters {sorted(saved)}, but the team is {sorted(present)}.{said}"
            f"{fix} Or resume with the team that the checkpoint was written with."
        )


def check_structure(
    saved: Mapping[str, Any], present: Mapping[str, Any], changes: ResumeChanges, folder: Any
) -> list[str]:
    """
    Compare what gives the state of a checkpoint its meaning.

    Args:
        saved, present (`Mapping[str, Any]`): settings by part, of the checkpoint and of the run.
        changes ([`ResumeChanges`]): what the user has announced.
        folder: the checkpoint, for messages.

    Returns: a line for each accepted difference.

    Raises:
        ValueError: a difference that was not announced. The message has a table of then and now.
    """
    refused, accepted = [], []
    for part in (*_FIXED, *ACCEPTABLE, "versions"):
        differences = list(_differences(part, saved.get(part), present.get(part), changes))
        if not differences:
            continue
        if part in changes.accept or part == "versions":
            accepted += [f"{name}: {then} -> {now}" for name, then, now in differences]
        else:
            refused += [(part, *difference) for difference in differences]
    if refused:
        can = sorted({part for part, *_ in refused if part in ACCEPTABLE})
        costs = "; ".join(f"{part!r}: {ACCEPTABLE[part]}" for part in can)
        fix = f" If a change is meant, pass `resume_changes={{'accept': {can}}}` ({costs})." if can else ""
        raise ValueError(
            f"The run differs from the one that wrote {folder}, so its state would mean something else:\n"
            f"{_table([(name, then, now) for _, name, then, now in refused])}\n"
            f"Resume with the settings of the checkpoint, or start a new run from its adapters (`load_adapters`).{fix}"
        )
    return accepted


def tunables(saved: Mapping[str, Any], present: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """
    Settings that take effect when they change: name, then, now. Nothing is said of a field of the configuration that
    another version has not recorded.
    """
    differences = _differences("", saved.get("tunable"), present.get("tunable"), ResumeChanges())
    return [its for its in differences if _UNKNOWN not in its or not its[0].isidentifier()]


def _differences(part: str, saved: Any, present: Any, changes: ResumeChanges) -> Iterable[tuple[str, str, str]]:
    """Entries of a part that differ: name, then, now."""
    if saved is None or present is None:
        return
    saved, present = dict(saved), dict(present)
    if part == "seed":
        saved.pop("data_seed", None)  # earlier versions recorded it; it has no effect
    if part == "workflow" and isinstance(present.get("team"), list):  # names in team order
        before = [changes.rename.get(name, name) for name in saved.get("team", ()) if name not in changes.remove]
        after = [name for name in present["team"] if name not in changes.add]
        saved["team"], present["team"] = before or after, after  # earlier versions did not record it
    if part == "agents":
        saved = {name: changes.rename.get(adapter, adapter) for name, adapter in saved.items()}
    if part in ("agents", "adapters"):
        saved = {changes.rename.get(name, name): value for name, value in saved.items() if name not in changes.remove}
        present = {name: value for name, value in present.items() if name not in changes.add}
    yield from _different(part, saved, present)


def _different(where: str, saved: Mapping[str, Any], present: Mapping[str, Any]) -> Iterable[tuple[str, str, str]]:
    for name in [*present, *(name for name in saved if name not in present)]:
        then, now = saved.get(name, _UNKNOWN), present.get(name, _UNKNOWN)
        full = f"{where}.{name}" if where else name
        if isinstance(then, Mapping) and isinstance(now, Mapping):
            yield from _different(full, then, now)
        elif then != now:
            yield full, _brief(then), _brief(now)


def _brief(value: Any, limit: int = 60) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _table(rows: Sequence[tuple[str, str, str]]) -> str:
    lines = [("setting", "then", "now"), *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(3)]
    return "\n".join("  " + "  ".join(f"{cell:<{w}}" for cell, w in zip(line, widths, strict=True)) for line in lines)
