"""`EpisodeIndex`: where the episodes in a ring of steps begin and end, and which windows can be drawn from them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sb3_extra_buffers._sb3.drawing import GlobalGenerator
from sb3_extra_buffers.errors import EmptyBufferError
from sb3_extra_buffers.kernels import window_kernels

__all__ = ["EpisodeIndex", "Held", "WindowRules"]

Indices = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

# the end of an episode that is still running
_OPEN = np.iinfo(np.int64).max
# the compiled code draws from at most as many windows
_MAX_DRAWN = 2**32 - 1


class Held(NamedTuple):
    """Which steps a buffer holds: numbers ``oldest`` to ``n_added - 1``."""

    oldest: int
    n_added: int


class WindowRules(NamedTuple):
    """Which windows may be drawn: see `Sequences.sample_sequences`."""

    length: int
    """Steps of a window, burn-in included."""
    episode_end: str
    strict_length: bool


class _Episodes(NamedTuple):
    """Episodes that have steps in the buffer, in any order; replaced as a whole."""

    n_seen: int
    """All steps with lower numbers are taken into account."""
    firsts: Indices
    ends: Indices
    """The number of the last step plus 1; `_OPEN` while the episode is running."""
    envs: Indices
    running: Indices
    """Which episode each environment is in."""


class EpisodeIndex:
    """The episodes of ``n_envs`` environments whose steps are in a ring of ``n_steps``.

    A step is identified by its number: how many steps were added before it. Its position in the ring is the number
    modulo ``n_steps``. `starts`, `next_is_first` and `unseen` are saved; the list of episodes is computed from them.
    """

    def __init__(self, n_steps: int, n_envs: int) -> None:
        self.n_steps, self.n_envs = n_steps, n_envs
        #: Whether each step is the first of its episode, ``[n_steps, n_envs]``.
        self.starts: Flags = np.zeros((n_steps, n_envs), np.bool_)
        #: Whether the next step of each environment will be the first of its episode.
        self.next_is_first: Flags = np.ones(n_envs, np.bool_)
        #: For each environment, the number of the first step that `fresh` has not returned.
        self.unseen: Indices = np.zeros(n_envs, np.int64)
        self._episodes: _Episodes | None = None
        self._random = GlobalGenerator()

    @property
    def nbytes(self) -> int:
        return self.starts.nbytes

    # ---- writing ----

    def plan(self, done: Any) -> tuple[Flags, Flags]:
        """Return what `write` needs for a step after which the ``done`` environments are reset; changes nothing."""
        return self.next_is_first.copy(), np.asarray(done).reshape(-1) != 0

    def write(self, position: int, planned: tuple[Flags, Flags]) -> None:
        """Add a step; idempotent."""
        self.starts[position], self.next_is_first[:] = planned

    def clear(self, n_added: int) -> None:
        """Forget all episodes; ``n_added`` is the number of the next step."""
        self._episodes = None
        self.starts[...] = False
        self.next_is_first[...] = True
        self.unseen = np.full(self.n_envs, n_added, np.int64)

    # ---- episodes ----

    def _update(self, held: Held) -> _Episodes:
        """Return the episodes that have steps in the buffer now."""
        known = self._episodes
        if known is None or not len(known.firsts) or not held.oldest <= known.n_seen <= held.n_added:
            known = self._scan(held)
        elif known.n_seen < held.n_added:
            known = self._extend(known, held)
        if len(known.firsts) > 64 and np.count_nonzero(known.ends > held.oldest) < len(known.firsts) // 2:
            known = self._scan(held)
        self._episodes = known
        return known

    def _scan(self, held: Held) -> _Episodes:
        numbers = np.arange(held.oldest, held.n_added, dtype=np.int64)
        starts = self.starts[numbers % self.n_steps]
        starts[:1] = True  # what is left of an episode that was partly overwritten
        envs, ages = np.nonzero(starts.T)
        is_last = np.append(envs[1:] != envs[:-1], True) if len(envs) else np.zeros(0, np.bool_)
        firsts = ages + held.oldest
        ends = np.where(is_last, _OPEN, np.append(firsts[1:], 0))
        running = np.flatnonzero(is_last) if len(envs) else np.full(self.n_envs, -1)
        return _Episodes(held.n_added, firsts, ends, envs.astype(np.int64), running)

    def _extend(self, known: _Episodes, held: Held) -> _Episodes:
        """Return ``known`` with the steps that were added since."""
        numbers = np.arange(known.n_seen, held.n_added, dtype=np.int64)
        ages, envs = np.nonzero(self.starts[numbers % self.n_steps])
        if not len(ages):
            return known._replace(n_seen=held.n_added)
        n_known, firsts = len(known.firsts), numbers[ages]
        ends = np.append(known.ends, np.full(len(ages), _OPEN))
        running = known.running.copy()
        for i, (first, env) in enumerate(zip(firsts, envs, strict=True), n_known):
            ends[running[env]] = first
            running[env] = i
        return _Episodes(held.n_added, np.append(known.firsts, firsts), ends, np.append(known.envs, envs), running)

    # ---- windows ----

    def run_lengths(self, firsts: Indices, envs: Indices, limit: int, held: Held) -> Indices:
        """How many of the ``limit`` steps from each of ``firsts`` on are in its episode and in the buffer."""
        if limit == 1:
            return np.ones(len(firsts), np.int64)
        ahead = firsts[:, None] + np.arange(1, limit)
        is_beyond = self.starts[ahead % self.n_steps, envs[:, None]]
        is_beyond |= ahead >= held.n_added
        return np.where(is_beyond.any(axis=1), is_beyond.argmax(axis=1) + 1, limit)

    def _steps_before(self, numbers: Indices, envs: Indices, limit: int, held: Held) -> Indices:
        """How many of the ``limit`` steps before each of ``numbers`` are in its episode and in the buffer."""
        back = numbers[:, None] - np.arange(limit + 1)
        is_first = self.starts[back % self.n_steps, envs[:, None]] | (back <= held.oldest)
        return np.where(is_first.any(axis=1), is_first.argmax(axis=1), limit)

    def _n_starts(self, episodes: _Episodes, rules: WindowRules, held: Held) -> tuple[Indices, Indices]:
        """The first step of each episode that is still held, and how many windows begin in the episode."""
        firsts = np.maximum(episodes.firsts, held.oldest)
        ends = np.minimum(episodes.ends, held.n_added)
        lengths = np.maximum(ends - firsts, 0)
        if rules.episode_end == "continue":
            last = held.n_added - rules.length
            last = last if rules.strict_length else max(last, held.oldest)
            return firsts, np.maximum(np.minimum(ends, last + 1) - firsts, 0)
        if rules.episode_end == "pad" and not rules.strict_length:
            return firsts, lengths
        whole = np.maximum(lengths - rules.length + 1, 0)
        return firsts, whole if rules.strict_length else np.where(lengths > 0, np.maximum(whole, 1), 0)

    def draw(self, count: int, rules: WindowRules, held: Held, by_episode: bool) -> tuple[Indices, Indices]:
        """Return the numbers of the first steps, and the environments, of ``count`` random windows.

        All windows are equally likely. With ``by_episode``, all episodes are equally likely, and then all windows of
        the episode. Draws from NumPy's global generator.
        """
        episodes = self._update(held)
        found = None if by_episode else self._draw_compiled(count, episodes, rules, held)
        if found is not None:
            return found
        firsts, n_starts = self._n_starts(episodes, rules, held)
        ends = n_starts.cumsum()
        total = int(ends[-1]) if len(ends) else 0
        if not total:
            raise _no_windows(rules, held)
        if by_episode:
            usable = np.flatnonzero(n_starts)
            chosen = usable[np.random.randint(0, len(usable), size=count)]
            offsets = np.random.randint(0, n_starts[chosen])
        else:
            drawn = np.random.randint(0, total, size=count)
            chosen = ends.searchsorted(drawn, side="right")
            offsets = drawn - (ends - n_starts)[chosen]
        return firsts[chosen] + offsets, episodes.envs[chosen]

    def _draw_compiled(
        self, count: int, episodes: _Episodes, rules: WindowRules, held: Held
    ) -> tuple[Indices, Indices] | None:
        """`draw` by steps; None where that cannot be compiled."""
        kernels, generator = window_kernels(), self._random.find()
        if kernels is None or generator is None:
            return None
        counts = np.empty(len(episodes.firsts), np.int64)
        numbers, envs = np.empty(count, np.int64), np.empty(count, np.int64)
        end = kernels.EPISODE_ENDS[rules.episode_end]
        with generator[0].lock:
            total: int = kernels.draw_windows(
                episodes.firsts, episodes.ends, episodes.envs, held.oldest, held.n_added, rules.length, end,
                rules.strict_length, counts, numbers, envs, generator[1], generator[2],
            )  # fmt: skip
        if not total:
            raise _no_windows(rules, held)
        return (numbers, envs) if total <= _MAX_DRAWN else None

    def every(self, rules: WindowRules, held: Held) -> tuple[Indices, Indices]:
        """Return the numbers of the first steps, and the environments, of all windows that `draw` may return."""
        episodes = self._update(held)
        firsts, n_starts = self._n_starts(episodes, rules, held)
        if not n_starts.any():
            raise _no_windows(rules, held)
        before = np.repeat(n_starts.cumsum() - n_starts, n_starts)
        return np.repeat(firsts, n_starts) + np.arange(len(before)) - before, np.repeat(episodes.envs, n_starts)

    def may_start(self, firsts: Indices, envs: Indices, rules: WindowRules, held: Held) -> Flags:
        """Whether a window may begin at each of these steps, which are held."""
        if rules.episode_end == "continue":
            last = held.n_added - rules.length
            is_early: Flags = firsts <= (last if rules.strict_length else max(last, held.oldest))
            return is_early
        if rules.episode_end == "pad" and not rules.strict_length:
            return np.ones(len(firsts), np.bool_)
        fits: Flags = self.run_lengths(firsts, envs, rules.length, held) == rules.length
        if not rules.strict_length:
            fits |= self.starts[firsts % self.n_steps, envs] | (firsts == held.oldest)
        return fits

    def fresh(self, count: int, rules: WindowRules, held: Held) -> tuple[Indices, Indices]:
        """Return up to ``count`` windows with steps that no earlier call has returned, oldest first.

        All calls together return every step that ``rules`` allow. The newest steps of a running episode are held back
        until they fill a window or the episode ends.
        """
        unseen = np.maximum(self.unseen, held.oldest)
        found: list[Indices] = []
        envs_found: list[Indices] = []
        wanted, length = count, rules.length
        while wanted:
            envs = np.flatnonzero(unseen < held.n_added)
            firsts = unseen[envs]
            if rules.episode_end == "continue":
                n_ahead = np.minimum(held.n_added - firsts, length)
                is_ready = n_ahead == length
            else:
                n_ahead = self.run_lengths(firsts, envs, length, held)
                has_ended = (firsts + n_ahead < held.n_added) | self.next_is_first[envs]
                is_ready = (n_ahead == length) | has_ended
            # the oldest ones
            chosen = np.flatnonzero(is_ready)
            chosen = chosen[np.argsort(firsts[chosen], kind="stable")[:wanted]]
            if not len(chosen):
                break
            envs, firsts, n_ahead = envs[chosen], firsts[chosen], n_ahead[chosen]
            unseen[envs] = firsts + n_ahead
            if rules.episode_end == "stop" or rules.strict_length:
                # the window at the end of an episode is filled up with steps that were returned before
                n_back = self._steps_before(firsts, envs, length, held)
                n_missing = np.minimum(length - n_ahead, n_back)
                firsts, n_ahead = firsts - n_missing, n_ahead + n_missing
            if rules.strict_length:
                envs, firsts = envs[n_ahead == length], firsts[n_ahead == length]
            found.append(firsts)
            envs_found.append(envs)
            wanted -= len(firsts)
        self.unseen = unseen
        if not found:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        return np.concatenate(found), np.concatenate(envs_found)

    def return_unseen(self, unseen: Indices) -> None:
        """Let `fresh` return windows again whose batch failed; ``unseen`` is `unseen` from before they were drawn."""
        self.unseen = np.minimum(self.unseen, unseen)

    # ---- copies ----

    def frozen(self) -> EpisodeIndex:
        """Return a copy."""
        copied = object.__new__(EpisodeIndex)
        copied.__setstate__(self.__getstate__())
        return copied

    def __getstate__(self) -> dict[str, Any]:
        arrays = {name: getattr(self, name).copy() for name in ("starts", "next_is_first", "unseen")}
        return {"n_steps": self.n_steps, "n_envs": self.n_envs, **arrays}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _episodes=None, _random=GlobalGenerator())


def _no_windows(rules: WindowRules, held: Held) -> EmptyBufferError:
    count = held.n_added - held.oldest
    if not count:
        return EmptyBufferError("the buffer is empty; add transitions before sampling (see learning_starts)")
    return EmptyBufferError(
        f"none of the episodes in the {count} steps of the buffer has {rules.length} steps; lower length and burn_in, "
        "add more steps, or leave out strict_length to pad shorter windows"
    )
