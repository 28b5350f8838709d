# Copyright 2026 The marft_trl authors. Licensed under the Apache License, Version 2.0.
"""bitsandbytes is loaded when it is used: it takes a second, and on a CPU it prints what it cannot load."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
import types
from typing import Any


_NAME = "bitsandbytes"


class _Later(types.ModuleType):
    """A module that is loaded at the first access to an attribute that it does not have."""

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(_NAME) is self:
            del sys.modules[_NAME]
        value = getattr(importlib.import_module(_NAME), name)
        if name == "__path__":  # a module of the package is being imported, which the package may have loaded by now
            sys.meta_path.insert(0, _Loaded())
        return value


class _Loaded:
    """
    Finder and loader, for the next import, of a module that its package has loaded while Python (3.13) looked for it.
    Python checked `sys.modules` before it asked for the path of the package, and would run the module again.
    """

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        sys.meta_path.remove(self)  # type: ignore[arg-type]  # has what is asked of a finder
        self._module = sys.modules.get(name)
        if self._module is None or not name.startswith(f"{_NAME}."):
            return None
        self._spec = self._module.__spec__
        return importlib.machinery.ModuleSpec(name, self)  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> types.ModuleType | None:
        return self._module

    def exec_module(self, module: types.ModuleType) -> None:
        module.__spec__ = self._spec


def load_bitsandbytes_when_used() -> None:
    """Delay the import of bitsandbytes by PEFT (0.21, `peft.helpers`), unless either is already loaded."""
    spec = None if {_NAME, "peft"} & sys.modules.keys() else importlib.util.find_spec(_NAME)
    if spec is not None:
        module = _Later(_NAME)
        module.__spec__, module.__file__, module.__loader__ = spec, spec.origin, spec.loader
        sys.modules[_NAME] = module
