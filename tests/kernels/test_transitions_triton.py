"""Drawing, gathering and transforming: the Triton kernels agree with the references, and those with plain loops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from sb3_extra_buffers.kernels.images_torch import ImageTransform
from sb3_extra_buffers.kernels.transitions_torch import Endings, TorchTransitions
from tests.kernels.test_sum_tree_triton import KINDS


def transitions_class(kind: tuple[str, str]) -> type[TorchTransitions]:
    if kind[0] == "torch":
        return TorchTransitions
    from sb3_extra_buffers.kernels.transitions_triton import TritonTransitions

    return TritonTransitions


def image_class(kind: tuple[str, str]) -> type[ImageTransform]:
    if kind[0] == "torch":
        return ImageTransform
    from sb3_extra_buffers.kernels.images_triton import TritonImageTransform

    return TritonImageTransform


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_columns", [0, 3, 8])
@pytest.mark.parametrize("n_added", [20, 60, 80])
def test_transitions_are_drawn_among_those_held_and_gathered(
    kind: tuple[str, str], n_columns: int, n_added: int
) -> None:
    rng = np.random.default_rng(n_added)
    device, n_transitions = kind[1], 60
    dtypes: list[Any] = [np.float32, np.bool_, np.int64, np.uint8, np.float64, np.int16, np.complex128, np.float32]
    shapes: list[tuple[int, ...]] = [(), (), (3,), (21,), (), (2, 2), (2,), (1,)]
    arrays: list[Any] = [
        rng.integers(0, 200, (n_transitions, *shape)).astype(dtype)
        for shape, dtype in zip(shapes[:n_columns], dtypes, strict=False)
    ]
    columns = [torch.zeros_like(torch.as_tensor(array), device=device).view(n_transitions, -1) for array in arrays]
    counts = torch.zeros(2, dtype=torch.int64, device=device)
    transitions = transitions_class(kind)(counts, 20, columns, n_transitions)
    for first in range(0, n_transitions, 20):
        values = [torch.as_tensor(array[first : first + 20], device=device) for array in arrays]
        transitions.write(first, values, n_added, min(n_added, n_transitions))
    assert counts.tolist() == [n_added, min(n_added, n_transitions)]
    uniform = rng.random(150)
    uniform[:2] = 0, np.nextafter(1, 0)
    indices = torch.full((2, 150), -7, device=device)
    outs = [torch.empty((150, *array.shape[1:]), dtype=column.dtype, device=device)
            for array, column in zip(arrays, columns, strict=True)]  # fmt: skip

    transitions.gather(torch.as_tensor(uniform, device=device), indices, outs)

    expected = (uniform * min(n_added, n_transitions)).astype(np.int64)
    np.testing.assert_array_equal(indices.cpu(), [expected, expected + n_transitions])
    for array, out in zip(arrays, outs, strict=True):
        np.testing.assert_array_equal(out.cpu(), array[expected])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_truncations", [False, True])
@pytest.mark.parametrize("n_added", [30, 63])
def test_returns_stop_at_the_end_of_an_episode_and_at_the_newest_step(
    kind: tuple[str, str], has_truncations: bool, n_added: int
) -> None:
    rng = np.random.default_rng(3)
    device, n_envs, n_transitions, n_steps, gamma = kind[1], 3, 45, 4, 0.9
    rewards = rng.normal(size=n_transitions).astype(np.float32)
    dones, truncations = (rng.random((2, n_transitions)) < 0.15).astype(np.float32)
    powers = gamma ** np.arange(n_steps + 1, dtype=np.float32)
    counts = torch.tensor([n_added, min(n_added, n_transitions)], device=device)
    on_device: Any = [torch.as_tensor(part, device=device) for part in (rewards, dones, truncations, powers)]
    ends = Endings(on_device[0], on_device[1], on_device[2] if has_truncations else None, on_device[3])
    values = torch.arange(n_transitions, device=device).view(-1, 1)
    transitions = transitions_class(kind)(counts, n_envs, [values, values], n_transitions, ends, [False, True])
    first = np.arange(min(n_added, n_transitions))
    indices = torch.full((2, len(first)), -7, device=device)
    indices[0] = torch.as_tensor(first)
    outs = [torch.empty_like(indices[0]) for _ in range(2)]
    returns, discounts = torch.empty((2, len(first)), device=device)

    transitions.gather(None, indices, outs, returns, discounts)

    for i in first:
        total, count, at = np.float32(0), 0, i
        while True:
            total, last = total + rewards[at] * powers[count], at
            count += 1
            is_newest = at // n_envs == (n_added // n_envs - 1) % (n_transitions // n_envs)
            if dones[at] or (has_truncations and truncations[at]) or is_newest or count == n_steps:
                break
            at = (at + n_envs) % n_transitions
        assert [outs[0][i].item(), outs[1][i].item(), indices[1, i].item()] == [i, last, last + n_transitions]
        assert returns[i].item() == total
        assert discounts[i].item() == powers[count]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(("dtype", "scale"), [(torch.float32, 1 / 255), (torch.float16, 2.0), (torch.uint8, None)])
@pytest.mark.parametrize("pad", [0, 2])
def test_images_are_padded_by_replication_cropped_and_scaled(
    kind: tuple[str, str], channels_last: bool, dtype: torch.dtype, scale: float | None, pad: int
) -> None:
    rng = np.random.default_rng(pad)
    shape = (11, 9, 3) if channels_last else (3, 11, 9)
    images, uniform = rng.integers(0, 256, (5, *shape), np.uint8), rng.random((5, 2))
    uniform[0] = 0, np.nextafter(1, 0)
    transform = image_class(kind)(shape, dtype, scale, pad, channels_last, torch.device(kind[1]))
    out = torch.full((5, *shape), 99, dtype=dtype, device=kind[1])

    transform.apply(torch.as_tensor(images, device=kind[1]), torch.as_tensor(uniform, device=kind[1]), out)

    axes = (1, 2) if channels_last else (2, 3)
    widths = [(pad, pad) if axis in axes else (0, 0) for axis in range(4)]
    padded = np.pad(images, widths, mode="edge")
    for i, (down, right) in enumerate((uniform * (2 * pad + 1)).astype(int)):
        rows, columns = slice(down, down + 11), slice(right, right + 9)
        cropped = padded[i][rows, columns] if channels_last else padded[i][:, rows, columns]
        expected = torch.as_tensor(cropped.astype(np.float32)) * (1.0 if scale is None else scale)
        assert torch.equal(out[i].cpu(), expected.to(dtype))
