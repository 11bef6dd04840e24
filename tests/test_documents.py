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

from tests.pages import REPOSITORY, ROOT, difference, run_command, run_page

PACKAGE = ROOT / "src" / "sb3_extra_buffers"
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# tests/integrations and tests/cli run the others
RUN_HERE = [path for path in DOCUMENTS if path.name not in {"integrations.md", "cli.md"}]
RAW = REPOSITORY.replace("github.com", "raw.githubusercontent.com") + "/main/"


def run(*command: str) -> str:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("page", RUN_HERE, ids=lambda page: page.name)
@pytest.mark.filterwarnings("ignore")  # warnings of other libraries
def test_snippets_and_commands_run_and_print_what_is_shown(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    wrong = [
        f"{reason}; shown:\n{block.text}\nprinted:\n{printed}"
        for block, printed in run_page(page)
        if (reason := difference(block.text, printed))
    ]

    assert not wrong, "\n".join(wrong) + f"\nrun `python -m tests.pages {page.name}` to show what is printed"


def test_differences_between_outputs_are_found() -> None:
    shown = "1.24 MB for 2,000 transitions: 1.10 % of 112.9 MB\nread in 3.1 ms"

    assert difference(shown, shown.replace("1.24 MB", "1.3 MB").replace("3.1 ms", "0.2 ms")) is None
    assert difference(shown, shown.replace("1.24 MB", "1.24 kB")) == "1.24 MB is shown, 1.24 kB was printed"
    assert difference(shown, shown.replace("1.10 %", "1.30 %")) == "1.10 % is shown, 1.30 % was printed"
    assert difference(shown, shown.replace("2,000", "2,001")) == "2,000 is shown, 2,001 was printed"
    assert difference("572,701 bytes", "572,899 bytes") is None
    assert difference(shown, shown + "\nmore") == "the text differs"


@pytest.mark.parametrize(
    "line",
    [
        "pip install '.[nosuch]'",
        "make nosuch",
        "git clone https://example.org/other",
        "python examples/nosuch.py",
        "sb3-extra-buffers info nosuch",
        "nosuch --help",
    ],
)
def test_commands_that_cannot_work_are_found(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    with pytest.raises(AssertionError):
        run_command(line)


def test_the_quickstart_lists_every_example() -> None:
    shown = set(re.findall(r"python examples/(\w+)\.py", (ROOT / "docs" / "quickstart.md").read_text()))

    assert shown == {"demo"} | {path.stem for path in (ROOT / "examples").glob("example_*.py")}


def test_the_usage_notes_list_every_extra() -> None:
    declared = (
        (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2].partition("[tool")[0]
    )
    table = (ROOT / "docs" / "usage.md").read_text().partition("## Optional packages")[2].partition("\n## ")[0]

    assert set(re.findall(r"^(\w+) = ", declared, re.MULTILINE)) - {"dev"} == set(re.findall(r"`\[(\w+)\]`", table))


def linked_files(page: Path) -> list[tuple[str, Path]]:
    """Return the links of a page to files in the repository: the link, and the file."""
    found = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        target, _, _ = link.partition("#")
        for prefix in (f"{REPOSITORY}/blob/main/", RAW):
            if target.startswith(prefix):
                found.append((link, ROOT / target.removeprefix(prefix)))
        if "://" not in target:
            found.append((link, page.parent / target if target else page))
    return found


def test_links_resolve() -> None:
    for page in [*DOCUMENTS, ROOT / "CHANGELOG.md"]:
        for link, path in linked_files(page):
            assert path.exists(), f"{page.name} links to {link}"
            heading = link.partition("#")[2]
            if heading and path.suffix == ".md":
                headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
                assert heading in {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}, (
                    f"{page.name} links to {link}"
                )


def test_links_of_the_readme_also_work_on_pypi() -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", (ROOT / "README.md").read_text())
    images = re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", (ROOT / "README.md").read_text())

    assert [link for link in links if not link.startswith("https://")] == []
    # GitHub serves pages, not images, under /blob/
    assert all(image.startswith(RAW) for image in images)


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
    names = ("render", "cold_start", "envs", "doom_memory", "torchrl", "service", "pong", "gpu_tables")
    modules = [
        importlib.import_module(f"benchmarks.{name}")
        for name in (*names, "sequences", "shared_memory", "agent_tables", "peer_tables")
    ]
    render, cold_start, envs, doom, torchrl, service, pong, gpu, sequences, shared_memory, agents, peers = modules
    sections = {
        ("README.md", "figures"): render.summary(),
        ("docs/index.md", "figures"): render.summary(),
        ("docs/architecture.md", "formats"): render.format_table(),
        ("docs/gpu.md", "gpu"): gpu.section(render.rows("gpu")),
        ("docs/files.md", "files"): render.file_table(),
        ("docs/faq.md", "cold start"): cold_start.summary(),
        ("docs/training.md", "environments"): envs.table(),
        ("docs/training.md", "doom memory"): doom.table(),
        ("docs/training.md", "pong"): pong.section(),
        ("docs/training.md", "agents"): agents.section(agents.load()),
        ("README.md", "agents"): agents.summary(agents.load()),
        ("docs/distributed.md", "distributed"): service.section(),
        ("docs/sequences.md", "sequences"): sequences.section(),
        ("docs/shared_memory.md", "shared memory"): shared_memory.section(),
        **{(f"docs/{name}.md", name): text for name, text in torchrl.sections().items()},
        **{("docs/peers.md", name): text for name, text in peers.sections().items()},
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
    sizes = dict(re.findall(r"^(CompressedReplayBuffer|SB3's ReplayBuffer) +([\d.]+ [kM]B)", output, re.MULTILINE))
    ours, theirs = sizes["CompressedReplayBuffer"], sizes["SB3's ReplayBuffer"]
    # the report has the same figures as the table
    report = rf"{ours} for \d+ transitions: 0\.\d+ % of the {theirs} in"
    assert re.search(report, output)
    assert "both agents ended with the same weights" in output
