"""Set up for all tests."""

from __future__ import annotations

import pytest

# the contracts assert on behalf of the tests that call them
pytest.register_assert_rewrite("tests.contracts")
