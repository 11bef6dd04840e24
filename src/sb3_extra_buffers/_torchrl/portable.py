"""How a compressed storage leaves its process: states, pickles, and other processes that have it too."""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
from collections.abc import Mapping
from multiprocessing.context import get_spawning_popen
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils._pytree import tree_map

from sb3_extra_buffers._torchrl.sharing import GroupServer, RemoteGroup
from sb3_extra_buffers._torchrl.stored_tensor import to_numpy
from sb3_extra_buffers.errors import FileFormatError, MissingExtraError, SharingError
from sb3_extra_buffers.files import kinds
from sb3_extra_buffers.files.loading import make
from sb3_extra_buffers.files.parts import flatten, unflatten
from sb3_extra_buffers.stores.locks import fork_safe_lock

try:
    from tensordict import TensorDict, is_tensor_collection
    from torchrl.data.replay_buffers.storages import Storage, TensorStorage
except ImportError as error:
    raise MissingExtraError(
        "CompressedStorage needs 'torchrl' and 'tensordict': pip install 'sb3-extra-buffers[torchrl]'"
    ) from error

if TYPE_CHECKING:
    from sb3_extra_buffers._torchrl.groups import Pilot
    from sb3_extra_buffers._torchrl.transactions import Write

__all__ = ["PortableStorage"]


