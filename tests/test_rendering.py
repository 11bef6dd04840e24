"""Figures in the documentation are written for people."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

results: Any = importlib.import_module("benchmarks.results")


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (2930, "us", "2.93 ms"),
        (999.7, "us", "1.00 ms"),
        (0.4, "us", "0.400 µs"),
        (4.967, "us", "4.97 µs"),
        (0.0293, "s", "29.3 ms"),
        (123.4, "s", "123 s"),
        (2824.5, "MB", "2.82 GB"),
        (0.539, "MB", "539 kB"),
        (56_448_000_000, "B", "56.4 GB"),
        (0, "B", "0 B"),
        (0.65, "%", "0.65 %"),
    ],
)
def test_measurements_have_three_digits_in_a_readable_unit(value: float, unit: str, text: str) -> None:
    assert results.quantity(value, unit) == text


def test_ratios_are_never_in_scientific_notation() -> None:
    assert [results.factor(value) for value in (0.000487, 0.0186, 0.641, 1.4, 9.999, 170.3, 1234.5)] == [
        "0.00049x", "0.019x", "0.64x", "1.40x", "10.00x", "170x", "1,234x",
    ]  # fmt: skip
    assert [results.percent(value) for value in (0.0049, 0.0999, 0.2625, 0.9998, 2.0)] == [
        "0.49 %", "9.99 %", "26.2 %", "100 %", "200 %",
    ]  # fmt: skip


def test_pareto_front_has_every_method_that_no_other_beats() -> None:
    pytest.importorskip("matplotlib")
    render: Any = importlib.import_module("benchmarks.render")
    points = [("slow", 5.0, 0.3), ("fast", 0.5, 0.9), ("worse", 0.6, 0.9), ("middle", 1.0, 0.5), ("worst", 6.0, 9.0)]

    assert [name for name, _, _ in render.pareto_front(points)] == ["fast", "middle", "slow"]
