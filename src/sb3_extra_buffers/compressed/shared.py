"""Readers of replay buffers that another process on the same machine shares."""

from sb3_extra_buffers._sb3.sharing import SharedHandle, SharedReader

__all__ = ["SharedHandle", "SharedReader"]
