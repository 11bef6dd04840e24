"""Run the snippets and commands of a documentation page, in order, and compare what they print with the page.

A block in the language ``output`` shows what the block before it prints. ``python -m tests.pages PAGE …`` rewrites it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sb3_extra_buffers.cli.main import _parser
from sb3_extra_buffers.cli.main import main as run_cli

ROOT = Path(__file__).parents[1]
REPOSITORY = "https://github.com/sb3-extra-buffers/sb3-extra-buffers"
# may differ in the outputs of two machines: sizes, percentages and large counts a little, times and dates by any amount
TOLERANCE = 0.1
_BLOCK = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_TIME = re.compile(r"\d[\d.,]* ?(?:s|ms|us|min)\b|\d{4}-\d\d-\d\d(?:T[\d:+]+)?")
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?: ?(?:%|[kMG]?B\b))?")
# commands that would install packages or take minutes: only what they refer to is checked
_EXTRAS = re.compile(r"(?:\.|-e|sb3-extra-buffers)\[([\w,]+)\]")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    language: str
    text: str
    start: int
    """Where the text begins in the page."""


def blocks_of(page: Path) -> list[Block]:
    return [Block(found[1], found[2], found.start(2)) for found in _BLOCK.finditer(page.read_text())]


def run_page(page: Path) -> Iterator[tuple[Block, str]]:
    """Run all blocks of a page in the working directory; yield each output block and what was printed instead."""
    printed = None
    for block in blocks_of(page):
        if block.language == "output":
            assert printed is not None, f"{page.name}: an output block must follow what prints it"
            yield block, printed
            printed = None
        elif block.language == "python":
            printed = run_python(block.text)
        elif block.language in {"sh", "bash"}:
            printed = "".join(map(run_command, block.text.splitlines()))


def run_python(code: str) -> str:
    # Ray's processes must end with the snippet; everything else runs here, which saves importing torch each time
    if "import ray" in code:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, "snippet", "exec"), {"__name__": "__main__"})
    return printed.getvalue()


def run_command(line: str) -> str:
    """Run a command line of a page; of those that install packages or take minutes, check what they refer to."""
    words = shlex.split(line, comments=True)
    while words and re.match(r"[A-Z_]+=", words[0]):
        del words[0]  # a variable of the environment
    if not words:
        return ""
    if words[0] == "sb3-extra-buffers" and words[1] in {"bench", "recommend"}:  # tests/cli runs these
        _parser().parse_args(words[1:])
    elif words[0] == "sb3-extra-buffers":
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            status = run_cli(words[1:])
        assert status == 0, f"{line!r} failed"
        return printed.getvalue()
    elif words[:2] == ["pip", "install"]:
        known = set(re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE))
        for extras in _EXTRAS.findall(line):
            assert set(extras.split(",")) <= known, f"{line!r} names an extra that does not exist"
    elif words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), f"there is no {line!r}"
    elif words[0] == "git":
        assert words == ["git", "clone", REPOSITORY], f"{line!r} clones something else"
    elif words[0] == "pytest":
        assert (ROOT / words[1]).exists(), f"{line!r}: there is no such folder"
    elif words[0] == "cd":
        assert words[1] == REPOSITORY.rpartition("/")[2]
    elif words[:2] == ["python", "-m"]:
        assert (ROOT / words[2].replace(".", "/")).with_suffix(".py").exists() or importlib.util.find_spec(words[2])
    elif words[0] == "python":  # tests/test_examples.py runs the examples
        assert (ROOT / words[1]).exists(), f"{line!r}: there is no such file"
    else:
        raise AssertionError(f"do not know how to check {line!r}")
    return ""


def difference(shown: str, printed: str) -> str | None:
    """Return what is wrong with an output as shown, or None: sizes and percentages may differ a little, times a lot."""
    shown, printed = (_TIME.sub("<time>", text.rstrip()) for text in (shown, printed))
    if [part.split() for part in _NUMBER.split(shown)] != [part.split() for part in _NUMBER.split(printed)]:
        return "the text differs"
    for left, right in zip(_NUMBER.findall(shown), _NUMBER.findall(printed), strict=True):
        exact = left.replace(",", "").isdigit() and _value(left) < 10_000
        if left != right and (exact or abs(_value(left) - _value(right)) > TOLERANCE * _value(left)):
            return f"{left} is shown, {right} was printed"
    return None


def _value(number: str) -> float:
    digits, unit = re.fullmatch(r"([\d,.]+) ?(%|[kMG]?B)?", number).groups()  # type: ignore[union-attr]
    return float(digits.replace(",", "")) * {"k": 1e3, "M": 1e6, "G": 1e9}.get((unit or " ")[0], 1)


def rewrite(page: Path) -> None:
    """Replace the output blocks of a page by what is printed."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        results = list(run_page(page))
    text = page.read_text()
    for block, printed in reversed(results):
        if difference(block.text, printed):
            text = text[: block.start] + printed.rstrip() + "\n" + text[block.start + len(block.text) :]
    page.write_text(text)


if __name__ == "__main__":
    for path in [Path(name).resolve() for name in sys.argv[1:]]:
        rewrite(path)
