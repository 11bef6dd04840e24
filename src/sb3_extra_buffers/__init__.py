"""Experience buffers that hold image observations in about a hundredth of the memory."""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "1.0.0.dev0"
