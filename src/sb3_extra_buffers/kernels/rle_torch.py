"""Reference kernel that decodes run lengths, in PyTorch."""

from __future__ import annotations

import torch

__all__ = ["decode_rle_reference"]


def decode_rle_reference(
    heap: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor, elem: int, run: int
) -> None:
    """Decode the payloads ``heap[starts[*lead]:][:lengths[*lead]]`` into the rows ``out[*lead]``.

    A payload is all run lengths, of ``run`` bytes each, followed by a value of ``elem`` bytes for each run; none at all
    stands for zeros. Payloads are trusted: they come from a heap that this process has written.
    """
    out.zero_()
    rows = out.view(-1, out.shape[-1] // elem, elem)
    for row, start, length in zip(rows, starts.flatten().tolist(), lengths.flatten().tolist(), strict=True):
        n_runs = length // (elem + run)
        payload = heap[start : start + length].to(torch.int64)
        weights = 256 ** torch.arange(run, device=heap.device)
        counts = (payload[: n_runs * run].view(n_runs, run) * weights).sum(dim=1)
        values = heap[start + n_runs * run : start + length].view(n_runs, elem)
        if n_runs:
            row.copy_(torch.repeat_interleave(values, counts, dim=0))
