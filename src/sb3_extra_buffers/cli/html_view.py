"""A self-contained HTML page to browse the episodes of a buffer."""

from __future__ import annotations

import base64
import html
import importlib.resources
import json
from typing import Any

import numpy as np

from sb3_extra_buffers.cli.images import read_images
from sb3_extra_buffers.cli.reader import BufferReader, EpisodeSteps, with_progress
from sb3_extra_buffers.errors import FileFormatError
from sb3_extra_buffers.recording.images import encode_png


def make_page(title: str, facts: str, reader: BufferReader, key: str | None, max_steps: int) -> str:
    """Return a page with the first ``max_steps`` steps, episode by episode."""
    actions, n_shown = reader.column("actions"), 0
    episodes = []
    for number, episode in enumerate(with_progress(reader.episodes(), "reading")):
        steps = episode.steps[: max_steps - n_shown]
        if not len(steps):
            break
        n_shown += len(steps)
        images = read_images(reader, key, steps, np.full(len(steps), episode.env))
        frames = [base64.b64encode(encode_png(image)).decode() for image in images]
        episodes.append(_episode_data(number, episode, frames, actions))
    if not episodes:
        raise FileFormatError("the buffer is empty: there is nothing to show")
    data = json.dumps(episodes, separators=(",", ":")).replace("<", "\\u003c")
    if n_shown < reader.n_transitions:
        facts += f"; this page shows the first {n_shown} of {reader.n_transitions} transitions"
    page = importlib.resources.files(__package__).joinpath("view.html").read_text(encoding="utf-8")
    for placeholder, text in (("@TITLE@", html.escape(title)), ("@FACTS@", html.escape(facts)), ("@DATA@", data)):
        page = page.replace(placeholder, text)
    return page


def _episode_data(number: int, episode: EpisodeSteps, frames: list[str], actions: Any) -> dict[str, Any]:
    """Return what the page's script needs to show the first ``len(frames)`` steps of an episode."""
    rewards = episode.rewards[: len(frames)].astype(np.float64)
    dones = [False] * len(frames)
    if len(frames) == len(episode.steps):
        dones[-1] = episode.ended
    steps = episode.steps[: len(frames)]
    return {
        "name": f"{number} (environment {episode.env})",
        "frames": frames,
        "actions": ["" if actions is None else _format_action(actions[step, episode.env]) for step in steps],
        "rewards": [round(reward, 4) for reward in rewards.tolist()],
        "totals": [round(total, 4) for total in np.cumsum(rewards).tolist()],
        "dones": dones,
    }


def _format_action(action: Any) -> str:
    values = np.asarray(action).ravel().tolist()
    texts = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in values]
    return texts[0] if len(texts) == 1 else "[" + ", ".join(texts[:12]) + (", …]" if len(texts) > 12 else "]")
