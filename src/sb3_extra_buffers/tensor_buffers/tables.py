"""What a tensor buffer keeps on its device besides observations: columns, counts and priorities."""

from __future__ import annotations

import numpy as np
import torch

from sb3_extra_buffers.kernels.images_torch import ImageTransform
from sb3_extra_buffers.kernels.sum_tree_torch import TorchSumTree
from sb3_extra_buffers.kernels.transitions_torch import Endings, TorchTransitions
from sb3_extra_buffers.stores.device_base import runs_kernels
from sb3_extra_buffers.tensor_buffers.batches import BatchLayout, Outputs
from sb3_extra_buffers.tensor_buffers.fields import Field
from sb3_extra_buffers.tensor_buffers.options import Settings

__all__ = ["TransitionTables"]


class TransitionTables:
    """Columns ``[step, env, ...]`` and priorities of an empty ring, and the kernels that write and gather them."""

    def __init__(self, settings: Settings, beta: float, device: torch.device) -> None:
        self.settings, self.device = settings, device
        #: Transitions added, and transitions held: on the device, so that a CUDA graph does not freeze them.
        self.counts = torch.zeros(2, dtype=torch.int64, device=device)
        lead = settings.n_ring_steps, settings.n_envs
        self.columns = {
            name: torch.zeros((*lead, *field.shape), dtype=field.dtype, device=device)
            for name, field in settings.columns.items()
        }
        triton = runs_kernels(device)
        self.tree = _make_tree(settings, self.counts, beta, triton)
        # n-step returns are computed in place of rewards, and come last
        last = [settings.columns["rewards"]] if settings.n_steps > 1 else []
        gathered = [field for field in settings.columns.values() if field not in last]
        self.transitions = self._make_transitions(gathered, triton)
        transforms = [_make_transform(settings, field, device, triton) for field in settings.observations.values()]
        self.layout = BatchLayout(
            list(settings.observations.values()), transforms, gathered + last, settings.extras(), device
        )
        if triton:
            self._compile_kernels()

    def _make_transitions(self, gathered: list[Field], triton: bool) -> TorchTransitions:
        settings = self.settings
        flat = {name: column.view(settings.capacity, -1) for name, column in self.columns.items()}
        endings = None
        if settings.n_steps > 1:
            # as SB3 computes them
            powers = settings.gamma ** np.arange(settings.n_steps + 1, dtype=np.float32)
            truncations = flat["truncations"].view(-1) if "truncations" in flat else None
            discounts = torch.from_numpy(powers).to(self.device)
            endings = Endings(flat["rewards"].view(-1), flat["dones"].view(-1), truncations, discounts)
        at_end = [endings is not None and field.name in ("dones", "truncations") for field in gathered]
        columns = [flat[field.name] for field in gathered]
        cls: type[TorchTransitions] = TorchTransitions
        if triton:
            from sb3_extra_buffers.kernels.transitions_triton import TritonTransitions  # optional: needs Triton

            cls = TritonTransitions
        return cls(self.counts, settings.n_envs, columns, settings.capacity, endings, at_end)

    def _compile_kernels(self) -> None:
        """Launch every kernel once while the buffer is empty: Triton compiles it now, rather than during training."""
        layout = self.layout
        outs, scratch = layout.allocate(2), layout.allocate_scratch(2)
        scratch.uniform.zero_()
        zeros = [torch.zeros_like(self.columns[field.name][0]) for field in layout.columns]
        self.transitions.write(0, zeros, 0, 0)
        if self.tree is not None:
            self.tree.compile_kernels(scratch.uniform[:2], scratch.indices[0], *outs.extras[-2:])
        self.gather(scratch.uniform[:2] if self.tree is None else None, scratch.indices, outs)
        for transform, stored, pair in zip(layout.transforms, scratch.stored, outs.pairs, strict=True):
            if transform is not None and stored is not None and pair is not None:
                transform.apply(stored[0], torch.zeros((2, 2), dtype=torch.float64, device=self.device), pair[0])

    # ---- writing ----

    def write(self, step: int, values: list[torch.Tensor], n_added: int, n_held: int) -> None:
        """Write a step, with values in the order of the layout, and the counts; idempotent."""
        first, n_envs = step * self.settings.n_envs, self.settings.n_envs
        if self.tree is not None:
            self.tree.fill(first, n_envs)
        self.transitions.write(first, values, n_added, n_held)

    def write_counts(self, n_added: int, n_held: int) -> None:
        self.counts.copy_(torch.tensor([n_added, n_held]))

    # ---- reading ----

    def draw(self, uniform: torch.Tensor, indices: torch.Tensor, outs: Outputs) -> None:
        """Draw transitions with the random numbers ``uniform``; write ``indices`` and everything but observations."""
        if self.tree is None:
            self.gather(uniform, indices, outs)
        else:
            self.tree.draw(uniform, indices[0], *outs.extras[-2:])
            self.gather(None, indices, outs)

    def gather(self, uniform: torch.Tensor | None, indices: torch.Tensor, outs: Outputs) -> None:
        if self.settings.n_steps > 1:
            self.transitions.gather(uniform, indices, outs.columns[:-1], outs.columns[-1].view(-1), outs.extras[0])
        else:
            self.transitions.gather(uniform, indices, outs.columns)

    # ---- reports ----

    @property
    def bytes_per_transition(self) -> int:
        """Bytes of the columns."""
        return sum(field.nbytes for field in self.settings.columns.values())

    def check(self, n_added: int, n_held: int) -> None:
        """Raise `AssertionError` if the tables contradict each other or the counts of the host."""
        if self.counts.tolist() != [n_added, n_held]:
            raise AssertionError(f"the device counts {self.counts.tolist()}, the host {[n_added, n_held]}")
        if self.tree is not None:
            self.tree.check()
            if int((self.tree.leaves > 0).sum()) != n_held:
                raise AssertionError("a transition has no priority, or a priority no transition")

    # ---- copies ----

    def state(self) -> dict[str, object]:
        """A copy in main memory, to be pickled."""
        state: dict[str, object] = {"columns": {name: _on_host(column) for name, column in self.columns.items()}}
        if self.tree is not None:
            state["priorities"] = _on_host(self.tree.leaves), _on_host(self.tree.max_priority)
        return state

    def restore(self, state: dict[str, object], n_added: int, n_held: int) -> None:
        """Use what `state` returned."""
        columns, priorities = state["columns"], state.get("priorities")
        assert isinstance(columns, dict)
        for name, column in columns.items():
            self.columns[name].copy_(column)
        self.write_counts(n_added, n_held)
        if self.tree is not None:
            assert isinstance(priorities, tuple)
            leaves, highest = priorities
            self.tree.max_priority.copy_(highest)
            self.tree.write_leaves(leaves.to(self.device))


def _make_tree(settings: Settings, counts: torch.Tensor, beta: float, triton: bool) -> TorchSumTree | None:
    if settings.alpha is None:
        return None
    cls: type[TorchSumTree] = TorchSumTree
    if triton:
        from sb3_extra_buffers.kernels.sum_tree_triton import TritonSumTree  # optional: needs Triton

        cls = TritonSumTree
    return cls(settings.capacity, counts, settings.alpha, beta, settings.epsilon)


def _make_transform(settings: Settings, field: Field, device: torch.device, triton: bool) -> ImageTransform | None:
    if not field.is_image or (settings.image_dtype is None and not settings.random_shift):
        return None
    cls: type[ImageTransform] = ImageTransform
    if triton:
        from sb3_extra_buffers.kernels.images_triton import TritonImageTransform  # optional: needs Triton

        cls = TritonImageTransform
    is_scaled = settings.image_dtype is not None
    dtype, scale = settings.image_dtype or field.dtype, settings.scale if is_scaled else None
    return cls(field.shape, dtype, scale, settings.random_shift, settings.channels_last, device)


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("cpu", copy=True)
