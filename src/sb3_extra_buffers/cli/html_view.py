"""A self-contained HTML page to browse the episodes of a buffer."""

from __future__ import annotations

import base64
import hashlib
import html
import importlib.resources
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers.cli.charts import make_charts, to_json
from sb3_extra_buffers.cli.frames import FrameReader, is_image
from sb3_extra_buffers.cli.reader import BufferReader, EpisodeSteps, obs_shape, with_progress
from sb3_extra_buffers.errors import ArgumentError, EmptyBufferError, FileFormatError
from sb3_extra_buffers.recording.images import encode_png
from sb3_extra_buffers.stores.usage import MemoryUsage

Array = npt.NDArray[Any]

# observations to decode at a time
_BLOCK = 32
# frames of an observation
_MAX_FRAMES = 16


class Page(NamedTuple):
    """A page, and how many steps it contains."""

    html: str
    n_steps: int


def make_page(
    title: str,
    class_name: str,
    reader: BufferReader,
    usage: MemoryUsage | None = None,
    *,
    key: str | None = None,
    episodes: Sequence[int] | None = None,
    max_steps: int | None = None,
    max_bytes: float | None = None,
    action_names: Sequence[str] = (),
) -> Page:
    """Make a page that lists all episodes and shows the steps of some.

    Args:
        title: Heading of the page.
        class_name: Class of the buffer.
        reader: The buffer.
        usage: Memory of the buffer, shown below the heading.
        key: Key of a Dict observation to show; None for all keys.
        episodes: Numbers of the episodes to show; None for all.
        max_steps: Number of steps to stop at; None for no limit.
        max_bytes: Size of the page to stop at, approximately; None for no limit.
        action_names: Names of discrete actions, or of the components of an action.
    """
    listed = reader.episodes()
    if not listed:
        raise EmptyBufferError("the buffer is empty: there is nothing to show")
    chosen = set(range(len(listed)) if episodes is None else _check_numbers(episodes, len(listed)))
    page = _PageData(reader, key, action_names, max_steps, max_bytes)
    entries = [
        page.episode_data(episode, number in chosen)
        for number, episode in enumerate(with_progress(listed, "reading", len(listed)))
    ]
    data = {
        "title": title,
        "facts": _facts(class_name, reader),
        "memory": [] if usage is None else str(usage).splitlines(),
        "notes": page.notes(listed, entries),
        "capacity": len(reader.order) if reader.is_array or reader.is_recording else int(reader.buffer.buffer_size),
        "n_envs": reader.n_envs,
        "has_ends": not reader.is_array,
        "panels": [
            {"key": name, "n_frames": min(frames.n_frames, _MAX_FRAMES), "is_stack": frames.is_stack}
            for name, frames in page.panels.items()
        ],
        "charts": [chart.description for chart in page.charts],
        "images": page.images,
        "episodes": entries,
    }
    return Page(_fill_template(title, data), sum(entry["n_shown"] for entry in entries))


