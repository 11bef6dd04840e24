"""What the documents show works as printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SNIPPETS = [
    pytest.param(code, id=f"{path.name}-{number}")
    for path in DOCUMENTS
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL))
]


def run(*command: str) -> str:
    # warnings of the libraries around us are theirs; only failing counts here
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("code", SNIPPETS)
def test_snippets_run_as_printed(code: str) -> None:
    run("-c", code)


def test_links_lead_somewhere() -> None:
    for path in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
            if "://" not in target:
                assert (path.parent / target).exists(), f"{path.name} links to {target}"


def test_the_demo_trains_and_compares() -> None:
    pytest.importorskip("ale_py")
    pytest.importorskip("cv2")

    said = run(os.fspath(ROOT / "examples" / "demo.py"), "--steps", "200")

    assert re.search(r"CompressedReplayBuffer +[\d.]+ MB", said)
    assert re.search(r"SB3's ReplayBuffer +[\d.]+ MB", said)
    assert "both agents ended with the same weights" in said
