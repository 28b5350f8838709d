# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""Words of messages: names that are nearly right, and long texts in brief."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar


Function = TypeVar("Function", bound=Callable)


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """`" Did you mean 'solver'?"`, the end of an error message; empty where no known name is near."""
    known = list(known)
    # As an abbreviation (`lr`) or a part of the name (`dataset`), else misspelt
    near = [other for other in known if str(name) in ("".join(w[:1] for w in other.split("_")), *other.split("_"))]
    near = near or difflib.get_close_matches(str(name), known, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def brief(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."


# Names that other libraries, or earlier versions, have for arguments
_ALSO_CALLED = {"config": "args", "tokenizer": "processing_class", "rewards": "reward_funcs", "reward": "reward_funcs"}


class NearNames:
    """Raises `AttributeError`s that name the attribute that is probably meant."""

    also_called: ClassVar[Mapping[str, str]] = {}  # own names by those of other libraries

    if not TYPE_CHECKING:  # a type checker would take any name

        def __getattr__(self, name: str) -> Any:
            known = [own for own in (*vars(self), *dir(type(self))) if not own.startswith("_")]
            meant = self.also_called.get(name)
            hint = f" Did you mean {meant!r}?" if meant else did_you_mean(name, known)
            raise AttributeError(f"`{type(self).__name__}` has no attribute `{name}`.{hint}", name=name, obj=self)


def checked_names(
    what: str, example: str = "", elsewhere: Mapping[str, str] | None = None
) -> Callable[[Function], Function]:
    """
    Decorator of a method, called `what` in messages: an unknown argument raises a `TypeError` with the probable one.
    `example` shows how to write required ones; `elsewhere` has a sentence for names that are set in another way.
    """

    def decorate(init: Function) -> Function:
        parameters = inspect.signature(init).parameters
        known = list(parameters)[1:]
        needed = [name for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY and p.default is p.empty]

        def check(kwargs: Mapping[str, Any]) -> None:
            if (unknown := next((name for name in kwargs if name not in known), None)) is not None:
                meant = _ALSO_CALLED.get(unknown)
                hint = f" {elsewhere[unknown]}" if elsewhere and unknown in elsewhere else ""
                hint = hint or (f" Did you mean {meant!r}?" if meant in known else did_you_mean(unknown, known))
                hint = hint or f" Its arguments are {', '.join(known)}."
                raise TypeError(f"`{what}` has no argument `{unknown}`.{hint}")
            for name in needed:
                if name not in kwargs:
                    raise TypeError(f"`{what}` needs `{name}`. Write `{example}`.")

        @functools.wraps(init)
        def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
            check(kwargs)
            return init(self, *args, **kwargs)

        @functools.wraps(init)
        async def checked_later(self: Any, *args: Any, **kwargs: Any) -> Any:
            check(kwargs)
            return await init(self, *args, **kwargs)

        # Others ask whether a function is one of coroutines
        return checked_later if inspect.iscoroutinefunction(init) else checked  # type: ignore[return-value]

    return decorate
