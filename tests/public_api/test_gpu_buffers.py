"""The documented imports, signatures and helpers of `sb3_extra_buffers.gpu_buffers`."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import ReplayBuffer, RolloutBuffer

import sb3_extra_buffers.gpu_buffers as module
from sb3_extra_buffers.codecs.registry import is_available, parse_method
from sb3_extra_buffers.errors import CodecLevelError, HeapFullError, UnknownCodecError
from sb3_extra_buffers.gpu_buffers import (
    BaseGpuBuffer,
    DenseObservationStore,
    GpuReplayBuffer,
    GpuRolloutBuffer,
    RawBuffer,
    RawObservationStore,
    SharedRawHeap,
    SlotMetadata,
    create_observation_store,
    find_gpu_buffer_dtypes,
    has_zstd,
)
from sb3_extra_buffers.gpu_buffers.compression import GpuCompressionMethod, GpuCompressionMethods
from sb3_extra_buffers.gpu_buffers.metadata import arr_config_length
from sb3_extra_buffers.gpu_buffers.raw_buffer import read_at, write_at
from sb3_extra_buffers.gpu_buffers.size_estimation import save_ratio
from sb3_extra_buffers.gpu_buffers.utils import (
    estimate_max_slot_bytes,
    estimate_total_heap_bytes,
    find_smallest_dtype,
    numpy_dtype_to_torch,
    torch_dtype_element_size,
    torch_dtype_to_numpy,
)

ROOT = Path(__file__).parents[2]
SIGNATURES = [
    (
        GpuReplayBuffer,
        "buffer_size observation_space action_space device=auto n_envs=1 optimize_memory_usage=False "
        "handle_timeout_termination=True dtypes=None normalize_images=False compression_method=none "
        "compression_kwargs=None decompression_kwargs=None output_dtype=raw buffer_device=None heap_bytes=None "
        "max_slot_bytes=None prefer=None sampling=numpy",
    ),
    (
        GpuRolloutBuffer,
        "buffer_size observation_space action_space device=auto gae_lambda=1 gamma=0.99 n_envs=1 dtypes=None "
        "normalize_images=False compression_method=none compression_kwargs=None decompression_kwargs=None "
        "buffer_device=None heap_bytes=None max_slot_bytes=None prefer=None sampling=numpy",
    ),
    (GpuReplayBuffer.add, "self obs next_obs action reward done infos"),
    (GpuReplayBuffer.reconstruct_obs, "self idx env_idx"),
    (GpuReplayBuffer.reconstruct_nextobs, "self idx env_idx"),
    (GpuRolloutBuffer.reset, "self"),
    (GpuRolloutBuffer.add, "self obs action reward episode_start value log_prob"),
    (GpuRolloutBuffer.get, "self batch_size=None"),
    (GpuRolloutBuffer.reconstruct_obs, "self idx"),
    (RawBuffer, "size device=cpu"),
    (RawBuffer.write_bytes, "self malloc tensor"),
    (RawBuffer.read_bytes, "self malloc dtype"),
    (RawBuffer.read_into, "self malloc tensor"),
    (RawBuffer.copy_region, "self src_start length dst_start"),
    (SharedRawHeap, "n_cells heap_bytes device=cpu"),
    (SharedRawHeap.compact, "self"),
    (SharedRawHeap.ensure_space, "self needed"),
    (SlotMetadata, "byte_start pos_runs pos_elem run_length payload_bytes"),
    (
        BaseGpuBuffer,
        "compression_method=None compression_kwargs=None decompression_kwargs=None flatten_config=None",
    ),
    (find_gpu_buffer_dtypes, "obs_shape elem_dtype=torch.uint8 compression_method=rle"),
    (has_zstd, ""),
    (arr_config_length, "arr_configs"),
    (write_at, "buffer byte_start rel_byte_offset tensor"),
    (read_at, "buffer byte_start rel_byte_offset elem_count dtype"),
    (DenseObservationStore, "buffer_size n_envs flat_len elem_type device"),
    (
        RawObservationStore,
        "buffer_size n_envs flat_len elem_type device field_offset compress decompress compression_method=rle "
        "runs_type=torch.uint16 shared_heap=None n_fields=1",
    ),
    (
        create_observation_store,
        "compression_method buffer_size n_envs flat_len elem_type device field_offset=0 compress=None decompress=None "
        "runs_type=torch.uint16 shared_heap=None n_fields=1",
    ),
    (find_smallest_dtype, "max_val signed=False fallback=torch.float32"),
    (torch_dtype_element_size, "dtype"),
    (
        estimate_max_slot_bytes,
        "flat_len elem_type runs_type compression_method overalloc_factor=1.5 compresslevel=None",
    ),
    (
        estimate_total_heap_bytes,
        "n_cells flat_len elem_type runs_type compression_method overalloc_factor=1.5 compresslevel=None",
    ),
    (numpy_dtype_to_torch, "dtype"),
    (torch_dtype_to_numpy, "dtype"),
]


def spelled(parameter: inspect.Parameter) -> str:
    no_default = parameter.default is inspect.Parameter.empty
    return parameter.name if no_default else f"{parameter.name}={parameter.default}"


@pytest.mark.parametrize(("function", "wanted"), SIGNATURES, ids=lambda value: getattr(value, "__qualname__", ""))
def test_signatures(function: object, wanted: str) -> None:
    found = inspect.signature(function).parameters.values()  # type: ignore[arg-type]  # any callable
    assert " ".join(map(spelled, found)) == wanted
    assert function.__doc__


def test_all_names_exist() -> None:
    assert sorted(module.__all__) == list(module.__all__)
    assert issubclass(GpuReplayBuffer, ReplayBuffer)
    assert issubclass(GpuReplayBuffer, BaseGpuBuffer)
    assert issubclass(GpuRolloutBuffer, RolloutBuffer)
    assert GpuCompressionMethods is GpuCompressionMethod


def test_raw_buffer() -> None:
    buffer = RawBuffer(32)
    buffer.write_bytes((4, 8), th.tensor([1, -1], dtype=th.int32))
    assert buffer.read_bytes((4, 8), th.int32).tolist() == [1, -1]
    write_at(buffer, 4, 9, th.tensor([7], dtype=th.int64))
    assert read_at(buffer, 4, 9, 1, th.int64).tolist() == [7]  # at an odd place
    target = th.zeros(3, dtype=th.int32)
    buffer.read_into((4, 8), target)
    assert target.tolist() == [1, -1, 0]
    buffer.copy_region(4, 8, 6)  # onto itself
    assert read_at(buffer, 6, 0, 2, th.int32).tolist() == [1, -1]
    with pytest.raises(IndexError, match="outside"):
        buffer.read_bytes((30, 8), th.uint8)
    with pytest.raises(ValueError, match="do not fit"):
        buffer.read_into((0, 8), th.zeros(1, dtype=th.int32))


@pytest.mark.parametrize("method", ["none", "rle", "gzip1"])
def test_stores_one_by_one(method: str) -> None:
    store = create_observation_store(method, 6, 2, 40, th.int16, "cpu")
    random = np.random.default_rng(0)
    rows = th.from_numpy(random.integers(-3, 3, (6, 2, 40)).astype(np.int16))
    for _ in range(3):  # written over twice
        for pos in range(6):
            for env in range(2):
                store.write(pos, env, rows[pos, env])
    assert th.equal(store.read(3, 1), rows[3, 1])
    store.flatten()
    flat = rows.swapaxes(0, 1).reshape(-1, 40)
    for index in range(12):
        assert th.equal(store.read_flat(index), flat[index])
    if isinstance(store, RawObservationStore):
        store.compact()
        assert store.heap.data_end == sum(store.heap.lengths)
        assert th.equal(store.read(5, 0), rows[5, 0])


def test_a_shared_heap_compacts_and_refuses() -> None:
    heap = SharedRawHeap(4, 100)
    payloads = [th.full((30,), value, dtype=th.uint8) for value in range(4)]
    for cell in range(3):
        heap.put(cell, payloads[cell])
    heap.put(1, payloads[3][:10])  # only fits where cells are
    assert heap.data_end == 100
    heap.ensure_space(25)
    assert heap.data_end == sum(heap.lengths) == 70
    for cell, value in ((0, 0), (1, 3), (2, 2)):
        found = read_at(heap.buffer, heap.start_idx[cell], 0, heap.lengths[cell], th.uint8)
        assert (found == value).all()
    with pytest.raises(HeapFullError, match="70 of 100"):
        heap.put(3, payloads[3].repeat(2))
    assert heap.lengths[3] == 0


def test_dtypes() -> None:
    assert find_gpu_buffer_dtypes((84, 84, 4)) == {"elem_type": th.uint8, "runs_type": th.uint16}
    assert find_gpu_buffer_dtypes(7, th.float32, "delta") == {"elem_type": th.float32, "runs_type": th.uint8}
    with pytest.raises(UnknownCodecError):
        find_gpu_buffer_dtypes(7, th.uint8, "made-up")
    assert find_smallest_dtype(255) is th.uint8
    assert find_smallest_dtype(256) is th.uint16
    assert find_smallest_dtype(128, signed=True) is th.int16
    assert find_smallest_dtype(1 << 70) is th.float32
    for dtype in (np.uint8, np.int64, np.float32, np.bool_):
        assert torch_dtype_to_numpy(numpy_dtype_to_torch(dtype)) == np.dtype(dtype)
    assert torch_dtype_element_size(th.float64) == 8
    assert arr_config_length({"size": 12}) == arr_config_length({"shape": (3, 4)}) == 12


@pytest.mark.parametrize(
    "method", ["none", "rle", "gzip0", "gzip9", "igzip3", "zstd", "zstd22", "zstd-100", "lz4-frame/-9", "lz4-block/12"]
)
def test_estimates_hold_the_worst_case(method: str) -> None:
    per_slot = estimate_max_slot_bytes(28224, th.uint8, th.uint16, method)
    assert per_slot >= 28224
    assert estimate_total_heap_bytes(10, 28224, th.uint8, th.uint16, method) == 10 * per_slot


def test_overalloc_factor_counts_above_the_worst_case() -> None:
    def estimate(factor: float) -> int:
        return estimate_max_slot_bytes(28224, th.uint8, th.uint16, "gzip0", overalloc_factor=factor)

    assert estimate(1) == estimate(1.5) < estimate(6) < estimate(12)
    assert estimate(12) == pytest.approx(12 * 28224 * save_ratio("gzip0"), abs=1)


@pytest.mark.parametrize("rollout", [False, True])
@pytest.mark.parametrize(
    "method", ["none", "rle", "gzip0", "gzip1", "igzip0", "zstd", "zstd-5", "lz4-frame/1", "lz4-block/1"]
)
def test_noise_fits_a_buffer_with_the_estimated_heap(method: str, rollout: bool) -> None:
    if not is_available(parse_method(method)[0]):
        pytest.skip(f"{method} is not installed")
    space, n_steps, n_envs = spaces.Box(0, 255, (4, 12, 12), np.uint8), 5, 2
    n_cells = n_steps * n_envs * (1 if rollout else 2)
    runs_type = find_gpu_buffer_dtypes(space.shape, th.uint8, method)["runs_type"]
    heap_bytes = estimate_total_heap_bytes(n_cells, 576, th.uint8, runs_type, method)
    options: Any = {"n_envs": n_envs, "compression_method": method, "heap_bytes": heap_bytes}
    random = np.random.default_rng(0)
    buffer: Any = (
        GpuRolloutBuffer(n_steps, space, spaces.Discrete(2), "cpu", **options)
        if rollout
        else GpuReplayBuffer(n_steps * n_envs, space, spaces.Discrete(2), "cpu", **options)
    )
    zeros, ones = np.zeros(n_envs), th.ones(n_envs)
    for step in range(4 * n_steps):
        obs, next_obs = random.integers(0, 256, (2, n_envs, 4, 12, 12), np.uint8)
        if rollout:
            if step % n_steps == 0:
                buffer.reset()
            buffer.add(obs, zeros, zeros, zeros, ones, ones)
        else:
            buffer.add(obs, next_obs, zeros, zeros, zeros, [{}] * n_envs)
            np.testing.assert_array_equal(buffer.reconstruct_nextobs(step % n_steps, 1), next_obs[1].ravel())


@pytest.mark.parametrize("method", ["gzip10", "igzip4", "zstd23", "zstd-101", "lz4-frame/17", "lz4-block/13"])
def test_unknown_levels_are_refused(method: str) -> None:
    with pytest.raises(ValueError, match="level must be") as problem:
        estimate_max_slot_bytes(100, th.uint8, th.uint8, method)
    assert isinstance(problem.value, CodecLevelError)
    with pytest.raises(CodecLevelError):
        estimate_max_slot_bytes(100, th.uint8, th.uint8, "gzip", compresslevel=77)


def test_the_heuristic_is_what_its_script_fits() -> None:
    script = ROOT / "scripts" / "fit_heap_heuristic.py"
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    source = (ROOT / "src/sb3_extra_buffers/gpu_buffers/size_estimation.py").read_text()
    assert ran.stdout
    assert ran.stdout in source


def test_levels_between_the_measured_ones_lie_between() -> None:
    assert save_ratio("gzip0") > save_ratio("gzip1") > save_ratio("gzip3") >= save_ratio("gzip9")
    assert save_ratio("zstd-100") > save_ratio("zstd-30") > save_ratio("zstd-10") > save_ratio("zstd4")


@pytest.mark.parametrize("rollout", [False, True])
def test_compression_kwargs_reach_the_codec(rollout: bool) -> None:
    pytest.importorskip("zstandard", exc_type=ImportError)
    space = spaces.Box(0, 255, (4, 20, 20), np.uint8)
    random = np.random.default_rng(0)
    held = []
    for kwargs in ({}, {"level": 22}):
        arguments: Any = (64, space, spaces.Discrete(2), "cpu")
        options: Any = {"compression_method": "zstd", "compression_kwargs": kwargs}
        buffer: Any = (GpuRolloutBuffer if rollout else GpuReplayBuffer)(*arguments, **options)
        assert buffer.compression_method == "zstd"
        assert buffer.compression_kwargs == kwargs
        for _ in range(64):
            obs = np.repeat(random.integers(0, 4, (1, 4, 20, 4)), 5, axis=3).astype(np.uint8)
            if rollout:
                one = th.zeros(1)
                buffer.add(obs, np.zeros((1, 1)), np.zeros(1), np.zeros(1), one, one)
            else:
                buffer.add(obs, obs, np.zeros((1, 1)), np.zeros(1), np.zeros(1), [{}])
        held.append(buffer.memory_usage().payload)

    assert held[1] < 0.8 * held[0]


def test_a_full_heap_still_replaces_an_observation() -> None:
    heap = SharedRawHeap(2, 20)
    heap.put(0, th.arange(12, dtype=th.uint8))
    heap.put(1, th.arange(8, dtype=th.uint8) + 100)

    heap.put(0, th.arange(12, dtype=th.uint8) + 50)

    assert heap.live_bytes == heap.lengths.sum() == 20
    for cell, first in ((0, 50), (1, 100)):
        found = read_at(heap.buffer, heap.start_idx[cell], 0, heap.lengths[cell], th.uint8)
        assert found.tolist() == list(range(first, first + len(found)))
    with pytest.raises(HeapFullError):
        heap.put(1, th.zeros(9, dtype=th.uint8))
    assert heap.lengths.tolist() == [12, 8]


@pytest.mark.parametrize("method", ["rle", "rle-jit", "lz4-block/1", "gzip6", "igzip1", "zstd", "zstd22"])
@pytest.mark.parametrize("flat_len", [100, 28_224, 230_400])
def test_noise_fits_into_the_heap_that_is_estimated(method: str, flat_len: int) -> None:
    if not is_available(method.rstrip("0123456789/")):
        pytest.skip(f"{method} is not installed")
    store: Any = create_observation_store(method, 4, 1, flat_len, th.uint8, "cpu")
    noise = th.from_numpy(np.random.default_rng(0).integers(0, 256, (4, flat_len)).astype(np.uint8))
    for turn in range(2):
        for step in range(4):
            store.write(step, 0, noise[(step + turn) % 4])

    for step in range(4):
        assert th.equal(store.read(step, 0), noise[(step + 1) % 4])


def test_none_has_no_level_to_estimate() -> None:
    with pytest.raises(ValueError, match="none has no levels, got 3"):
        estimate_max_slot_bytes(1000, th.uint8, th.uint16, "none3")


def test_bytes_are_read_into_a_tensor_of_any_layout() -> None:
    buffer = RawBuffer(8)
    buffer.write_bytes((0, 8), th.arange(8, dtype=th.uint8))
    target = th.zeros(4, 2, dtype=th.uint8).T

    buffer.read_into((0, 8), target)

    assert target.flatten().tolist() == list(range(8))
