"""Run TorchRL's own tests of storages, buffers, samplers and writers with `CompressedStorage` in the place of theirs.

``python -m tests.conformance.torchrl_run CHECKOUT`` takes a checkout of pytorch/rl near the installed version and runs
the files of its folder ``test/rb`` four times: as they are, with ours in the place of `LazyTensorStorage`,
`LazyMemmapStorage` and `ListStorage`, so that every leaf, however small, goes through a store, and so that it goes
through those of GPUs. What fails as it is was written for another version, and is left out. Nothing of theirs is kept
in this repository.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = ["test_storages", "test_rb_core", "test_samplers", "test_writers"]
# a part of the name, and why ours cannot or does not do what is asked
NOT_OURS: dict[str, str] = {
    "inplace_writing_newkey": "a key is written that the first item lacked: refused, nothing would hold it before",
    "read_write_all_in_order": "a key is written that the first item lacked: refused, nothing would hold it before",
    "test_multiproc_rb": "a key is left out that the first item had: refused",
    "test_extend_lazystack[": "tensors of several shapes under one key: refused",
    "test_list_storage_load": "items of several kinds in one storage, as in a list: refused",
    "dumps_loads[True-tc": "text in a tensorclass: refused, only tensors are kept",
    "dumps_loads[False-tc": "text in a tensorclass: refused, only tensors are kept",
    "dumps_loads[False-tensor": "an error is expected where ours can load",
    "test_error_list": "an error is expected where ours can be shared",
    "test_slice_sampler_errors": "an error is expected where ours has trajectories",
    "prefetch_autograd_roundtrip": "gradients are expected through the storage; a store holds bytes",
    "lazystack_direct_write": "a call inside TensorDict is expected; the data is the same",
}


def run(checkout: Path, how: str, files: list[str], more: list[str]) -> tuple[dict[str, tuple[str, str]], str]:
    """Outcome and reason of each test, and what was printed last."""
    place = checkout / "test" / "rb"
    paths = [str(path) for name in files if (path := place / f"{name}.py").exists()]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ["-q", "--tb=short", "-p", "no:cacheprovider", f"--rootdir={place}", "-c", "/dev/null"]
        done = subprocess.run(
            [sys.executable, "-m", "tests.conformance.torchrl_swap", how, *options, f"--junitxml={report}",
             "--basetemp", f"{folder}/tmp", *more, *paths],
            cwd=ROOT, capture_output=True, text=True, check=False, env={**os.environ, "CONFORMANCE_HOW": how},
        )  # fmt: skip
        printed = done.stdout + done.stderr
        if not report.exists():
            raise SystemExit(f"pytest ended with {done.returncode}: {printed[-3000:]}")
        cases = list(ElementTree.parse(report).iter("testcase"))
    return {f"{case.get('classname')}::{case.get('name')}": _outcome(case) for case in cases}, printed


def _outcome(case: ElementTree.Element) -> tuple[str, str]:
    for kind in ("skipped", "failure", "error"):
        found = case.find(kind)
        if found is not None:
            return ("skipped" if kind == "skipped" else "failed"), found.get("message", "")[:200]
    return "passed", ""


def compare(how: str, plain: dict[str, tuple[str, str]], ours: dict[str, tuple[str, str]]) -> tuple[str, list[str]]:
    """A summary of ``ours`` against ``plain``, and what failed."""
    tests = {name: outcome for name, outcome in ours.items() if plain.get(name, ("", ""))[0] == "passed"}
    skipped = Counter(reason for kind, reason in tests.values() if kind == "skipped")
    refused: Counter[str] = Counter()
    failed = []
    for name, (kind, _) in tests.items():
        if kind == "failed":
            why = next((why for part, why in NOT_OURS.items() if part in name), None)
            if why is None:
                failed.append(name)
            else:
                refused[why] += 1
    passed = sum(kind == "passed" for kind, _ in tests.values())
    lines = [
        f"{how}: {len(tests)} pass with TorchRL's storages; with ours {passed} pass, "
        f"{sum(refused.values())} do not apply, {sum(skipped.values())} are skipped, {len(failed)} FAIL"
    ]
    lines += [f"  {count:3d} {reason}" for reason, count in (refused + skipped).most_common()]
    return "\n".join(lines + [f"  FAILED {name}" for name in failed]), failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--how", choices=["auto", "stored", "device"], action="append", help="all by default")
    parser.add_argument("--file", action="append", help=f"of {', '.join(FILES)}; all by default")
    parser.add_argument("--verbose", action="store_true", help="print what pytest did")
    arguments, more = parser.parse_known_args()
    files = arguments.file or FILES
    plain, _ = run(arguments.checkout, "plain", files, more)
    counts = Counter(kind for kind, _ in plain.values())
    print(f"as they are: {counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped", flush=True)
    bad = False
    for how in arguments.how or ["auto", "stored", "device"]:
        ours, printed = run(arguments.checkout, how, files, more)
        summary, failed = compare(how, plain, ours)
        print(summary, flush=True)
        bad |= bool(failed)
        if arguments.verbose:
            print(printed)
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
