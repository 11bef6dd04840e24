"""Compare the memory of compression methods, and the time they take to add the transitions of a trained DQN.

All buffers get the same transitions of MsPacman at the same time; 40,000 need about 7 GB of memory in all.
Latency is the total time for adding them. ``--compression auto,zstd-5`` compares these methods only.
"""

from __future__ import annotations

from common import parse
from comparison import fill_buffers, report


def main() -> None:
    options = parse(__doc__, timesteps=49_900, n_envs=4, quick=400, game="mspacman", buffer_size=40_000)
    buffers, seconds = fill_buffers(options)
    report(buffers, seconds, "s", options.output / "memory_saving.png")


if __name__ == "__main__":
    main()
