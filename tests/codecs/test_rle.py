"""``rle`` and ``rle-jit``: one format, the same payloads, the same errors."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sb3_extra_buffers.codecs import ObsSpec, get_codec, is_available
from sb3_extra_buffers.errors import CorruptPayloadError
from tests.contracts.codec import SPECS, check_round_trip, decode, mutations, sample_rows


@pytest.mark.skipif(not is_available("rle-jit"), reason="numba is not installed")
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_compiled_and_numpy_versions_agree(spec: ObsSpec) -> None:
    reference, compiled, rows = get_codec("rle").bind(spec), get_codec("rle-jit").bind(spec), sample_rows(spec)
    payloads = reference.encode_batch(rows)

    assert compiled.encode_batch(rows) == payloads
    for payload in mutations(payloads[5], seed=0, n=100):
        answers = []
        for codec in (reference, compiled):
            try:
                answers.append(decode(codec, payload, spec.nbytes).tobytes())
            except CorruptPayloadError as error:
                answers.append(str(error).encode())
        assert answers[0] == answers[1]


def test_runs_are_counted_in_elements_of_the_dtype() -> None:
    spec = ObsSpec((100,), np.dtype(np.float64))
    row = spec.to_rows(np.full((1, 100), 0.1))

    (payload,) = get_codec("rle").bind(spec).encode_batch(row)

    assert payload == bytes([100]) + np.float64(0.1).tobytes()


@pytest.mark.parametrize("n_elem", [255, 256, 65535, 65536])
def test_run_over_the_whole_row_fits_its_counter(n_elem: int) -> None:
    for name in ("rle", "rle-jit") if is_available("rle-jit") else ("rle",):
        check_round_trip(
            get_codec(name).bind(ObsSpec((n_elem,), np.dtype(np.uint8))), np.full((1, n_elem), 7, np.uint8)
        )


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 300)), min_size=1, max_size=20))
def test_round_trip_of_any_runs(runs: list[tuple[int, int]]) -> None:
    row = np.concatenate([np.full(length, value, np.uint8) for value, length in runs])

    check_round_trip(get_codec("rle").bind(ObsSpec(row.shape, row.dtype)), row[None])


def test_runs_whose_sum_overflows_are_refused() -> None:
    # two runs whose 64-bit lengths add up to 4
    runs = np.array([2**63 + 2, 2**63 + 2], "<u8")
    for name in ("rle", "rle-jit") if is_available("rle-jit") else ("rle",):
        with pytest.raises(CorruptPayloadError, match="do not add up to a row of 4"):
            decode(get_codec(name), runs.tobytes() + b"ab", 4)
