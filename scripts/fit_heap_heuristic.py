"""Fit the size of compressed observations, by method and level, to the committed benchmark.

Prints the table of `sb3_extra_buffers.gpu_buffers.size_estimation`; ``--write`` updates the module.
"""

from __future__ import annotations

import argparse
import csv
import textwrap
from collections import defaultdict
from pathlib import Path

import numpy as np

from sb3_extra_buffers.codecs.registry import parse_method
from sb3_extra_buffers.gpu_buffers import size_estimation

ROOT = Path(__file__).parents[1]
GAME = "MsPacman"


def read_ratios(path: Path) -> dict[str, dict[int, float]]:
    """Return the ratio of resident to dense bytes, by method and level."""
    ratios: dict[str, dict[int, float]] = defaultdict(dict)
    with path.open() as file:
        for row in csv.DictReader(file):
            if row["game"] == GAME and row["method"] not in ("sb3", "auto", "none") and "+" not in row["method"]:
                family, level = parse_method(row["method"].removesuffix("-jit"))
                if level is None:
                    level = size_estimation.BARE_LEVELS.get(family, 0)
                ratios[family][level] = float(row["resident_bytes"]) / float(row["dense_bytes"])
    return ratios


def fit(ratios: dict[int, float]) -> tuple[dict[int, float], tuple[float, ...]]:
    """Return the measured ratios, and the coefficients of a polynomial of degree 2 at most for the levels between.

    Level 0 is excluded from the fit: it is a mode of its own (gzip stores without compressing).
    """
    measured = {level: round(ratios[level], 6) for level in sorted(ratios)}
    fitted = {level: ratio for level, ratio in measured.items() if level} or measured
    degree = min(len(fitted) - 1, 2)
    levels, values = list(fitted), list(fitted.values())
    factors = np.polynomial.Polynomial.fit(levels, values, degree).convert().coef if degree else np.array(values)
    return measured, tuple(round(float(factor), 6) for factor in factors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", type=Path, default=ROOT / "benchmarks" / "data" / "table.csv")
    parser.add_argument("--write", action="store_true", help="write the table to size_estimation.py")
    options = parser.parse_args()
    rows = [f'"{family}": {fit(ratios)},' for family, ratios in sorted(read_ratios(options.csv).items())]
    table = "".join(textwrap.fill(row, 110, initial_indent=" " * 4, subsequent_indent=" " * 8) + "\n" for row in rows)
    print(table, end="")
    if options.write:
        target = Path(size_estimation.__file__)
        text = target.read_text()
        begin, end = "    # fitted: begin\n", "    # fitted: end\n"
        head, rest = text.split(begin)
        target.write_text(head + begin + table + end + rest.split(end)[1])


if __name__ == "__main__":
    main()
