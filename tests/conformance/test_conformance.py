"""SB3's own tests of buffers pass with the compressed ones in their place: the short form of `run`."""

from __future__ import annotations

import subprocess

import pytest

from tests.conformance.run import SHORT, NotAvailableError, cache, fetch, run


@pytest.mark.parametrize("project", SHORT)
def test_their_tests_pass_with_our_buffers(project: str) -> None:
    pytest.importorskip("sb3_contrib")
    try:
        place = fetch(project, cache(), timeout=30)
    except NotAvailableError as error:
        pytest.skip(str(error))
    try:
        outcome = run(place, SHORT[project], "stored", timeout=60)
    except subprocess.TimeoutExpired:
        pytest.skip("took more than a minute; python -m tests.conformance.run takes its time")
    assert not outcome.failed, outcome.output
    assert outcome.counts["passed"] > 90
