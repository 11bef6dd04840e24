"""The codec contract, for every registered codec whose package is installed."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from sb3_extra_buffers.codecs import ObsSpec, available_codecs, get_codec, parse_method
from tests.contracts import codec as contract
from tests.contracts.codec import METHODS, SPECS, build, sample_rows

FRAME = ObsSpec((40, 40, 3), np.dtype(np.uint8))


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_round_trip_and_payload_bound(method: str, spec: ObsSpec) -> None:
    codec, rows = build(method, spec), sample_rows(spec)

    contract.check_round_trip(codec, rows)
    contract.check_bound(codec, rows)


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("name", available_codecs())
def test_decode_heap_agrees_with_decode_batch(name: str, spec: ObsSpec) -> None:
    contract.check_heap(build(name, spec), sample_rows(spec))


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("name", available_codecs())
def test_empty_batch(name: str, spec: ObsSpec) -> None:
    codec, empty = build(name, spec), np.empty((0, spec.nbytes), np.uint8)

    assert codec.encode_batch(empty) == []
    codec.decode_batch([], empty)


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("name", available_codecs())
def test_equal_rows_give_equal_payloads(name: str, spec: ObsSpec) -> None:
    contract.check_deterministic(build(name, spec), sample_rows(spec))


@pytest.mark.parametrize("method", METHODS)
def test_codec_is_rebuilt_from_its_configuration(method: str) -> None:
    contract.check_is_its_configuration(build(method, FRAME), parse_method(method)[0], sample_rows(FRAME))


@pytest.mark.parametrize("name", available_codecs())
def test_payloads_outside_the_heap_are_refused(name: str) -> None:
    contract.check_refuses_payloads_outside(build(name, FRAME), sample_rows(FRAME))


@pytest.mark.parametrize("spec", [FRAME, SPECS[5], SPECS[11]], ids=str)
@pytest.mark.parametrize("name", available_codecs())
def test_damaged_payloads_do_no_harm(name: str, spec: ObsSpec) -> None:
    contract.check_survives_damage(build(name, spec), sample_rows(spec))


@pytest.mark.parametrize("name", available_codecs())
def test_payload_of_a_larger_row_is_refused_without_allocating(name: str) -> None:
    contract.check_refuses_rows_of_another_size(get_codec(name))


@pytest.mark.parametrize("name", available_codecs())
def test_special_floats_survive(name: str) -> None:
    spec = ObsSpec((8,), np.dtype(np.float64))
    batch = np.array([[np.nan, -np.nan, -0.0, 0.0, np.inf, -np.inf, 5e-324, 1.0]])
    batch.view(np.uint64)[0, 0] |= np.uint64(0xBEEF)  # a payload inside the NaN
    codec, out = build(name, spec), np.full((1, spec.nbytes), contract.UNWRITTEN, np.uint8)

    codec.decode_batch([memoryview(payload) for payload in codec.encode_batch(spec.to_rows(batch))], out)

    np.testing.assert_array_equal(spec.from_rows(out).view(np.uint64), batch.view(np.uint64))


@pytest.mark.parametrize("name", available_codecs())
def test_threads_may_share_a_codec(name: str) -> None:
    codec, rows = build(name, FRAME), sample_rows(FRAME)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: contract.check_round_trip(codec, rows), range(16)))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_child_encodes_and_decodes() -> None:
    script = """
        import os
        import numpy as np
        from sb3_extra_buffers.codecs import available_codecs
        from tests.contracts import codec as contract
        from tests.codecs.test_contract import FRAME

        rows = contract.sample_rows(FRAME)
        # a table is not for images of bytes
        names = [name for name in available_codecs() if name != "table"]
        codecs = [contract.train(contract.build(name, FRAME), rows) for name in names]
        for codec in codecs:
            contract.check_round_trip(codec, rows)
        child = os.fork()
        for codec in codecs:
            contract.check_round_trip(codec, rows)
        if child:
            assert os.waitpid(child, 0)[1] == 0
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=120)


@pytest.mark.parametrize("name", available_codecs())
def test_trained_codec_keeps_the_contract(name: str) -> None:
    rows = sample_rows(FRAME)
    codec = get_codec(name, dictionary=2048).bind(FRAME) if name == "zstd" else build(name, FRAME)
    codec = contract.train(codec, rows)

    contract.check_round_trip(codec, rows)
    contract.check_bound(codec, rows)
    contract.check_heap(codec, rows)
    contract.check_is_its_configuration(codec, name, rows)
    contract.check_survives_damage(codec, rows, n=20)
