"""Run SB3's and sb3-contrib's own tests with the compressed buffers in the place of theirs.

``python -m tests.conformance.run`` fetches the source distributions of the installed versions and runs every test file
that has to do with buffers, twice: with the buffers as users have them, and with every observation in a store.
``--short`` runs the files about buffers alone, once. Nothing of theirs is kept in this repository.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import subprocess
import sys
import tarfile
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = {
    "stable-baselines3": ["buffers", "n_step_replay", "her", "save_load", "dict_env", "vec_normalize", "gae", "spaces"],
    "sb3-contrib": ["save_load", "lstm", "invalid_actions", "dict_env"],
}
SHORT = {"stable-baselines3": ["buffers", "n_step_replay"]}
# SB3's buffers accept these; ours do not, on purpose
EXPECTED = {
    "test_n_steps_warns_with_custom_replay_buffer_class[CompressedReplayBuffer]": (
        "SB3 warns that n_steps is ignored and trains one-step; ours refuse"
    ),
    "test_n_steps_with_dict_obs[CompressedDictReplayBuffer]": "the same",
    "test_n_steps_with_dict_obs[CompressedHerReplayBuffer]": "the same",
}


class NotAvailableError(Exception):
    """The source distributions cannot be had."""


@dataclass
class Outcome:
    """How the tests of one project went."""

    counts: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)
    expected: list[str] = field(default_factory=list)
    output: str = ""

    def __str__(self) -> str:
        ran = sum(self.counts.values()) - self.counts["skipped"]
        text = f"{ran} ran, {self.counts['passed']} passed, {self.counts['skipped']} skipped"
        if self.expected:
            text += f", {len(self.expected)} refused on purpose"
        return text + (f", {len(self.failed)} FAILED: {', '.join(self.failed)}" if self.failed else "")


def fetch(project: str, folder: Path, timeout: float = 120) -> Path:
    """The tests of the installed version of ``project``, unpacked below ``folder``."""
    version = importlib.metadata.version(project)
    place = folder / f"{project}-{version}"
    if (place / "tests").exists():
        return place
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", project]
    wanted = f"{project}=={version}"
    with tempfile.TemporaryDirectory() as download:
        try:
            subprocess.run(
                [*pip, "-d", download, wanted], check=True, capture_output=True, text=True, timeout=timeout
            )  # fmt: skip
        except (OSError, subprocess.SubprocessError) as error:
            raise NotAvailableError(f"the source distribution of {wanted} cannot be had: {error}") from error
        for archive in Path(download).glob("*.tar.gz"):
            with tarfile.open(archive) as packed:
                for member in packed:
                    # the tests and what configures them; never the package, which must be the installed one
                    inside = member.name.partition("/")[2]
                    if member.isfile() and (inside.startswith("tests/") or inside in ("pyproject.toml", "setup.cfg")):
                        target = place / inside
                        target.parent.mkdir(parents=True, exist_ok=True)
                        target.write_bytes(packed.extractfile(member).read())  # type: ignore[union-attr]  # it is a file
    if not (place / "tests").exists():
        raise NotAvailableError(f"the source distribution of {wanted} has no tests")
    return place


def run(place: Path, names: list[str], how: str, timeout: float | None = None) -> Outcome:
    """Run the test files ``names`` of ``place`` with the buffers swapped."""
    files = [str(path) for name in names if (path := place / "tests" / f"test_{name}.py").exists()]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ["-q", "--tb=short", "-p", "no:cacheprovider", f"--rootdir={place}", f"--junitxml={report}"]
        for config in ("pyproject.toml", "setup.cfg"):
            if "pytest" in ((place / config).read_text() if (place / config).exists() else ""):
                options += ["-c", str(place / config)]
                break
        done = subprocess.run(
            [sys.executable, "-m", "tests.conformance.swap", how, *options, "--basetemp", f"{folder}/tmp", *files],
            cwd=ROOT, capture_output=True, text=True, check=False, timeout=timeout,
        )  # fmt: skip
        outcome = Outcome(output=(done.stdout + done.stderr)[-6000:])
        if not report.exists():
            outcome.failed.append(f"pytest ended with {done.returncode}")
            return outcome
        cases = list(ElementTree.parse(report).iter("testcase"))
    for case in cases:
        name = case.get("name", "")
        if case.find("skipped") is not None:
            outcome.counts["skipped"] += 1
        elif case.find("failure") is None and case.find("error") is None:
            outcome.counts["passed"] += 1
        else:
            outcome.counts["failed"] += 1
            (outcome.expected if name in EXPECTED and how != "plain" else outcome.failed).append(name)
    return outcome


def cache() -> Path:
    """Where unpacked tests are kept between runs."""
    return Path(tempfile.gettempdir()) / "sb3-extra-buffers-conformance"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="the files about buffers alone, once")
    parser.add_argument(
        "--how", choices=["plain", "auto", "stored"], action="append", help="auto and stored by default"
    )
    arguments = parser.parse_args()
    bad = False
    for project, names in (SHORT if arguments.short else FILES).items():
        place = fetch(project, cache())
        for how in arguments.how or (["stored"] if arguments.short else ["auto", "stored"]):
            outcome = run(place, names, how)
            print(f"{place.name}, {how}: {outcome}", flush=True)
            if outcome.failed:
                bad = True
                print(outcome.output)
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
