"""Packages whose public names are imported when they are first used, so that importing the package stays cheap."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def attach(
    package: str,
    exports: Mapping[str, Sequence[str]],
    check: Callable[[str, str], None] | None = None,
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` for ``package``, whose submodules define the names in ``exports``.

    ``check(module, name)`` runs before the submodule is imported, to raise a named error for a missing dependency.
    ``__all__`` stays a literal in the package: linters, type checkers and readers look for it there.
    """
    origin = {name: module for module, names in exports.items() for name in names}

    def get_attribute(name: str) -> Any:
        module = origin.get(name)
        if module is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if check is not None:
            check(module, name)
        return getattr(importlib.import_module(f"{package}.{module}"), name)

    return get_attribute, lambda: sorted(origin)
