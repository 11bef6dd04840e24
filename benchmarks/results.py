"""Measurements as rows of the CSV files in ``benchmarks/data``, with their date, machine and versions."""

from __future__ import annotations

import csv
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DATA = Path(__file__).parent / "data"

REQUIRED = ("numpy", "torch", "stable-baselines3")
OPTIONAL = ("numba", "zstandard", "lz4", "isal")


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


def run_child(module: str, *arguments: str, extras: bool = True) -> dict[str, Any]:
    """Run ``python -m module`` in a fresh process and return the JSON object it prints last.

    Without ``extras``, the process finds none of the optional packages.
    """
    paths = [*([] if extras else [str(ROOT / "tests" / "no_extras")]), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, cwd=ROOT, env=env)
    if done.returncode:
        raise SystemExit(f"{module} {' '.join(arguments)} failed with status {done.returncode}; see its message above")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result