class PortableStorage(TensorStorage):  # type: ignore[misc]  # torchrl ships no types
    """What a `CompressedStorage` does to be saved, copied and shared.

    It belongs to the process that made it. Those that are started with it ask that one; a forked child reads what was
    there and is refused to write.
    """

    _storage: Any
    device: Any
    groups: list[Any]
    lead: tuple[int, ...]
    _dense: dict[Any, torch.Tensor]
    _pilot: Pilot | None
    _open: Write | None
    announced: Write | None
    _lock: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._count = 0
        # the length, where other processes have this storage too, and who answers them
        self._shared_count: Any = None
        self._server: GroupServer | None = None
        self._owner = os.getpid()
        super().__init__(*args, **kwargs)

    def _leaves(self) -> dict[Any, torch.Tensor]:
        raise NotImplementedError

    def _use_groups(self, groups: list[Any]) -> None:
        raise NotImplementedError

    def recover(self) -> None:
        raise NotImplementedError

    def _check_owner(self) -> None:
        if os.getpid() != self._owner:
            raise SharingError(
                "this CompressedStorage belongs to the process that was forked, and what is written here would be "
                "lost; start processes with 'spawn', or hold the buffer in Ray (CompressedRayReplayBuffer)"
            )

    # TensorStorage keeps it in shared memory from the beginning, which takes a lock to read

    @property
    def _len(self) -> int:
        return self._count if self._shared_count is None else int(self._shared_count.value)

    @_len.setter
    def _len(self, value: int) -> None:
        if self._shared_count is None:
            self._count = int(value)
        else:
            self._shared_count.value = int(value)

    def to_parts(self) -> Any:
        """What a file or a state is given."""
        from sb3_extra_buffers._torchrl.checkpoint import storage_parts

        self.recover()
        if any(isinstance(group, RemoteGroup) for group in self.groups):
            raise SharingError("only the process that holds a shared CompressedStorage can copy or save it")
        return storage_parts(self)

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` of another storage of this size needs; tensors, numbers and text."""
        with self._lock:
            description, arrays = flatten(self.to_parts())
            tensors = {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}
            return {
                "description": description, "arrays": tensors, "initialized": self.initialized, "_len": self._len,
            }  # fmt: skip

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Hold what the storage held whose `state_dict` this is, one of these or of TorchRL's own."""
        from sb3_extra_buffers._torchrl.checkpoint import move, take_over

        if not isinstance(state_dict, Mapping):
            raise FileFormatError(f"a state is a dict, got a {type(state_dict).__name__}")
        if "_storage" in state_dict:
            data, length = state_dict["_storage"], state_dict.get("_len")
            try:
                if not isinstance(data, torch.Tensor):
                    data = TensorDict().load_state_dict(data, strict=False)
            except (RuntimeError, KeyError, TypeError, ValueError, AttributeError) as error:
                raise FileFormatError(f"this is no state of a storage: {error}") from error
            if type(length) is not int or not 0 <= length <= data.numel():
                raise FileFormatError(f"a state of {length!r} items is none")
            take_over(self, data, length)
        else:
            arrays = state_dict.get("arrays")
            if not isinstance(arrays, Mapping) or not all(isinstance(part, torch.Tensor) for part in arrays.values()):
                raise FileFormatError("this is no state of a storage: it has no arrays")
            tables = {name: to_numpy(tensor) for name, tensor in arrays.items()}
            parts = unflatten(state_dict.get("description"), tables, type(self))
            kinds.check_target(parts.kind, type(self))
            move(make(parts), self)
        self._bump_mutation_revision()

    def share(self) -> None:
        """Be ready for processes that are started from now on: this one answers them as long as it has the storage."""
        if not self.initialized:
            raise SharingError(
                "a CompressedStorage cannot be shared between processes while it has not been initialized yet; "
                "store an item first"
            )
        if self._shared_count is not None:
            return
        with self._lock:
            self.recover()
            self._share()

    def _share(self) -> None:
        groups, pilot = self.groups, self._pilot
        n_envs = 1 if pilot is None else pilot.decide()
        if pilot is not None and n_envs > 1:
            # streams do not change any more
            groups = [group.rewrite(n_envs, pilot.held) for group in groups]
        for leaf in self._dense.values():
            leaf.share_memory_()  # type: ignore[no-untyped-call]  # torch's own
        self._use_groups(groups)
        self._server = GroupServer(self) if self.groups else None
        self._shared_count = mp.Value("q", self._count)

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            self.recover()
            return self._frozen_state()

    def _frozen_state(self) -> dict[str, Any]:
        """Everything as it is between two writes, to be pickled or copied whenever it suits."""
        starting = get_spawning_popen() is not None
        if starting:
            self.share()
        elif any(isinstance(group, RemoteGroup) for group in self.groups):
            raise SharingError("only the process that holds a shared CompressedStorage can copy or save it")
        state: dict[str, Any] = Storage.__getstate__(self)
        for name in ("_lock", "_open", "announced", "_server", "_attached_entities_list"):
            state.pop(name, None)
        # decoded if it were pickled as it is; rebuilt from the groups instead
        state["_storage"] = None if self._storage is None else _blank(self._storage)
        if not starting:
            state["_count"], state["_shared_count"] = self._len, None
            # a copy, made now: others may write before this one is used
            state["_dense"] = {key: leaf.clone() for key, leaf in self._dense.items()}
            state["groups"] = pickle.dumps(self.groups, protocol=pickle.HIGHEST_PROTOCOL)
        elif self._server is not None:
            address = self._server.address
            state["groups"] = [RemoteGroup(address, place, group) for place, group in enumerate(self.groups)]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        groups = state.get("groups")
        if isinstance(groups, bytes):
            state = {**state, "groups": pickle.loads(groups)}
        Storage.__setstate__(self, state)
        self._owner = os.getpid()
        self._lock = fork_safe_lock(of_buffer=True)
        self._server = self._open = self.announced = None
        if self._storage is not None:
            leaves = self._leaves()
            if is_tensor_collection(self._storage):
                shape = [self.lead[0], *self._storage.shape[1:]]
                self._storage = self._storage.named_apply(
                    lambda key, value: leaves[key], nested_keys=True, batch_size=shape
                )
            else:
                made = iter(leaves.values())
                self._storage = tree_map(lambda value: next(made), self._storage)


def _blank(storage: Any) -> Any:
    """A stand-in of the same structure that weighs nothing."""

    def empty(value: torch.Tensor) -> torch.Tensor:
        return torch.empty((0, *value.shape[1:]), dtype=value.dtype)

    if is_tensor_collection(storage):
        return storage.apply(empty, batch_size=[0, *storage.shape[1:]])
    return tree_map(empty, storage)
