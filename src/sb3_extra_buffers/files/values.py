"""What a buffer is made of as JSON and plain arrays: a fixed list of kinds, none of which can run code."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import json
import math
import re
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.errors import ExtraBuffersError, FileFormatError, NotSaveableError
from sb3_extra_buffers.files.spaces import space_from_json, space_to_json
from sb3_extra_buffers.stores.observation import ObservationStore
from sb3_extra_buffers.stores.snapshot import parse_dtype
from sb3_extra_buffers.stores.view import StoreView

Array = npt.NDArray[Any]

_OURS = "sb3_extra_buffers"
_MODULE = re.compile(rf"{_OURS}(\.[a-z_][a-z0-9_]*)+")
_DEPTH = 64
# enumerations of others that buffers hold
_ENUMS = {"GoalSelectionStrategy": "stable_baselines3.her.goal_selection_strategy"}
# what kernels work on is loaded with its store, all of it checked; of these, what is checked here
_GUARDED = (f"{_OURS}.stores.", f"{_OURS}.kernels.")
_OBJECTS = frozenset(
    f"{_OURS}.{name}"
    for name in (
        "stores.choice:Choice", "stores.layout:StackLayout", "stores.staging:Staging", "stores.device:DeviceFrameStore",
        "stores.device_observation:DeviceObservations", "stores.device_observation:_Dense",
        "stores.device_observation:_OnHost", "kernels.delta_torch:FrameShape",
    )
)  # fmt: skip
# what is made again when it is missed
_MADE_AGAIN = frozenset({f"{_OURS}.stores.staging:Layout"})
# arrays kept inside the JSON, where there would be too many to have a place each
_INLINE_BYTES = 1 << 12


class Encoder:
    """Turns values into JSON; arrays and stores are listed aside, each once however often it is met."""

    def __init__(self) -> None:
        self.arrays: dict[str, Array] = {}
        self.stores: list[ObservationStore] = []
        self._known: dict[int, str] = {}

    def encode(self, value: Any, name: str) -> Any:
        """``value`` as JSON; ``name`` says where it is, for arrays and errors."""
        if value is None or isinstance(value, (bool, str)) or type(value) is int:
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {"$float": repr(value)}
        if isinstance(value, enum.Enum):
            return self._encode_enum(value, name)
        if isinstance(value, np.ndarray):
            return self._encode_array(value, name)
        if isinstance(value, np.generic):
            self._check_dtype(value.dtype, name)
            return {"$scalar": [value.dtype.str, value.tobytes().hex()]}
        if isinstance(value, StoreView):
            return {"$view": self.encode_view(value, name)}
        if isinstance(value, ObservationStore):
            return {"$store": self._place_of(value)}
        if isinstance(value, dict):
            return self._encode_dict(value, name)
        if type(value) in (list, tuple):
            parts = [self.encode(part, f"{name}.{place}") for place, part in enumerate(value)]
            return parts if type(value) is list else {"$tuple": parts}
        return self._encode_rest(value, name)

    def _encode_rest(self, value: Any, name: str) -> Any:
        if isinstance(value, np.dtype):
            self._check_dtype(value, name)
            return {"$dtype": value.str}
        if isinstance(value, type) and issubclass(value, np.generic):
            return {"$type": np.dtype(value).str}
        torch = sys.modules.get("torch")
        if torch is not None:
            if isinstance(value, torch.device):
                return {"$device": str(value)}
            if isinstance(value, torch.dtype):
                return {"$torch": str(value).removeprefix("torch.")}
            if isinstance(value, torch.Tensor):
                array = value.detach().cpu().numpy()
                return {"$tensor": self.encode(array, name), "device": str(value.device)}
        gymnasium = sys.modules.get("gymnasium")
        if gymnasium is not None and isinstance(value, gymnasium.Space):
            return {"$space": space_to_json(value)}
        kind = type(value)
        if kind.__module__.startswith(f"{_OURS}.") and "<" not in kind.__qualname__:
            called = f"{kind.__module__}:{kind.__qualname__}"
            if called in _MADE_AGAIN:
                return None
            return {"$object": called, "state": self._encode_state(value, name)}
        raise NotSaveableError(
            f"{name} is a {kind.__module__}.{kind.__qualname__}, which cannot be saved without pickle; "
            "leave it out in __getstate__, or keep it as numbers, strings, arrays, lists or dicts"
        )

    def _encode_state(self, value: Any, name: str) -> Any:
        if dataclasses.is_dataclass(value):
            fields = [field.name for field in dataclasses.fields(value) if field.init]
            return {field: self.encode(getattr(value, field), f"{name}.{field}") for field in fields}
        # Python 3.10 has no object.__getstate__
        state = value.__getstate__() if hasattr(value, "__getstate__") else vars(value)
        if not isinstance(state, dict):
            raise NotSaveableError(f"{name} is a {type(value).__name__} whose state is no dict")
        return {key: self.encode(part, f"{name}.{key}") for key, part in state.items()}

    def encode_view(self, view: StoreView, name: str) -> dict[str, Any]:
        record: dict[str, Any] = {
            "store": self._place_of(view.store), "lead_shape": list(view.lead_shape), "base": view._base,
        }  # fmt: skip
        if view._cells is not None:
            record["cells"] = self.encode(view._cells, f"{name}.cells")
        return record

    def _place_of(self, store: ObservationStore) -> int:
        known = [each is store for each in self.stores]
        if True not in known:
            self.stores.append(store)
            known.append(True)
        return known.index(True)

    def _encode_array(self, array: Array, name: str) -> Any:
        known = self._known.get(id(array))
        if known is not None:
            return {"$array": known}
        if array.dtype.hasobject:
            return self._encode_objects(array, name)
        self._check_dtype(array.dtype, name)
        self.arrays[name] = array
        self._known[id(array)] = name
        return {"$array": name}

    def _encode_objects(self, array: Array, name: str) -> Any:
        """An array of objects, such as HER's infos, as text: equal neighbours once."""
        runs: list[list[Any]] = []
        before: Any = runs  # no element is this
        for element in array.ravel():
            if element is before or (type(element) is type(before) and element == 0 and before == 0):
                runs[-1][0] += 1
            else:
                runs.append([1, InlineEncoder().encode(element, name)])
                before = element
        text = np.frombuffer(json.dumps(runs, separators=(",", ":")).encode(), np.uint8)
        self.arrays[name] = text
        return {"$objects": name, "shape": list(array.shape)}

    def _encode_dict(self, value: dict[Any, Any], name: str) -> Any:
        kind = type(value)
        pairs = [
            (self.encode(key, name) if not isinstance(key, str) else key, self.encode(part, f"{name}.{key}"))
            for key, part in value.items()
        ]
        if kind.__module__.startswith(f"{_OURS}."):
            return {"$mapping": f"{kind.__module__}:{kind.__qualname__}", "pairs": [list(pair) for pair in pairs]}
        if all(isinstance(key, str) and not key.startswith("$") for key, _ in pairs):
            return dict(pairs)
        return {"$dict": [list(pair) for pair in pairs]}

    def _encode_enum(self, value: enum.Enum, name: str) -> Any:
        kind = type(value)
        if _ENUMS.get(kind.__name__) != kind.__module__:
            raise NotSaveableError(f"{name} is a {kind.__name__}, an enumeration that is not known to files")
        return {"$enum": [kind.__name__, value.name]}

    def _check_dtype(self, dtype: np.dtype[Any], name: str) -> None:
        try:
            parse_dtype(dtype.str)
        except FileFormatError:
            raise NotSaveableError(f"{name} has dtype {dtype}, which cannot be saved; numbers can") from None


