"""Classes that are made from other classes at run time, and that pickle can find again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Factory = Callable[[type[Any]], type[Any]]

# one class for each, so that isinstance works across calls
_classes: dict[tuple[Factory, type[Any]], type[Any]] = {}


class Generated:
    """Mixin of classes that `generate_class` returns: instances are pickled with what made their class."""

    #: The factory and its argument; only in the generated class itself, not in subclasses that have a name.
    _made_from: tuple[Factory, type[Any]]

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        if "_made_from" not in vars(type(self)):
            return reduced
        return (_new_instance, self._made_from, *reduced[2:])


def _new_instance(factory: Factory, original: type[Any]) -> Any:
    return object.__new__(factory(original))


def generate_class(
    factory: Factory, original: type[Any], prefix: str, bases: tuple[type[Any], ...], doc: str
) -> type[Any]:
    """Return the class that ``factory(original)`` stands for, the same one at every call."""
    key = factory, original
    if key not in _classes:
        contents = {"__module__": factory.__module__, "__doc__": doc, "_made_from": key}
        _classes[key] = type(prefix + original.__name__, bases, contents)
    return _classes[key]