class _PageData:
    """Collects the data of a page, up to its limits."""

    def __init__(
        self,
        reader: BufferReader,
        key: str | None,
        action_names: Sequence[str],
        max_steps: int | None,
        max_bytes: float | None,
    ) -> None:
        self._reader = reader
        self.images: list[str] = []
        self._image_ids: dict[bytes, int] = {}
        self._steps_left = np.inf if max_steps is None else max_steps
        self._bytes_left = np.inf if max_bytes is None else max_bytes
        leaves = reader.leaves()
        if key is not None:
            if key not in leaves:
                raise ArgumentError(f"there are no observations under the key {key!r}; keys: {sorted(leaves)}")
            leaves = {key: leaves[key]}
        for name, leaf in leaves.items():
            if leaf.dtype.kind not in "biuf" or 0 in obs_shape(leaf):
                kind = f"{name or 'observations'} of shape {obs_shape(leaf)} and dtype {leaf.dtype}"
                raise FileFormatError(f"{kind} cannot be shown; --key selects another key of a Dict")
        self.panels: dict[str, FrameReader] = {}
        vectors = {name: leaf for name, leaf in leaves.items() if not is_image(obs_shape(leaf))}
        self.charts = make_charts(reader, vectors, action_names)
        self._timeouts = reader.column("timeouts")
        spaces = getattr(reader.buffer, "observation_space", None)
        for name in (name for name in leaves if name not in vectors):
            space = spaces[name] if name and spaces is not None else spaces
            self.panels[name] = FrameReader(reader, leaves[name], space)

    def episode_data(self, episode: EpisodeSteps, shown: bool) -> dict[str, Any]:
        """Return what the page's script needs to show an episode, up to the limits of the page."""
        timeouts, last = self._timeouts, (episode.steps[-1], episode.env)
        data: dict[str, Any] = {
            "env": episode.env,
            "row": int(self._reader.order[episode.steps[0]]),
            "length": len(episode.steps),
            "return": to_json(np.array([episode.total_reward]))[0],
            "cut_at_start": episode.cut_at_start,
            "ended": episode.ended,
            "timeout": bool(episode.ended and timeouts is not None and timeouts[last]),
            "n_shown": 0,
        }
        if not shown:
            return data
        images: dict[str, list[int]] = {name: [] for name in self.panels}
        for start in range(0, len(episode.steps), _BLOCK):
            if self._steps_left <= 0 or self._bytes_left <= 0:
                break
            steps = episode.steps[start : start + int(min(_BLOCK, self._steps_left))]
            for name, frames in self.panels.items():
                images[name] += self._add_images(frames.read(steps, np.full(len(steps), episode.env)))
            data["n_shown"] += len(steps)
            self._steps_left -= len(steps)
        steps = episode.steps[: data["n_shown"]]
        if len(steps):
            data["images"] = images
            data["charts"] = [[to_json(curve) for curve in chart.read(steps, episode.env).T] for chart in self.charts]
            self._bytes_left -= 8 * len(steps) * sum(len(chart.curves) for chart in self.charts)
        return data

    def _add_images(self, batch: npt.NDArray[np.uint8]) -> Iterator[int]:
        """Yield the number of each image in ``images``, which holds equal images once."""
        for frames in batch:
            for frame in frames[-_MAX_FRAMES:]:
                image = np.ascontiguousarray(frame)
                digest = hashlib.blake2b(repr(image.shape).encode() + image.tobytes(), digest_size=16).digest()
                number = self._image_ids.setdefault(digest, len(self.images))
                if number == len(self.images):
                    png = encode_png(image if image.shape[-1] == 3 else image[..., 0])
                    self.images.append(base64.b64encode(png).decode())
                    self._bytes_left -= len(self.images[-1])
                yield number

    def notes(self, listed: Sequence[EpisodeSteps], entries: Sequence[dict[str, Any]]) -> list[str]:
        """Return sentences about what the page leaves out."""
        notes = []
        n_shown, total = sum(entry["n_shown"] for entry in entries), sum(len(episode.steps) for episode in listed)
        if n_shown < total:
            notes.append(
                f"This page contains {n_shown:,} of {total:,} steps. Run view with --episodes to choose episodes, or "
                "with --all to include every step."
            )
        for name, frames in self.panels.items():
            if frames.n_frames > _MAX_FRAMES:
                title = name or "observation"
                notes.append(f"{title}: this page contains the last {_MAX_FRAMES} of {frames.n_frames} planes.")
        return notes


def _check_numbers(episodes: Sequence[int], count: int) -> Sequence[int]:
    for number in episodes:
        if not 0 <= number < count:
            raise ArgumentError(f"there is no episode {number}; episodes are numbered 0 to {count - 1}")
    return episodes


def _facts(class_name: str, reader: BufferReader) -> list[list[str]]:
    buffer = reader.buffer
    facts = {"class": class_name, "transitions": f"{reader.n_transitions:,}"}
    if reader.n_envs != 1:
        facts["environments"] = str(reader.n_envs)
    for name in ("observation_space", "action_space"):
        if getattr(buffer, name, None) is not None:
            facts[name.replace("_", " ")] = str(getattr(buffer, name))
    return [[name, text] for name, text in facts.items()]


def _fill_template(title: str, data: dict[str, Any]) -> str:
    """Insert ``data`` into the template.

    Text from the buffer cannot become markup or code: it is escaped here, the script sets it as text, and the content
    security policy of the page runs no other script and loads nothing.
    """
    template = importlib.resources.files(__package__).joinpath("view.html").read_text(encoding="utf-8")
    allowed = [f"{tag}-src 'sha256-{_hash_of(tag, template)}'" for tag in ("style", "script")]
    inserted = {
        "@POLICY@": "; ".join(
            ["default-src 'none'", "img-src data:", "base-uri 'none'", "form-action 'none'", *allowed]
        ),
        # names of files need not be valid Unicode
        "@TITLE@": html.escape(title.encode(errors="replace").decode()),
        "@DATA@": json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
    }
    return re.sub("@POLICY@|@TITLE@|@DATA@", lambda match: inserted[match[0]], template)


def _hash_of(tag: str, template: str) -> str:
    """Return the hash by which a content security policy identifies the text of an element."""
    _, _, after = template.partition(f"<{tag}>")
    return base64.b64encode(hashlib.sha256(after.partition(f"</{tag}>")[0].encode()).digest()).decode()
