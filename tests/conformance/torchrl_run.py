"""Run TorchRL's own tests of storages, buffers, samplers and writers with `CompressedStorage` as the storage.

``python -m tests.conformance.torchrl_run CHECKOUT`` takes a checkout of pytorch/rl near the installed version and runs
its ``test/rb`` four times: unchanged, with `CompressedStorage` instead of `LazyTensorStorage`, `LazyMemmapStorage` and
`ListStorage`, with every leaf compressed however small, and with the stores for GPUs. Tests that fail unchanged were
written for another version and are ignored. No code of TorchRL is copied into this repository.
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
FILES = [
    "test_storages", "test_rb_core", "test_samplers", "test_writers", "test_composable", "test_ensemble", "test_her",
    "test_prioritized", "test_query", "test_rb_distributed", "test_rb_transforms", "test_storage_map",
]  # fmt: skip
# a part of the test's name, and why it does not apply to CompressedStorage
NOT_OURS: dict[str, str] = {
    "inplace_writing_newkey": "writes a key that the first item lacks: an error",
    "read_write_all_in_order": "writes a key that the first item lacks: an error",
    "test_multiproc_rb": "leaves out a key that the first item has: an error",
    "test_extend_lazystack[": "stores tensors of several shapes under one key: an error",
    "test_list_storage_load": "stores items of several structures: an error",
    "dumps_loads[True-tc": "stores text in a tensorclass: an error, only tensors are stored",
    "dumps_loads[False-tc": "stores text in a tensorclass: an error, only tensors are stored",
    "dumps_loads[False-tensor": "expects an error, but CompressedStorage can load this",
    "test_error_list": "expects an error, but CompressedStorage can be shared",
    "test_slice_sampler_errors": "expects an error, but CompressedStorage has trajectories",
    "prefetch_autograd_roundtrip": "expects gradients through the storage; a store holds bytes",
    "lazystack_direct_write": "expects a call inside TensorDict; the data is the same",
    "test_prb[": "changes tensors after storing them and expects the new values; CompressedStorage copies",
    "test_map[storage_type0": "expects a storage that does not know its keys",
    "test_plain_list_storage_raises": "expects an error, but CompressedStorage holds TensorDicts",
    "test_existsok_lazymemmap": "is about the files of a LazyMemmapStorage",
    "TestLazyMemmapStorageCleanup": "is about the files of a LazyMemmapStorage",
    "dumps_loads[False-pytree": "expects the words of TorchRL's error; CompressedStorage raises one too",
    "test_extend_list_pytree": "expects the words of TorchRL's error; CompressedStorage raises one too",
    "test_error_noninit": "expects the words of TorchRL's error; CompressedStorage raises one too",
    "test_requires_tensordict_storage": "expects an error that names another class",
}
# the same by a part of the error
NOT_OURS_ERRORS: dict[str, str] = {
    "stores tensors, got a int": "stores Python numbers: an error, only tensors are stored",
    "but got int; nothing was stored": "stores Python numbers: an error, only tensors are stored",
    "must be tuple of Tensors, not Tensor": "stacks the list that a ListStorage returns; ours returns a tensor",
}


def run(checkout: Path, how: str, files: list[str], more: list[str]) -> tuple[dict[str, tuple[str, str]], str]:
    """Return the outcome and reason of each test, and the output of pytest."""
    folder_of_tests = checkout / "test" / "rb"
    paths = [str(path) for name in files if (path := folder_of_tests / f"{name}.py").exists()]
    # for Ray's processes, which run in other folders
    search_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "CONFORMANCE_HOW": how, "PYTHONPATH": search_path}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ["-q", "--tb=short", "-p", "no:cacheprovider", f"--rootdir={folder_of_tests}", "-c", "/dev/null"]
        done = subprocess.run(
            [sys.executable, "-m", "tests.conformance.torchrl_swap", how, *options, f"--junitxml={report}",
             "--basetemp", f"{folder}/tmp", *more, *paths],
            cwd=ROOT, capture_output=True, text=True, check=False, env=environment,
        )  # fmt: skip
        printed = done.stdout + done.stderr
        if not report.exists():
            raise SystemExit(f"pytest ended with {done.returncode}: {printed[-3000:]}")
        cases = list(ElementTree.parse(report).iter("testcase"))
    return {f"{case.get('classname')}::{case.get('name')}": _outcome(case) for case in cases}, printed


def _outcome(case: ElementTree.Element) -> tuple[str, str]:
    for kind in ("skipped", "failure", "error"):
        element = case.find(kind)
        if element is not None:
            return ("skipped" if kind == "skipped" else "failed"), element.get("message", "")[:200]
    return "passed", ""


def compare(how: str, plain: dict[str, tuple[str, str]], ours: dict[str, tuple[str, str]]) -> tuple[str, list[str]]:
    """Return a summary of ``ours`` against ``plain``, and the tests that fail."""
    tests = {name: outcome for name, outcome in ours.items() if plain.get(name, ("", ""))[0] == "passed"}
    skipped = Counter(reason for kind, reason in tests.values() if kind == "skipped")
    refused: Counter[str] = Counter()
    failed = []
    for name, (kind, error) in tests.items():
        if kind == "failed":
            reasons = [why for part, why in NOT_OURS.items() if part in name]
            reasons += [why for part, why in NOT_OURS_ERRORS.items() if part in error]
            why = next(iter(reasons), None)
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
    parser.add_argument("--verbose", action="store_true", help="print the output of pytest")
    arguments, more = parser.parse_known_args()
    files = arguments.file or FILES
    plain, _ = run(arguments.checkout, "plain", files, more)
    counts = Counter(kind for kind, _ in plain.values())
    print(f"unchanged: {counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped", flush=True)
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
