"""`TensorReplayBuffer` in compiled functions and CUDA graphs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from sb3_extra_buffers.errors import GraphCaptureError
from sb3_extra_buffers.tensor_buffers import TensorReplayBuffer, tables
from tests.gpu import never_waits
from tests.tensor_buffers.test_replay_buffer import DEVICES, SHAPE, SPECS, assert_is_of, equal, make, on_device

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("options", [{}, {"alpha": 0.6, "n_steps": 2}, {"image_dtype": torch.float32}])
# torch's own
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_compiled_functions_draw_the_same_batches(device: str, backend: str, options: dict[str, Any]) -> None:
    buffer, game = make(device, **options)
    twin, _ = make(device, **options)

    def train() -> dict[str, torch.Tensor]:
        batch = buffer.sample(16)
        if buffer.alpha is not None:
            buffer.update_priorities(batch["indices"], batch["rewards"] * 2)
        return {**batch, "loss": batch["obs"].float().mean() + batch["rewards"].sum()}

    compiled = torch.compile(train, fullgraph=True, backend=backend)
    for _ in range(3):
        found = compiled()
        expected = twin.sample(16)
        if twin.alpha is not None:
            twin.update_priorities(expected["indices"], expected["rewards"] * 2)
        assert equal({name: found[name] for name in expected}, expected)
        step = on_device(game.step(), device)
        buffer.add(step)
        twin.add(step)
    buffer.check()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_compiled_functions_write_to_given_tensors(device: str) -> None:
    buffer, _ = make(device)
    twin, _ = make(device)
    out = twin.sample(8)
    buffer.sample(8)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def fill() -> None:
        buffer.sample(8, out=out)

    expected = twin.sample(8)
    fill()
    assert equal(out, expected)


# ---- Triton ----


@pytest.mark.skipif(not INTERPRETED, reason="on a CPU, kernels run only under Triton's interpreter")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"alpha": 0.6, "n_steps": 3, "image_dtype": torch.float32, "random_shift": 2},
        {"n_steps": 2, "random_shift": 1},
    ],
)
def test_buffers_with_triton_draw_the_same_batches(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    plain, game = make(n_added=0, **options)
    with monkeypatch.context() as patched:
        patched.setattr(tables, "runs_kernels", lambda _device: True)
        buffer, _ = make(n_added=0, **options)
    assert "Triton" in type(buffer._tables.transitions).__name__
    buffer.check()
    for _ in range(30):
        step: Any = game.step()
        buffer.add(step)
        plain.add(step)
    for _ in range(3):
        batch, expected = buffer.sample(40), plain.sample(40)
        weights, expected_weights = (part.pop("weights", torch.ones(1)) for part in (batch, expected))
        assert equal(batch, expected)
        torch.testing.assert_close(weights, expected_weights)
        if buffer.alpha is not None:
            for each in (buffer, plain):
                each.update_priorities(batch["indices"], batch["rewards"])
    buffer.check()


# ---- CUDA graphs ----


def capture(function: Any) -> Any:
    """``function`` as a CUDA graph, after the warm-up that torch asks for."""
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch's own
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph


@pytest.mark.usefixtures("on_device")
def test_captures_of_what_the_gpu_does_not_decode_alone_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer, early = make(compression_method="gzip")[0], make(n_added=1)[0]
    monkeypatch.setattr(TensorReplayBuffer, "_is_capturing", lambda _buffer: True)

    with pytest.raises(GraphCaptureError, match=r"sampling 'obs' .* the host takes part in decoding gzip"):
        buffer.sample(8)
    with pytest.raises(GraphCaptureError, match="no method is chosen yet; add more steps"):
        early.sample(8)
    with pytest.raises(GraphCaptureError, match="cannot be part of a CUDA graph; call it between replays"):
        buffer.reset()
    assert len(buffer) == 60


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize("method", ["delta", "none"])
@pytest.mark.parametrize(
    "options", [{}, {"alpha": 0.6, "n_steps": 3}, {"image_dtype": torch.float16, "random_shift": 2}]
)
def test_each_replay_draws_a_new_batch_among_all_transitions(device: str, method: str, options: dict[str, Any]) -> None:
    # the default generator: a graph knows it
    buffer, game = make(device, 100, capacity=3000, seed=None, compression_method=method, **options)
    out = buffer.sample(128)

    def train() -> None:
        buffer.sample(128, out=out)
        if buffer.alpha is not None:
            buffer.update_priorities(out["indices"], out["rewards"])

    graph = capture(train)
    seen = set()
    # grows until it is full and wraps around
    for _ in range(1200):
        buffer.add(on_device(game.step(), device))
        graph.replay()
        seen |= set(out["actions"].tolist()) if len(game.steps) > 1100 else set()
    graph.replay()
    buffer.check()
    assert min(seen) >= 300
    assert max(seen) > 3500
    if not options:
        assert_is_of(out, game)
    elif buffer.alpha is not None:
        assert_is_of(out, game, ["obs", "logits"])
        assert buffer.skipped_updates == 0


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize("method", ["delta", "none"])
@pytest.mark.parametrize("options", [{}, {"alpha": 0.6, "n_steps": 3, "image_dtype": torch.float32, "random_shift": 2}])
def test_nothing_waits_for_the_gpu(device: str, method: str, options: dict[str, Any]) -> None:
    buffer, game = make(device, 100, capacity=3000, compression_method=method, **options)
    out = buffer.sample(64)
    steps = [on_device(game.step(), device) for _ in range(20)]
    for step in steps[:10]:
        buffer.add(step)
    if buffer.alpha is not None:
        buffer.update_priorities(out["indices"], out["rewards"])
    torch.cuda.synchronize()
    with never_waits():
        for step in steps[10:]:
            buffer.add(step)
            buffer.sample(64, out=out)
            buffer.sample(64)
            if buffer.alpha is not None:
                buffer.update_priorities(out["indices"], out["rewards"])


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=GPU)])
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_what_cannot_be_captured_says_so(device: str) -> None:
    buffer, game = make(device, 100, capacity=3000)
    step = on_device(game.step(), device)
    # large enough that a method is chosen from the first steps
    early = TensorReplayBuffer(3000, SPECS | {"obs": ((4, 40, 40), torch.uint8)}, 3, device)
    image = torch.zeros((3, 4, 40, 40), dtype=torch.uint8, device=device)
    early.add(step | {"obs": image, "next_obs": image})
    torch.cuda.synchronize()
    for function, message in (
        (lambda: buffer.add(step), r"add\(\) cannot be part of a CUDA graph"),
        (buffer.reset, r"reset\(\) cannot be part of a CUDA graph"),
        (lambda: early.sample(4), "no method is chosen yet; add more steps before the capture"),
    ):
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(GraphCaptureError, match=message), torch.cuda.graph(graph):
            function()
    torch.cuda.synchronize()
    assert buffer.sample(4)["obs"].shape == (4, *SHAPE)
