"""Run ``python -m MODULE ARGUMENTS`` lines from standard input in one process, which saves importing torch for each."""

from __future__ import annotations

import runpy
import shlex
import sys


def main() -> None:
    for line in sys.stdin.read().replace("\\\n", " ").splitlines():
        python, dash_m, module, *arguments = shlex.split(line)
        if (python, dash_m) != ("python", "-m"):
            raise SystemExit(f"not a command of the form python -m MODULE: {line}")
        print(f"$ {line}", flush=True)
        # as in a new process: a config may have changed the package
        for name in [name for name in sys.modules if name.partition(".")[0] == module.partition(".")[0]]:
            del sys.modules[name]
        sys.argv = [module, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
