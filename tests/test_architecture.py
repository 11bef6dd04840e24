"""The layers: each imports only the ones below it, and importing them is silent and cheap."""

from __future__ import annotations

import ast
import importlib
import pickle
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import sb3_extra_buffers
from sb3_extra_buffers import errors

PACKAGE = Path(sb3_extra_buffers.__file__).parent
EXTRAS = {
    "ale_py",
    "cv2",
    "isal",
    "lz4",
    "numba",
    "ray",
    "sb3_contrib",
    "tensordict",
    "torchrl",
    "vizdoom",
    "zstandard",
}
SB3 = {"gymnasium", "stable_baselines3"}
OPTIONAL = EXTRAS | {"triton"}

BASE = {"errors", "arguments", "_lazy"}

# layer; packages that importing it must not load; our own packages and modules that its modules may import
LAYERS = [
    ("codecs", {"torch"} | SB3 | OPTIONAL, {"codecs", *BASE}),
    ("kernels", SB3 | OPTIONAL, {"codecs", "kernels", *BASE}),
    ("stores", SB3 | OPTIONAL, {"codecs", "kernels", "stores", *BASE}),
    ("files", OPTIONAL, {"codecs", "kernels", "stores", "files", *BASE}),
    ("_sb3", OPTIONAL, {"codecs", "kernels", "stores", "files", "_sb3", *BASE}),
    ("tensor_buffers", SB3 | OPTIONAL, {"codecs", "kernels", "stores", "tensor_buffers", *BASE}),
    ("_embodied", SB3 | OPTIONAL, {"codecs", "kernels", "stores", "files", "_embodied", *BASE}),
    (
        "_torchrl",
        SB3 | OPTIONAL - {"tensordict", "torchrl"},
        {"codecs", "kernels", "stores", "files", "_torchrl", *BASE},
    ),
]
PRESENT = [layer for layer in LAYERS if (PACKAGE / layer[0] / "__init__.py").exists()]


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)


def modules() -> list[str]:
    """Every module of the package that can be imported without an optional package."""
    found = []
    for module in pkgutil.walk_packages([str(PACKAGE)], "sb3_extra_buffers."):
        path = PACKAGE.parent / module.name.replace(".", "/")
        source = path / "__init__.py" if module.ispkg else path.with_suffix(".py")
        imports = {name.partition(".")[0] for name in imported_at_top(source)}
        if not imports & OPTIONAL:
            found.append(module.name)
    return found


def imported_at_top(source: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


@pytest.mark.parametrize(("layer", "forbidden"), [layer[:2] for layer in PRESENT])
def test_importing_a_layer_loads_nothing_from_above(layer: str, forbidden: set[str]) -> None:
    found = run(f"import sys, sb3_extra_buffers.{layer}; print(*({forbidden!r} & sys.modules.keys()))")

    assert found.stdout.split() == []


@pytest.mark.parametrize(("layer", "forbidden", "below"), PRESENT)
def test_a_layer_imports_only_from_below(layer: str, forbidden: set[str], below: set[str]) -> None:
    for source in (PACKAGE / layer).rglob("*.py"):
        for node in ast.walk(ast.parse(source.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{source.name}: imports are absolute"
                names = [node.module or ""]
            for name in names:
                root, _, rest = name.partition(".")
                assert root not in forbidden & (SB3 | {"sb3_contrib", "torchrl"}), f"{source.name} imports {name}"
                if root == "sb3_extra_buffers" and rest:
                    assert rest.partition(".")[0] in below, f"{source.name} imports {name} from a layer above"


def test_importing_the_package_is_silent_and_loads_next_to_nothing() -> None:
    ran = run("import sys, sb3_extra_buffers; print(*({'numpy', 'torch'} & sys.modules.keys()))")

    assert ran.stdout.split() == []
    assert ran.stderr == ""


def test_importing_every_module_is_silent() -> None:
    ran = run("\n".join(f"import {name}" for name in modules()))

    assert ran.stdout == ""
    assert ran.stderr == ""


@pytest.mark.parametrize("name", modules())
def test_all_names_what_is_there(name: str) -> None:
    module = importlib.import_module(name)
    exported = getattr(module, "__all__", [])

    assert len(exported) == len(set(exported))
    for each in exported:
        assert hasattr(module, each), f"{name}.__all__ names {each!r}"


def test_every_error_is_ours_and_a_built_in_too() -> None:
    for name, error in vars(errors).items():
        if not isinstance(error, type):
            continue
        assert issubclass(error, errors.ExtraBuffersError)
        if error is not errors.ExtraBuffersError:
            assert len(error.__bases__) >= 2, f"{name} is no built-in that a caller would expect"


def test_errors_travel_between_processes() -> None:
    error = errors.HeapFullError(needed=10, live=95, limit=100)
    again = pickle.loads(pickle.dumps(error))

    assert str(again) == str(error)
    assert "95 of 100" in str(error)
    assert "heap_bytes>=105" in str(error)
    assert (again.needed, again.live, again.limit) == (10, 95, 100)


def test_a_release_is_typed() -> None:
    assert (PACKAGE / "py.typed").exists()
