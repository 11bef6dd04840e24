"""Measurements as rows of the CSV files in ``benchmarks/data``, with their date, machine and versions."""

from __future__ import annotations

import argparse
import csv
import datetime
import importlib.metadata
import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DATA = Path(__file__).parent / "data"

REQUIRED = ("numpy", "torch", "stable-baselines3")
OPTIONAL = ("numba", "zstandard", "lz4", "isal")

#: Environment variables for processes that measure times: glibc keeps freed memory, except arrays above 32 MB.
#: Otherwise a batch of megabytes takes up to ten times longer when the system has to map its pages again, which depends
#: on what else was allocated.
KEEP_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(2**25),
    "MALLOC_TRIM_THRESHOLD_": str(2**36),
    "MALLOC_TOP_PAD_": str(2**26),
}


def machine() -> str:
    """Processor model and number of cores."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        name = f"{models[0]}, {len(models)} cores" if models else name
    return name


def versions(*packages: str, extras: bool = True) -> str:
    """Versions of Python, of what the library needs and, with ``extras``, can use, and of ``packages``."""
    parts = [f"Python {platform.python_version()}"]
    for package in (*REQUIRED, *(OPTIONAL if extras else ()), *packages):
        try:
            parts.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(parts)


def run_info(*packages: str, extras: bool = True) -> dict[str, str]:
    """The columns that every row starts with: date, machine and `versions`."""
    return {
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "versions": versions(*packages, extras=extras),
    }


# units of measurements, in seconds and bytes, and those that people read
_UNITS = {"us": (1e-6, "s"), "ms": (1e-3, "s"), "s": (1.0, "s"), "B": (1.0, "B"), "MB": (1e6, "B")}
_SCALES = {"s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")), "B": ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))}


def whole(text: str, least: int = 1) -> int:
    """A whole number of at least ``least``: the ``type`` of an argument of `argparse`."""
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least {least}, got {text!r}")
    return number


def quantity(value: float, unit: str) -> str:
    """A measurement for people: ``2930, "us"`` is ``"2.93 ms"``."""
    if unit == "%":
        return percent(value / 100)
    factor, base = _UNITS[unit]
    value *= factor
    scale, name = next((pair for pair in _SCALES[base] if value >= 0.9995 * pair[0]), _SCALES[base][-1])
    return f"{digits(value / scale)} {name}"


def percent(fraction: float) -> str:
    """``0.0103`` is ``"1.03 %"``."""
    return f"{100 * fraction:.2f} %" if fraction < 0.1 else f"{digits(100 * fraction)} %"


def factor(ratio: float) -> str:
    """``0.641`` is ``"0.64x"``; two digits for small ratios, whole numbers for large ones."""
    return f"{digits(ratio, 2)}x" if ratio < 0.1 or ratio >= 10 else f"{ratio:.2f}x"


def digits(value: float, count: int = 3) -> str:
    """At least ``count`` significant digits, never in scientific notation."""
    rounded = float(f"{value:.{count - 1}e}")
    decimals = max(count - 1 - math.floor(math.log10(abs(rounded))), 0) if rounded else 0
    return f"{value:,.{decimals}f}"


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file; none if it does not exist."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Replace the contents of ``path``."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def replace_rows(path: Path, rows: list[dict[str, Any]], key: tuple[str, ...]) -> None:
    """Add ``rows`` to ``path``, replacing older ones with the same values in the columns ``key``."""
    new_keys = {tuple(str(row[name]) for name in key) for row in rows}
    other_rows = [row for row in read_rows(path) if tuple(row[name] for name in key) not in new_keys]
    write_rows(path, other_rows + rows)


def run_child(
    module: str, *arguments: str, extras: bool = True, settings: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Run ``python -m module`` in a fresh process and return the JSON object it prints last.

    Without ``extras``, the process finds none of the optional packages. ``settings`` are environment variables.
    """
    paths = [*([] if extras else [str(ROOT / "tests" / "no_extras")]), os.environ.get("PYTHONPATH", "")]
    env = os.environ | dict(settings or {}) | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, cwd=ROOT, env=env)
    if done.returncode:
        raise SystemExit(f"{module} {' '.join(arguments)} failed with status {done.returncode}; see its message above")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result
