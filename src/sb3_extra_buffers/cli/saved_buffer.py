"""A saved buffer read without SB3 and torch, which take seconds to import."""

from __future__ import annotations

import contextlib
import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers._sb3.report import ReportingBuffer
from sb3_extra_buffers._sb3.sum_tree import SumTree
from sb3_extra_buffers.codecs.spec import ObsSpec
from sb3_extra_buffers.files import registry
from sb3_extra_buffers.files.parts import LoadedParts, make_view
from sb3_extra_buffers.files.spaces import space_from_json
from sb3_extra_buffers.stores.checks import column, require, whole
from sb3_extra_buffers.stores.usage import MemoryUsage
from sb3_extra_buffers.stores.view import StoreView

Array = npt.NDArray[Any]

_OBSERVATIONS = ("observations", "next_observations")
# columns that the class which a buffer replaces does not have
_NOT_SB3S = frozenset({"current_ep_start", "infos", "priorities", "is_first", "next_is_first", "unseen_steps"})


class SavedBuffer(ReportingBuffer):
    """What was saved of a buffer with SB3's layout, read-only, under the names of SB3's attributes.

    Attributes:
        columns: Everything but observations, by name.
        observations: A view or an array ``(buffer_size, n_envs, ...)``; a dict of them for a Dict space.
    """

    def __init__(self, parts: LoadedParts) -> None:
        self.kind = parts.kind
        self._obs_per_transition = 1 if "rollout" in parts.kind else 2
        self.buffer_size, self.n_envs = parts.number("steps", low=1), parts.number("n_envs", low=1)
        self.full = parts.entry("state", "full", kind=bool)
        self.pos = parts.number("state", "pos", stop=self.buffer_size + 1)
        n_written = self.buffer_size if self.full else self.pos
        self.n_evicted = whole(parts.entry("state").get("n_evicted", 0), "n_evicted", stop=n_written + 1)
        #: How many steps were ever added; None if that was not saved.
        self.n_added = parts.entry("state").get("n_added")
        self.observation_space = space_from_json(parts.entry("observation_space"))
        self.action_space = space_from_json(parts.entry("action_space"))
        lead = self.buffer_size, self.n_envs
        # the sizes of other columns vary
        column(parts.columns, "rewards", np.float32, lead)
        self.columns: dict[str, Array] = {}
        by_key: dict[str, dict[str, Any]] = {}
        for name, array in parts.columns.items():
            attribute, _, key = name.partition(".")
            if attribute in _OBSERVATIONS:
                require(array.shape[:2] == lead, f"{name} has shape {array.shape}, expected {lead} observations")
                by_key.setdefault(attribute, {})[key] = array
            else:
                self.columns[name.removeprefix("extra/")] = array
        keys: Any = getattr(self.observation_space, "spaces", {"": self.observation_space})
        count = math.prod(lead)
        for name, store in parts.stores.items():
            attribute, _, key = name.partition(".")
            require(key in keys, f"the observation space has no key {key!r}")
            # one store holds the observations, followed by the next observations
            for number in range(store.n_obs // count):
                view = make_view(StoreView, store, lead, number * count, dtype=np.dtype(keys[key].dtype))
                by_key.setdefault("next_" * number + attribute, {})[key] = view
        for attribute, leaves in by_key.items():
            require(leaves.keys() == keys.keys(), f"{attribute} has the keys {[*leaves]}, expected {[*keys]}")
            setattr(self, attribute, leaves[""] if "" in leaves else {key: leaves[key] for key in keys})
        require("observations" in by_key, "there are no observations")

    observations: Any

    def __getattr__(self, name: str) -> Any:
        try:
            return vars(self)["columns"][name]
        except KeyError:
            raise AttributeError(f"a saved {type(self).__name__} has no {name!r}") from None

    def size(self) -> int:
        """How many steps of every environment it holds."""
        return (self.buffer_size if self.full else self.pos) - self.n_evicted

    # ---- memory, as the class that was saved would report it ----

    @property
    def lock(self) -> Any:
        return contextlib.nullcontext()

    def _leaves(self) -> dict[str, Any]:
        return self.observations if isinstance(self.observations, dict) else {"": self.observations}

    def _observation_specs(self) -> dict[str, ObsSpec]:
        return {key: ObsSpec(leaf.shape[2:], leaf.dtype) for key, leaf in self._leaves().items()}

    def _observation_usage(self, n_written: int) -> MemoryUsage:
        total = MemoryUsage()
        for key, leaf in self._leaves().items():
            if isinstance(leaf, StoreView):
                usage = leaf.memory_usage()
                total += replace(usage, codecs={key: usage.codecs[""]})
            else:
                total += MemoryUsage(self._obs_per_transition * leaf[:n_written].nbytes, codecs={key: "none"})
        return total

    def _columns(self) -> dict[str, Array]:
        columns = {
            name: column
            for name, column in self.columns.items()
            if len(column) == self.buffer_size and name not in _NOT_SB3S and not name.startswith("states/")
        }
        if "her-" in self.kind:
            # references to infos, of which files hold the contents
            columns["infos"] = np.broadcast_to(np.intp(0), (self.buffer_size, self.n_envs))
        return columns

    def _extra_bytes(self) -> int:
        # those of buffers of sequences
        own = sum(part.nbytes for name, part in self.columns.items() if name.startswith(("states/", "is_first")))
        return own + (SumTree(self.buffer_size * self.n_envs).nbytes if "priorities" in self.columns else 0)

    def _replaced_class(self) -> str:
        owner = "sb3-contrib's" if self.kind.startswith(("maskable", "recurrent")) else "SB3's"
        name = re.sub("Compressed|Gpu|Prioritized|Sequence|(?<=Dict)NStep", "", registry.class_name(self.kind))
        is_dict = self.kind in ("gpu-replay", "gpu-rollout", "gpu-prioritized-replay", "gpu-sequence-replay")
        is_dict &= isinstance(self.observations, dict)
        return f"{owner} {'Dict' if is_dict else ''}{name}"