class InlineEncoder(Encoder):
    """Small arrays as numbers among the JSON."""

    def _encode_array(self, array: Array, name: str) -> Any:
        if array.dtype.hasobject or array.nbytes > _INLINE_BYTES:
            raise NotSaveableError(
                f"{name} holds an array of {array.nbytes} bytes and dtype {array.dtype}; files keep up to "
                f"{_INLINE_BYTES} bytes there"
            )
        self._check_dtype(array.dtype, name)
        return {"$bytes": [array.dtype.str, list(array.shape), array.tobytes().hex()]}


class Decoder:
    """Undoes what `Encoder` did; anything else is an error."""

    def __init__(
        self, read_array: Callable[[str], Array], stores: list[ObservationStore], most_objects: int = 1 << 20
    ) -> None:
        self._read_array = read_array
        self._stores = stores
        self._most_objects = most_objects
        self._known: dict[str, Array] = {}

    def decode(self, value: Any, depth: int = 0) -> Any:
        if depth > _DEPTH:
            raise FileFormatError(f"values are nested more than {_DEPTH} deep")
        if isinstance(value, list):
            return [self.decode(part, depth + 1) for part in value]
        if not isinstance(value, dict):
            return value
        tags = [key for key in value if key.startswith("$")]
        if not tags:
            return {key: self.decode(part, depth + 1) for key, part in value.items()}
        try:
            make = _KINDS[tags[0]]
        except KeyError:
            raise FileFormatError(f"a value of kind {tags[0]!r} is unknown here; update sb3-extra-buffers") from None
        try:
            return make(self, value, depth + 1)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RuntimeError) as problem:
            if isinstance(problem, ExtraBuffersError):
                raise
            raise FileFormatError(
                f"a saved value of kind {tags[0]!r} makes no sense: {type(problem).__name__}: {problem}"
            ) from problem

    def array(self, name: Any) -> Array:
        """The array ``name``, the same one every time."""
        if name not in self._known:
            self._known[name] = self._read_array(name)
        return self._known[name]

    def view(self, record: Any, kind: type[StoreView]) -> StoreView:
        """The view that ``record`` describes, of class ``kind``."""
        lead, base = record["lead_shape"], record["base"]
        if not isinstance(lead, list) or not all(type(n) is int and 0 <= n < 1 << 48 for n in lead):
            raise FileFormatError(f"{lead!r} is no shape")
        store, count = self._store(record["store"]), math.prod(lead)
        cells = None
        if "cells" in record:
            cells = self.decode(record["cells"])
            if cells.shape != tuple(lead) or cells.dtype != np.int64:
                raise FileFormatError(f"cells of shape {cells.shape} for a view of {lead}")
            if cells.size and (cells.min() < 0 or cells.max() >= store.n_cells):
                raise FileFormatError(f"a view names cells beyond the {store.n_cells} of its store")
            base, count = 0, 0
        if type(base) is not int or not 0 <= base <= store.n_cells - count:
            raise FileFormatError(f"a view of {count} cells from {base!r} on goes beyond {store.n_cells}")
        view = object.__new__(kind)
        # its cells are there already: the constructor would add as many again
        StoreView.__init__(view, store, lead, np.zeros(0, np.int64) if cells is None else cells)
        view._cells, view._base = cells, base
        view._n_steps = lead[0] if lead and cells is None and store.spec.nbytes else 0
        return view

    def _store(self, place: Any) -> ObservationStore:
        if type(place) is not int or not 0 <= place < len(self._stores):
            raise FileFormatError(f"there is no store {place!r}")
        return self._stores[place]

    def _view(self, value: Any, depth: int) -> Any:
        # the view that SB3's own code indexes; a floor further up
        return self.view(value["$view"], our_class("sb3_extra_buffers._sb3.leaves:BufferView"))

    def _object(self, value: Any, depth: int) -> Any:
        name = str(value["$object"])
        kind = our_class(name)
        if name.startswith(_GUARDED) and name not in _OBJECTS:
            raise FileFormatError(f"a {kind.__name__} is not loaded as a value")
        state = {str(key): self.decode(part, depth) for key, part in value["state"].items()}
        if dataclasses.is_dataclass(kind):
            return kind(**state)
        made = object.__new__(kind)
        set_state(made, state)
        if name in _OBJECTS:
            from sb3_extra_buffers.stores.device_snapshot import check_loaded

            check_loaded(made)
        return made

    def _mapping(self, value: Any, depth: int) -> Any:
        kind = our_class(value["$mapping"])
        if not issubclass(kind, dict):
            raise FileFormatError(f"{kind.__name__} is no mapping")
        return kind(self._pairs(value["pairs"], depth))

    def _pairs(self, pairs: Any, depth: int) -> list[tuple[Any, Any]]:
        return [(self.decode(key, depth), self.decode(part, depth)) for key, part in pairs]

    def _enum(self, value: Any, depth: int) -> Any:
        name, member = value["$enum"]
        return getattr(importlib.import_module(_ENUMS[name]), name)[member]

    def _objects(self, value: Any, depth: int) -> Array:
        shape = value["shape"]
        runs = json.loads(self.array(value["$objects"]).tobytes())
        count = math.prod(shape)
        # written as whole numbers before anything of that size is made
        fits = all(type(n) is int and n >= 0 for n in shape) and sum(run[0] for run in runs) == count
        if not fits or count > self._most_objects:
            raise FileFormatError(f"objects are not as many as an array of {shape} holds")
        out = np.empty(count, object)
        at = 0
        for length, element in runs:
            if length < 1:
                raise FileFormatError("a run of objects is empty")
            for place in range(at, at + length):
                out[place] = self.decode(element, depth)
            at += length
        return out.reshape(shape)

    def _inline(self, value: Any, depth: int) -> Array:
        dtype, shape, text = value["$bytes"]
        return np.frombuffer(bytes.fromhex(text), parse_dtype(dtype)).reshape(shape).copy()

    def _scalar(self, value: Any, depth: int) -> Any:
        dtype, text = value["$scalar"]
        return np.frombuffer(bytes.fromhex(text), parse_dtype(dtype), 1)[0]

    def _tensor(self, value: Any, depth: int) -> Any:
        import torch

        return torch.from_numpy(np.array(self.decode(value["$tensor"], depth))).to(_device(value["device"]))


