"""What ``pyproject.toml`` promises: dependencies are declared, and the oldest versions it allows are those tested."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from sb3_extra_buffers import __version__

tomllib = pytest.importorskip("tomllib", reason="part of the standard library since Python 3.11")

ROOT = Path(__file__).parents[1]
# distributions whose modules have another name
MODULES = {
    "ale-py": "ale_py",
    "opencv-python-headless": "cv2",
    "pillow": "PIL",
    "sb3-contrib": "sb3_contrib",
    "stable-baselines3": "stable_baselines3",
}
# modules that come with a declared package of the same project
BUNDLED = {"llvmlite": "numba"}


def project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found


def requirements(groups: list[list[str]]) -> dict[str, str | None]:
    """Distributions in ``groups`` and the oldest version that each is allowed to have."""
    found: dict[str, str | None] = {}
    for requirement in (entry for group in groups for entry in group):
        name = re.split(r"[\[<>=!;, ]", requirement)[0]
        if name != "sb3-extra-buffers":
            least = re.search(r">=\s*([\w.]+)", requirement)
            found[name] = least.group(1) if least else None
    return found


def test_the_citation_names_this_version() -> None:
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_every_imported_package_is_declared() -> None:
    declared = requirements([project()["dependencies"], *project()["optional-dependencies"].values()])
    modules = {MODULES.get(name, name) for name in declared}
    imported = {
        name.partition(".")[0]
        for source in (ROOT / "src").rglob("*.py")
        for node in ast.walk(ast.parse(source.read_text()))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    third_party = imported - sys.stdlib_module_names - {"sb3_extra_buffers"}

    assert {BUNDLED.get(name, name) for name in third_party} - modules - {"typing_extensions"} == set()


def test_the_oldest_versions_are_those_that_are_tested() -> None:
    lines = (ROOT / "constraints-oldest.txt").read_text().splitlines()
    tested = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    extras = project()["optional-dependencies"]
    groups = [extras[name] for name in ("isal", "numba", "zstd", "lz4", "extra", "contrib", "convert", "vizdoom")]
    promised = {name: least for name, least in requirements([project()["dependencies"], *groups]).items() if least}

    assert {name: tested.get(name) for name in promised} == promised
