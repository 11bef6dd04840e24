"""The API reference is complete: every public name is on the page, is explained, and has an example that runs."""

from __future__ import annotations

import doctest
import functools
import importlib
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sb3_extra_buffers.stores.array_methods import ArrayMethods
from tests.cli.browser import CHROMIUM, start_browser
from tests.torture.arguments import HOOKS

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "api.md").read_text()
MODULES = {
    "compressed": (),
    "gpu_buffers": ("torch",),
    "gpu_buffers.compression": ("torch",),
    "gpu_buffers.metadata": ("torch",),
    "gpu_buffers.raw_buffer": ("torch",),
    "gpu_buffers.size_estimation": ("torch",),
    "gpu_buffers.utils": ("torch",),
    "tensor_buffers": ("torch",),
    "replay_buffers": ("torchrl", "ray"),
    "replay_buffers.selectors": (),
    "files": (),
    "recording": (),
    "vec_buf": (),
    "training_utils.atari": (),
    "training_utils.atari_native": (),
    "training_utils.buffer_warmup": (),
    "training_utils.doom": ("vizdoom",),
    "training_utils.eval_model": (),
}
#: public classes of packages that are not public: what public functions take and return
OTHERS = ["_sb3.options.StorageOptions", "stores.usage.MemoryUsage"]


def public_names() -> Iterator[Any]:
    seen: set[tuple[str, int]] = set()
    for module, packages in MODULES.items():
        for package in packages:
            pytest.importorskip(package)
        for name in importlib.import_module(f"sb3_extra_buffers.{module}").__all__:
            # what a module defines is also in its package, under the same name
            if (name, id(resolve(f"{module}.{name}"))) not in seen:
                seen.add((name, id(resolve(f"{module}.{name}"))))
                yield f"{module}.{name}"
    yield from OTHERS


def resolve(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(f"sb3_extra_buffers.{module}"), name)


for needed in ("ale_py", "cv2", "sb3_contrib", "mkdocs", "mkdocstrings"):
    pytest.importorskip(needed)
NAMES = list(public_names())
EXPLAINED = [path for path in NAMES if inspect.isclass(resolve(path)) or inspect.isfunction(resolve(path))]


@functools.cache
def hidden() -> set[str]:
    """Names of members that the page leaves out, from the filters in ``mkdocs.yml``."""
    pattern = re.search(r'"!\^\(([\w|]+)\)\$"', (ROOT / "mkdocs.yml").read_text())
    assert pattern is not None
    return set(pattern[1].split("|"))