_KINDS: dict[str, Callable[[Decoder, Any, int], Any]] = {
    "$float": lambda decoder, value, depth: {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[value["$float"]],
    "$scalar": Decoder._scalar,
    "$array": lambda decoder, value, depth: decoder.array(value["$array"]),
    "$objects": Decoder._objects,
    "$bytes": Decoder._inline,
    "$tuple": lambda decoder, value, depth: tuple(decoder.decode(part, depth) for part in value["$tuple"]),
    "$dict": lambda decoder, value, depth: dict(decoder._pairs(value["$dict"], depth)),
    "$mapping": Decoder._mapping,
    "$dtype": lambda decoder, value, depth: parse_dtype(value["$dtype"]),
    "$type": lambda decoder, value, depth: parse_dtype(value["$type"]).type,
    "$torch": lambda decoder, value, depth: _torch_dtype(value["$torch"]),
    "$store": lambda decoder, value, depth: decoder._store(value["$store"]),
    "$device": lambda decoder, value, depth: _device(value["$device"]),
    "$tensor": Decoder._tensor,
    "$space": lambda decoder, value, depth: space_from_json(value["$space"]),
    "$enum": Decoder._enum,
    "$view": Decoder._view,
    "$object": Decoder._object,
}


def _device(name: Any) -> Any:
    """The device, or the CPU where this machine has none of its kind."""
    import torch

    device = torch.device(str(name))
    return device if device.type != "cuda" or torch.cuda.is_available() else torch.device("cpu")


def _torch_dtype(name: Any) -> Any:
    import torch

    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype):
        raise FileFormatError(f"{name!r} is no dtype of torch")
    return dtype


def our_class(name: Any) -> type[Any]:
    """A class of this library by its name; nobody else's code is ever imported."""
    module, _, path = str(name).partition(":")
    if not _MODULE.fullmatch(module) or "__" in module or "." in path:
        raise FileFormatError(f"{name!r} is no class of this library")
    try:
        kind = getattr(importlib.import_module(module), path)
    except (ImportError, AttributeError) as problem:
        raise FileFormatError(f"{name!r} is unknown here; update sb3-extra-buffers") from problem
    if not isinstance(kind, type) or kind.__module__ != module:
        raise FileFormatError(f"{name!r} is no class of this library")
    return kind


def set_state(made: Any, state: dict[str, Any]) -> None:
    for key in state:
        # a value in place of a method would only show when it is called
        if key.startswith("__") or callable(getattr(type(made), key, None)):
            raise FileFormatError(f"{type(made).__name__} has no attribute {key!r} to load")
    if hasattr(made, "__setstate__"):
        made.__setstate__(state)
    else:
        vars(made).update(state)
