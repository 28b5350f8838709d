# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""How a setting is declared: default, limits, the settings it depends on, and what it is about."""

from __future__ import annotations

import dataclasses
import re
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from ..system.hints import did_you_mean


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
    """
    What a setting may be, and what it is about.

    Args:
        bounds: ranges of a number.
        integer: whether the number is an integer.
        needed: whether a number may not be `None`.
        none: meaning of `None`, for messages.
        choices: known values: names, or a table by name, which may get further entries.
        also: values next to those of a table.
        only_if: other settings, each with the value that this one has an effect with. Where the other one names the
            entry of a table, entries with `settings` say which settings they read.
        about: `"results"`, which a resumed run compares, `"evaluations"`, `"machines"` or `"files"`.
    """

    bounds: tuple[Bound, ...] = ()
    integer: bool = False
    needed: bool = False
    none: str | None = None
    choices: Iterable[str] | None = None
    also: tuple[str | None, ...] = ()
    only_if: tuple[tuple[str, str], ...] = ()
    about: str = "results"

    @property
    def known(self) -> list[str | None]:
        """The known values."""
        first, last = [None] if None in self.also else [], [item for item in self.also if item is not None]
        return [*first, *(self.choices or ()), *last]


class Option(dataclasses.Field):
    """A field of a dataclass, with its rule. Its metadata is that of TRL's fields, which command lines read."""

    __slots__ = ("rule",)
    rule: Rule


def option(
    default: Any,
    *bounds: Bound,
    integer: bool = False,
    none: str | None = None,
    choices: Iterable[str] | None = None,
    also: tuple[str | None, ...] = (),
    only_if: Iterable[tuple[str, str]] = (),
    about: str = "results",
) -> Any:
    """
    Declare a setting. The docstring of the class describes the setting, see [`documented`].

    Args:
        default: value if it is not set.
        bounds: ranges of a number.
        integer, none, choices, also, only_if, about: as in [`Rule`].
    """
    is_number = bool(bounds) or integer
    needed = is_number and default is not None and none is None
    rule = Rule(bounds, integer, needed, none, choices, also, tuple(only_if), about)
    shown = {"choices": [item for item in rule.known if item is not None]} if choices is not None else {}
    field = dataclasses.field(default=default, metadata=shown)
    made = object.__new__(Option)
    for slot in dataclasses.Field.__slots__:
        setattr(made, slot, getattr(field, slot))
    made.rule = rule
    return made


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
    """Raise a `ValueError` if a value is not a number that its rule allows."""
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


def check_flag(name: str, value: Any, may_be_none: bool = False) -> None:
    """Raise a `ValueError` if a value is neither `True` nor `False`; texts such as `"no"` are true in Python."""
    if not isinstance(value, bool):
        raise ValueError(f"`{name}` must be True or False{', or None' if may_be_none else ''}; got {value!r}.")


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
    """
    Return `True` if a setting has an effect, given the value of another setting.

    Args:
        args: the settings.
        value: a value of the other setting with which this setting has an effect.
    """
    present, table = getattr(args, other), rules[other].choices
    entry = table.get(present) if isinstance(table, Mapping) else None
    return present == value if entry is None else name in entry.settings