def public_methods(cls: type[Any]) -> dict[str, Any]:
    """Public methods of ``cls`` that this library defines."""
    methods = {}
    for name in dir(cls):
        owner = next((base for base in cls.__mro__ if name in vars(base)), None)
        if owner is None or name.startswith("_") or name in hidden() or "sb3_extra_buffers" not in owner.__module__:
            continue
        member = inspect.getattr_static(cls, name)
        function = member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
        # what another library defines and documents needs no docstring here
        known = any(name in vars(base) for base in cls.__mro__ if "sb3_extra_buffers" not in base.__module__)
        if inspect.isfunction(function) and (function.__doc__ or not known):
            methods[name] = function
    return methods


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built documentation; warnings are errors."""
    site = tmp_path_factory.mktemp("site")
    # not -q, with which --strict counts no warnings
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", os.fspath(site)]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=env)
    assert done.returncode == 0, done.stderr
    return site


@pytest.fixture(scope="module")
def html(site: Path) -> str:
    return (site / "api.html").read_text()


@pytest.fixture(scope="module")
def anchors(html: str) -> set[str]:
    """What the page can be linked to."""
    return set(re.findall(r'id="sb3_extra_buffers\.([\w.]+)"', html))


def test_site_builds_and_has_every_public_name_and_method(anchors: set[str]) -> None:
    missing = [path for path in NAMES if path not in anchors]
    for path in NAMES:
        thing = resolve(path)
        if inspect.isclass(thing):
            # a variant names the methods that are explained at another class
            named = set(
                re.findall(r"`(\w+)`", PAGE.partition(f"::: sb3_extra_buffers.{path}\n")[2].partition(":::")[0])
            )
            missing += [
                f"{path}.{name}"
                for name in public_methods(thing)
                if f"{path}.{name}" not in anchors and name not in named
            ]
    missing += [name for name in vars(importlib.import_module("sb3_extra_buffers.errors"))
                if name.endswith("Error") and f"errors.{name}" not in anchors]  # fmt: skip

    assert missing == []


def test_examples_are_rendered_as_code(html: str) -> None:
    assert html.count(">Examples:<") >= len(EXPLAINED) - 1  # one class has two names
    assert "&gt;&gt;&gt;" not in re.sub(r"<pre>.*?</pre>", "", html, flags=re.DOTALL)


def test_the_page_shows_no_hooks_between_layers(anchors: set[str]) -> None:
    members = {name for path in NAMES if inspect.isclass(resolve(path)) for name in dir(resolve(path))}
    assert HOOKS <= hidden() <= members
    assert [anchor for anchor in anchors if anchor.rpartition(".")[2] in hidden()] == []


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_site_works_when_opened_from_disk(site: Path, tmp_path: Path) -> None:
    with start_browser(tmp_path) as browser:
        browser.open(site / "index.html", dark=True)
        assert browser.evaluate("document.body.dataset.mdColorScheme") == "slate"

        browser.click(".md-search__input")
        browser.call("Input.insertText", text="update_prioritie")
        browser.press("s")  # the page searches when a key is released
        browser.wait_for("document.querySelectorAll('.md-search-result__item').length > 0")

        assert "update_priorities" in browser.text(".md-search-result__list")
        assert browser.problems() == []
        assert [url for url in browser.requests() if not url.startswith("file:")] == []


def test_levels_on_the_gpu_page_are_those_of_the_methods() -> None:
    estimation: Any = importlib.import_module("sb3_extra_buffers.gpu_buffers.size_estimation")
    rows = re.findall(r"^\| `([\w-]+)` \| (.*) \| (-?\d+) \|$", (ROOT / "docs" / "gpu.md").read_text(), re.MULTILINE)

    assert {name: int(bare) for name, _, bare in rows} == estimation.BARE_LEVELS
    for name, levels, _ in rows:
        ends = {end for valid in estimation.LEVELS[name] for end in (valid[0], valid[-1]) if end > -1000}
        assert {int(level) for level in re.findall(r"-?\d+", levels)} == ends


@pytest.mark.parametrize("path", EXPLAINED)
def test_public_names_explain_their_arguments(path: str) -> None:
    thing = resolve(path)
    unexplained = [f"{path}({name})" for name in unexplained_arguments(thing)]
    if inspect.isclass(thing):
        for name, method in public_methods(thing).items():
            assert method.__doc__, f"{path}.{name} has no docstring"
            if issubclass(thing, ArrayMethods) and hasattr(np.ndarray, name):
                continue  # with the arguments of NumPy's method
            unexplained += [f"{path}.{name}({argument})" for argument in unexplained_arguments(method)]

    assert unexplained == []


def unexplained_arguments(thing: Any) -> list[str]:
    function = thing.__init__ if inspect.isclass(thing) else thing
    doc = explanations(thing)
    return [
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and parameter.name not in ("self", "cls")
        and not re.search(rf"^ *{parameter.name}: |``{parameter.name}(=[^`]*)?``", doc, re.MULTILINE)
    ]


def explanations(thing: Any) -> str:
    """The docstring, those of fields, and those of the classes whose arguments it refers to."""
    doc: str = thing.__doc__ or ""
    if inspect.isclass(thing):
        doc += "".join(re.findall(r"^    \w+: .*\n(?=    \"\"\")", inspect.getsource(thing), re.MULTILINE))
    for name in re.findall(r"`(\w+)`", doc) if "arguments of `" in doc else []:
        others = [resolve(path) for path in NAMES if path.endswith(f".{name}")]
        doc += "".join(explanations(other) for other in others if other is not thing)
    return doc


@pytest.mark.parametrize("path", EXPLAINED)
@pytest.mark.filterwarnings("ignore")  # warnings of other libraries
def test_examples_of_public_names_run(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    doc = resolve(path).__doc__
    # nothing is defined beforehand: an example can be copied as it is
    test = doctest.DocTestParser().get_doctest(doc, {}, path, None, 0)

    assert test.examples, f"{path} has no example"
    assert "+SKIP" not in doc
    assert re.search(r"^ *Examples:\n +>>> ", doc, re.MULTILINE), "only a section called Examples is rendered"
    if "ray" in doc and "Ray" in path:
        # Ray's processes must end with the example
        code = "\n".join(example.source for example in test.examples)
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
        return
    report: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE).run(test, out=report.append)
    assert report == [], "".join(report)
