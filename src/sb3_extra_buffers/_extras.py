"""Import optional dependencies."""

from __future__ import annotations

import importlib
from typing import Any

from sb3_extra_buffers.errors import MissingExtraError

__all__ = ["import_extra"]


def import_extra(module: str, extra: str = "extra", user: str = "this", alternative: str = "") -> Any:
    """Import an optional package; if it is missing, the error says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        hint = MissingExtraError.hint(extra) + (f", or {alternative}" if alternative else "")
        raise MissingExtraError(f"{user} needs {module!r}: {hint}") from None
