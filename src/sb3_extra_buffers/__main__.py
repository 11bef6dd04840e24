"""``python -m sb3_extra_buffers`` is ``sb3-extra-buffers``."""

from __future__ import annotations

import sys

from sb3_extra_buffers.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
