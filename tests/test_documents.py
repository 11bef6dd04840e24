"""The documentation is correct: snippets run, links resolve, and names it mentions exist."""

from __future__ import annotations

import ast
import importlib
import os
import re
import runpy
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "sb3_extra_buffers"
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SNIPPETS = [
    pytest.param(code, id=f"{path.name}-{number}")
    for path in DOCUMENTS
    if path.name != "integrations.md"  # tests/integrations runs these
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL))
]


def run(*command: str) -> str:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("code", SNIPPETS)
@pytest.mark.filterwarnings("ignore")  # warnings of other libraries
def test_snippets_run(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # Ray's processes must end with the snippet; everything else runs here, which saves importing torch each time
    if "import ray" in code:
        run("-c", code)
    else:
        exec(compile(code, "snippet", "exec"), {"__name__": "__main__"})


def test_relative_links_resolve() -> None:
    for path in [*DOCUMENTS, ROOT / "CHANGELOG.md"]:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text()):
            if "://" not in target:
                assert (path.parent / target).exists(), f"{path.name} links to {target}"


class SourceNames(ast.NodeVisitor):
    """Names defined in the package: members by class or module, base classes, and all identifiers."""

    def __init__(self) -> None:
        self.members: dict[str, set[str]] = defaultdict(set)
        self.bases: dict[str, set[str]] = defaultdict(set)
        self.identifiers: set[str] = set()
        for path in PACKAGE.rglob("*.py"):
            text = path.read_text()
            self.identifiers |= set(re.findall(r"\w+", text))
            self._owner = path.stem
            self.visit(ast.parse(text))

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.members[self._owner].add(node.name)
        self.bases[node.name] |= {base.id for base in node.bases if isinstance(base, ast.Name)}
        outer, self._owner = self._owner, node.name
        self.generic_visit(node)
        self._owner = outer

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.members[self._owner].add(node.name)
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name) and node.value.id == "self":
            self.members[self._owner].add(node.attr)

    def has_member(self, owner: str, name: str) -> bool:
        return name in self.members[owner] or any(self.has_member(base, name) for base in self.bases[owner])


def test_names_in_architecture_exist() -> None:
    names = SourceNames()
    text = re.sub(r"```.*?```", "", (ROOT / "docs" / "architecture.md").read_text(), flags=re.DOTALL)
    other_libraries = {"malloc", "mremap", "pdep", "zstd", "os", "copy", "get"}
    unknown = []
    for token in set(re.findall(r"`([A-Za-z_][\w./]*)(?:\(\))?`", text)):
        owner, _, name = token.rpartition(".")
        if "/" in token or token.endswith((".py", ".md")):
            exists = (PACKAGE / token).exists() or (ROOT / token).exists()
        elif owner in names.members:
            exists = names.has_member(owner, name)
        else:
            exists = token.partition(".")[0] in other_libraries or (not owner and token in names.identifiers)
        if not exists:
            unknown.append(token)

    assert sorted(unknown) == []


def test_figures_are_rendered_from_the_measurements() -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("ale_py")
    render, envs, doom, torchrl, pong = (
        importlib.import_module(f"benchmarks.{name}") for name in ("render", "envs", "doom_memory", "torchrl", "pong")
    )
    sections = {
        ("README.md", "figures"): render.summary(),
        ("docs/index.md", "figures"): render.summary(),
        ("docs/architecture.md", "formats"): render.format_table(),
        ("docs/gpu.md", "gpu"): render.gpu_table(),
        ("docs/files.md", "files"): render.file_table(),
        ("docs/training.md", "environments"): envs.table(),
        ("docs/training.md", "doom memory"): doom.table(),
        ("docs/training.md", "pong"): pong.section(),
        **{(f"docs/{name}.md", name): text for name, text in torchrl.sections().items()},
    }
    for (page, name), expected in sections.items():
        _, _, rest = (ROOT / page).read_text().partition(f"<!-- {name} -->\n")
        assert rest.partition(f"<!-- end of {name} -->")[0] == expected, f"{page}: run `make docs`"
    assert (ROOT / "docs" / "benchmarks.md").read_text() == render.benchmarks_page()


@pytest.mark.filterwarnings("ignore")  # warnings of other libraries
def test_demo_trains_and_compares(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ale_py")
    pytest.importorskip("cv2")
    path = os.fspath(ROOT / "examples" / "demo.py")
    monkeypatch.setattr(sys, "argv", [path, "--quick"])

    runpy.run_path(path, run_name="__main__")

    output = capsys.readouterr().out
    assert re.search(r"CompressedReplayBuffer +[\d.]+ MB", output)
    assert re.search(r"SB3's ReplayBuffer +[\d.]+ MB", output)
    assert "both agents ended with the same weights" in output
