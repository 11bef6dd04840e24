"""Which keys of the items are compressed, with which method, and which of them share a store."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from sb3_extra_buffers._torchrl.schema import Key, Spec
from sb3_extra_buffers._torchrl.tensors import tensor_spec
from sb3_extra_buffers.codecs.registry import get_codec
from sb3_extra_buffers.errors import ArgumentError, CodecOptionError
from sb3_extra_buffers.stores.choice import choose_unseen

__all__ = ["KeyLayout", "check_methods", "join_keys", "lay_out"]


class KeyLayout(NamedTuple):
    """Keys that stay plain tensors, and keys that are compressed, one list per group."""

    dense: list[Key]
    groups: list[list[Key]]


def lay_out(
    specs: Mapping[Key, Spec], n_inner: int, methods: Mapping[Key, str], named: Collection[Key] = ()
) -> KeyLayout:
    """Choose the layout for items of ``specs``, whose first ``n_inner`` axes count as items.

    Small leaves, such as the index that TorchRL adds, are only compressed if they are ``named`` with a method.
    """
    dense: list[Key] = []
    large: list[Key] = []
    for key, (shape, dtype) in specs.items():
        spec, method = tensor_spec(shape[n_inner:], dtype), methods[key]
        is_chosen = key in named and method != "auto"
        small = method == "none" or (not is_chosen and choose_unseen(spec) is not None) or not spec.nbytes
        (dense if small else large).append(key)
    return KeyLayout(dense, join_keys(large, {key: (specs[key], methods[key]) for key in large}))


def join_keys(keys: Sequence[Key], traits: Mapping[Key, Any]) -> list[list[Key]]:
    """Join ``key`` and ``("next", key)``, which repeat each other, if their ``traits`` are equal."""
    by_path = {key if isinstance(key, tuple) else (key,): key for key in keys}

    def follows(path: tuple[Any, ...]) -> bool:
        base = path[1:]
        return (
            path[0] == "next" and base in by_path and traits[by_path[base]] == traits[by_path[path]]
            and not follows(base)
        )  # fmt: skip

    joined = []
    for path, key in by_path.items():
        follower = ("next", *path)
        if not follows(path):
            joined.append([key, by_path[follower]] if follower in by_path and follows(follower) else [key])
    return joined


def options_for(method: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of ``method``: ``prefer`` is for ``"auto"`` only."""
    return {name: value for name, value in options.items() if name != "prefer" or method == "auto"}


def check_methods(methods: Any, options: Any) -> None:
    """Raise unless ``methods`` is a compression method or a mapping of keys to methods that take ``options``."""
    if options is not None and not (isinstance(options, Mapping) and all(isinstance(name, str) for name in options)):
        raise CodecOptionError(f"compression_kwargs must map option names to values, got {options!r}")
    if not isinstance(methods, (str, Mapping)):
        raise ArgumentError(f"compression_method must be a method, or a dict with a method per key; got {methods!r}")
    for method in [methods] if isinstance(methods, str) else methods.values():
        if not isinstance(method, str):
            raise ArgumentError(f"a compression method must be a string, got {method!r}")
        if method != "auto":
            get_codec(method, **(dict(options or {}) if method is methods else options_for(method, options or {})))
