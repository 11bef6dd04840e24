"""A self-contained HTML page to browse the episodes of a buffer."""

from __future__ import annotations

import base64
import html
import json
from typing import Any

import numpy as np

from sb3_extra_buffers.cli.images import read_images
from sb3_extra_buffers.cli.reader import BufferReader, EpisodeSteps, with_progress
from sb3_extra_buffers.errors import FileFormatError
from sb3_extra_buffers.recording.images import encode_png

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>@TITLE@</title>
<style>
:root { color-scheme: light dark; font: 15px/1.45 system-ui, sans-serif; }
body { margin: 1.5rem auto; max-width: 60rem; padding: 0 1rem; }
h1 { font-size: 1.2rem; margin: 0 0 .2rem; }
.facts { opacity: .7; margin: 0 0 1rem; }
.stage { display: flex; gap: 1.5rem; flex-wrap: wrap; align-items: flex-start; }
#image { image-rendering: pixelated; width: min(26rem, 100%); background: #222; border-radius: 4px; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
td { padding: .15rem .8rem .15rem 0; vertical-align: top; }
td:first-child { opacity: .7; }
input[type=range] { width: 100%; margin: 1rem 0 .4rem; }
#chart { width: 100%; height: 5rem; display: block; }
select, button { font: inherit; padding: .25rem .6rem; }
.end { color: #d33; font-weight: 600; }
kbd { border: 1px solid #8886; border-radius: 3px; padding: 0 .3rem; }
</style>
</head>
<body>
<h1>@TITLE@</h1>
<p class="facts">@FACTS@</p>
<p><label>Episode <select id="episode"></select></label> <button id="play" aria-pressed="false">Play</button></p>
<div class="stage">
<img id="image" alt="observation">
<table aria-live="polite"><tbody>
<tr><td>step</td><td id="step"></td></tr>
<tr><td>action</td><td id="action"></td></tr>
<tr><td>reward</td><td id="reward"></td></tr>
<tr><td>return so far</td><td id="total"></td></tr>
<tr><td>done</td><td id="done"></td></tr>
</tbody></table>
</div>
<input type="range" id="scrub" min="0" value="0" aria-label="step">
<canvas id="chart" aria-hidden="true"></canvas>
<p class="facts"><kbd>&larr;</kbd> <kbd>&rarr;</kbd> step, <kbd>space</kbd> play,
<kbd>&uarr;</kbd> <kbd>&darr;</kbd> episode. The line is the return so far.</p>
<script id="data" type="application/json">@DATA@</script>
<script>
"use strict";
const episodes = JSON.parse(document.getElementById("data").textContent);
const get = id => document.getElementById(id);
let episode = 0, step = 0, timer = null;
episodes.forEach((e, i) => {
  const option = document.createElement("option");
  option.value = i;
  option.textContent = `${e.name}: ${e.frames.length} steps, return ${e.totals[e.totals.length - 1]}`;
  get("episode").append(option);
});
function draw() {
  const e = episodes[episode], canvas = get("chart"), context = canvas.getContext("2d");
  canvas.width = canvas.clientWidth * devicePixelRatio;
  canvas.height = canvas.clientHeight * devicePixelRatio;
  const low = e.totals.reduce((a, b) => Math.min(a, b), 0);
  const high = e.totals.reduce((a, b) => Math.max(a, b), low + 1e-9);
  const last = Math.max(e.totals.length - 1, 1), height = canvas.height;
  const x = i => i / last * (canvas.width - 2) + 1, y = v => height - 3 - (v - low) / (high - low) * (height - 6);
  context.strokeStyle = "#4a8";
  context.lineWidth = 2 * devicePixelRatio;
  context.beginPath();
  e.totals.forEach((v, i) => i ? context.lineTo(x(i), y(v)) : context.moveTo(x(i), y(v)));
  context.stroke();
  context.strokeStyle = "#d33";
  context.lineWidth = devicePixelRatio;
  context.beginPath();
  context.moveTo(x(step), 0);
  context.lineTo(x(step), canvas.height);
  context.stroke();
}
function show() {
  const e = episodes[episode];
  get("image").src = "data:image/png;base64," + e.frames[step];
  get("step").textContent = `${step + 1} of ${e.frames.length}`;
  get("action").textContent = e.actions[step];
  get("reward").textContent = e.rewards[step];
  get("total").textContent = e.totals[step];
  get("done").textContent = e.dones[step] ? "yes" : "no";
  get("done").className = e.dones[step] ? "end" : "";
  get("scrub").max = e.frames.length - 1;
  get("scrub").value = step;
  get("episode").value = episode;
  document.body.dataset.at = `${episode}:${step}`;
  draw();
}
function go(to) { step = Math.min(Math.max(to, 0), episodes[episode].frames.length - 1); show(); }
function choose(to) { episode = Math.min(Math.max(to, 0), episodes.length - 1); go(0); }
function play(on) {
  clearInterval(timer);
  timer = on ? setInterval(() => step + 1 < episodes[episode].frames.length ? go(step + 1) : play(false), 66) : null;
  get("play").textContent = on ? "Pause" : "Play";
  get("play").setAttribute("aria-pressed", on);
}
get("scrub").addEventListener("input", event => go(Number(event.target.value)));
get("episode").addEventListener("change", event => choose(Number(event.target.value)));
get("play").addEventListener("click", () => play(timer === null));
addEventListener("resize", draw);
addEventListener("keydown", event => {
  const keys = {ArrowLeft: () => go(step - 1), ArrowRight: () => go(step + 1), ArrowUp: () => choose(episode - 1),
                ArrowDown: () => choose(episode + 1), " ": () => play(timer === null)};
  if (event.target.tagName !== "SELECT" && keys[event.key]) { event.preventDefault(); keys[event.key](); }
});
const wanted = location.hash.slice(1).split(":").map(Number);
if (wanted.length === 2 && wanted.every(Number.isInteger)) { choose(wanted[0]); go(wanted[1]); } else show();
</script>
</body>
</html>
"""


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
    page = _PAGE.replace("@TITLE@", html.escape(title)).replace("@FACTS@", html.escape(facts))
    return page.replace("@DATA@", data)


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
