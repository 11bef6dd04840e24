"""Records observation streams of environments other than Atari games, for benchmarks to replay.

``python -m benchmarks.streams`` records all of them, ``python -m benchmarks.streams carracing video`` only these.
It needs the packages of the extra ``streams``, which ``make streams`` installs in an environment of its own;
:func:`benchmarks.feed.steps` replays recordings without them.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Generator
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from benchmarks import feed, stream_sources

Array = npt.NDArray[Any]
Act = Callable[[Any, np.random.Generator], Any]


class Source(Protocol):
    """An environment together with what acts in it."""

    def reset(self) -> Array:
        """Begin an episode; return its first frame."""

    def step(self) -> tuple[Array, bool]:
        """Return the next frame and whether it is the episode's last."""

    def close(self) -> None:
        """Release what the environment renders with."""


class Stream(NamedTuple):
    """How a stream is recorded and how it is usually stacked."""

    make: Callable[[int], Source]  # from the seed of one environment
    n_steps: int = 1000
    stack: int = 1


def random_action(env: Any, rng: np.random.Generator) -> Any:
    """Any action of a Box or Discrete space, all equally likely."""
    space = env.action_space
    if hasattr(space, "n"):
        return int(rng.integers(space.n))
    return rng.uniform(space.low, space.high).astype(space.dtype)


def drive(env: Any, rng: np.random.Generator) -> Array:
    """CarRacing: follow the track inexactly; random actions would leave the car in one place of the lawn."""
    car = env.unwrapped.car.hull
    track = np.array(env.unwrapped.track)[:, 2:]
    nearest = int(np.argmin(np.hypot(*(track - car.position).T)))
    ahead = track[(nearest + 5) % len(track)] - car.position
    # hull angle 0 points along y, angles grow to the left
    error = np.angle(np.exp(1j * (np.arctan2(ahead[1], ahead[0]) - np.pi / 2 - car.angle)))
    speed = np.hypot(*car.linearVelocity)
    steer = -1.2 * error + rng.normal(0, 0.2)
    return np.array([steer, 0.5 if speed < 40 else 0.0, 0.2 if speed > 50 else 0.0], np.float32).clip(-1, 1)


def keep_lane(env: Any, rng: np.random.Generator) -> int:
    """highway-env: mostly keep lane and speed; uniformly random actions crash after ten steps."""
    left, idle, right, _, slower = range(5)
    return int(rng.choice([left, idle, right, slower], p=[0.1, 0.5, 0.1, 0.3]))


class GymSource:
    """A Gymnasium environment, each action repeated for ``hold`` steps."""

    def __init__(
        self,
        env: Any,
        seed: int,
        act: Act = random_action,
        hold: int = 1,
        frame: Callable[[Any, Any], Array] = lambda env, obs: np.asarray(obs),
    ) -> None:
        self.env = env
        self.seed: int | None = seed
        self.rng = np.random.default_rng(seed)
        self.act = act
        self.hold = hold
        self.frame = frame
        self.count = 0
        self.action: Any = None

    def reset(self) -> Array:
        obs, _ = self.env.reset(seed=self.seed)
        self.seed = None  # later episodes continue the environment's own random sequence
        self.count = 0
        return self.frame(self.env, obs)

    def step(self) -> tuple[Array, bool]:
        if self.count % self.hold == 0:
            self.action = self.act(self.env, self.rng)
        self.count += 1
        obs, _, terminated, truncated, _ = self.env.step(self.action)
        return self.frame(self.env, obs), bool(terminated or truncated)

    def close(self) -> None:
        self.env.close()


class CrafterSource:
    """Crafter, which has the old Gym interface, with random actions."""

    def __init__(self, seed: int) -> None:
        import crafter

        class SeededEnv(crafter.Env):  # type: ignore[misc]
            """Picks creatures in an order that the seed decides; Crafter's sets of them are ordered by address."""

            def _balance_chunk(self, chunk: Any, objs: Any) -> None:
                super()._balance_chunk(chunk, sorted(objs, key=lambda obj: tuple(obj.pos)))

        self.env = SeededEnv(area=(64, 64), view=(9, 9), size=(64, 64), seed=seed)
        self.rng = np.random.default_rng(seed)

    def reset(self) -> Array:
        return np.asarray(self.env.reset())

    def step(self) -> tuple[Array, bool]:
        obs, _, done, _ = self.env.step(int(self.rng.integers(self.env.action_space.n)))
        return np.asarray(obs), bool(done)

    def close(self) -> None:
        pass


class ControlSource:
    """A task of the DeepMind Control Suite seen by its first camera, random actions, each for ``repeat`` steps."""

    def __init__(self, domain: str, task: str, size: int, repeat: int, seed: int) -> None:
        from dm_control import suite

        self.env = suite.load(domain, task, task_kwargs={"random": seed})
        self.spec = self.env.action_spec()
        self.rng = np.random.default_rng(seed)
        self.size = size
        self.repeat = repeat

    def _frame(self) -> Array:
        return np.asarray(self.env.physics.render(self.size, self.size, camera_id=0))

    def reset(self) -> Array:
        self.env.reset()
        return self._frame()

    def step(self) -> tuple[Array, bool]:
        action = self.rng.uniform(self.spec.minimum, self.spec.maximum)
        for _ in range(self.repeat):
            if self.env.step(action).last():
                return self._frame(), True
        return self._frame(), False

    def close(self) -> None:
        self.env.close()


class MetaWorldSource:
    """Meta-World's pick-place seen from a corner: RGB, or depth in metres as float32.

    A scripted policy with noise acts, so that the arm works on the object; an episode ends after 150 steps.
    """

    EPISODE = 150

    def __init__(self, size: int, depth: bool, seed: int) -> None:
        import gymnasium
        import metaworld  # noqa: F401 (registers its environments)
        import mujoco
        from metaworld.policies import SawyerPickPlaceV3Policy

        self.env = gymnasium.make("Meta-World/MT1", env_name="pick-place-v3", seed=seed)
        self.policy = SawyerPickPlaceV3Policy()
        self.renderer = mujoco.Renderer(self._simulation.model, size, size)
        if depth:
            self.renderer.enable_depth_rendering()
        self.rng = np.random.default_rng(seed)
        self.depth = depth

    @property
    def _simulation(self) -> Any:
        return self.env.unwrapped

    def _frame(self) -> Array:
        self.renderer.update_scene(self._simulation.data, camera="corner")
        frame = np.array(self.renderer.render())
        return frame[..., None] if self.depth else frame

    def reset(self) -> Array:
        self.obs, _ = self.env.reset()
        self.count = 0
        return self._frame()

    def step(self) -> tuple[Array, bool]:
        action = self.policy.get_action(self.obs) + self.rng.normal(0, 0.3, 4)
        self.obs, _, terminated, truncated, _ = self.env.step(action.clip(-1, 1).astype(np.float32))
        self.count += 1
        return self._frame(), bool(terminated or truncated or self.count == self.EPISODE)

    def close(self) -> None:
        self.renderer.close()
        self.env.close()


def carracing(seed: int) -> Source:
    """Gymnasium's CarRacing, 96x96 RGB."""
    import gymnasium

    return GymSource(gymnasium.make("CarRacing-v3"), seed, drive, hold=3)


def minigrid(seed: int) -> Source:
    """What the agent sees of MiniGrid's FourRooms, 56x56 RGB."""
    import gymnasium
    from minigrid.wrappers import ImgObsWrapper, RGBImgPartialObsWrapper

    return GymSource(ImgObsWrapper(RGBImgPartialObsWrapper(gymnasium.make("MiniGrid-FourRooms-v0"), tile_size=8)), seed)


def minigrid_full(seed: int) -> Source:
    """MiniGrid's DoorKey from above, 64x64 RGB."""
    import gymnasium
    from minigrid.wrappers import ImgObsWrapper, RGBImgObsWrapper

    return GymSource(ImgObsWrapper(RGBImgObsWrapper(gymnasium.make("MiniGrid-DoorKey-8x8-v0"), tile_size=8)), seed)


def highway(seed: int) -> Source:
    """highway-env's own grey image of the road around the car, 64x128."""
    import gymnasium
    import highway_env  # noqa: F401 (registers its environments)

    observation = {
        "type": "GrayscaleObservation",
        "observation_shape": (128, 64),
        "stack_size": 1,  # replaying stacks
        "weights": [0.2989, 0.5870, 0.1140],
        "scaling": 1.75,
    }
    env = gymnasium.make("highway-fast-v0", config={"observation": observation, "offscreen_rendering": True})
    return GymSource(env, seed, keep_lane, frame=lambda env, obs: obs[0].T[..., None])  # from stack, x, y


def highway_vector(seed: int) -> Source:
    """highway-env's positions and speeds of five cars, 5x5 float32."""
    import gymnasium
    import highway_env  # noqa: F401 (registers its environments)

    env = gymnasium.make("highway-fast-v0", config={"observation": {"type": "Kinematics"}})
    return GymSource(env, seed, keep_lane)


def miniworld(seed: int) -> Source:
    """MiniWorld's FourRooms in first person, 60x80 RGB."""
    import pyglet

    pyglet.options["headless"] = True  # must precede miniworld, which opens a window as it is imported
    import gymnasium
    import miniworld  # noqa: F401 (registers its environments)

    return GymSource(gymnasium.make("MiniWorld-FourRooms-v0"), seed, hold=2)


def halfcheetah(seed: int) -> Source:
    """Gymnasium's HalfCheetah, a vector of 17 float64."""
    import gymnasium

    return GymSource(gymnasium.make("HalfCheetah-v5"), seed)


def cheetah(seed: int) -> Source:
    """The Control Suite's cheetah, 64x64 RGB."""
    return ControlSource("cheetah", "run", 64, repeat=4, seed=seed)


def walker(seed: int) -> Source:
    """The Control Suite's walker, 84x84 RGB."""
    return ControlSource("walker", "walk", 84, repeat=2, seed=seed)


def metaworld_rgb(seed: int) -> Source:
    """Meta-World, 128x128 RGB."""
    return MetaWorldSource(128, False, seed)


def depth_float(seed: int) -> Source:
    """Meta-World, 128x128 depth in metres: rendered, so without a sensor's noise and holes."""
    return MetaWorldSource(128, True, seed)


def depth_millimetres(seed: int) -> Source:
    """``depth`` as depth cameras return it: uint16 millimetres, 0 where there is nothing within reach."""

    def convert(frame: Array) -> Array:
        millimetres = (frame * 1000).round()
        return np.where(millimetres < 2**16, millimetres, 0).astype(np.uint16)

    return Mapped(depth_float(seed), convert)


class Mapped:
    """Another source whose frames are changed one by one."""

    def __init__(self, source: Source, change: Callable[[Array], Array]) -> None:
        self.source = source
        self.change = change

    def reset(self) -> Array:
        return self.change(self.source.reset())

    def step(self) -> tuple[Array, bool]:
        frame, done = self.source.step()
        return self.change(frame), done

    def close(self) -> None:
        self.source.close()


def unit_floats(frame: Array) -> Array:
    """Pixels as float32 between 0 and 1."""
    return frame.astype(np.float32) / np.float32(255)


def as_floats(make: Callable[[int], Source]) -> Callable[[int], Source]:
    """The same stream with float32 pixels."""
    return lambda seed: Mapped(make(seed), unit_floats)


def video_noise(seed: int) -> Source:
    """``video`` with sensor noise: Gaussian, standard deviation 2, rounded."""
    rng = np.random.default_rng(seed)

    def add_noise(frame: Array) -> Array:
        return (frame + rng.normal(0, 2, frame.shape)).round().clip(0, 255).astype(np.uint8)

    return Mapped(stream_sources.Video(seed), add_noise)


STREAMS = {
    "carracing": Stream(carracing, 500),
    "crafter": Stream(CrafterSource),
    "minigrid": Stream(minigrid),
    "minigrid-full": Stream(minigrid_full),
    "video": Stream(stream_sources.Video, 500),
    "video-noise": Stream(video_noise, 500),
    "video-fixed": Stream(lambda seed: stream_sources.Video(seed, stream_sources.street()), 500),
    "scroller": Stream(stream_sources.Scroller),
    "dmc-cheetah": Stream(cheetah, stack=3),
    "dmc-walker": Stream(walker, 500, stack=3),
    "metaworld": Stream(metaworld_rgb, 500),
    "depth": Stream(depth_float, 500),
    "depth-uint16": Stream(depth_millimetres, 500),
    "highway": Stream(highway, stack=4),
    "miniworld": Stream(miniworld),
    "dmc-cheetah-float": Stream(as_floats(cheetah), stack=3),
    "video-float": Stream(as_floats(stream_sources.Video), 500),
    "highway-vector": Stream(highway_vector),
    "halfcheetah": Stream(halfcheetah),
    "halfcheetah-float32": Stream(lambda seed: Mapped(halfcheetah(seed), lambda frame: frame.astype(np.float32))),
    "noise": Stream(stream_sources.Noise, 500),
}


def play(name: str, n_envs: int, seed: int) -> Generator[feed.Frames]:
    """Play ``n_envs`` sources of one stream without end, beginning a new episode wherever one ends."""
    os.environ.setdefault("MUJOCO_GL", "egl")  # needs no display
    if os.environ.get("SDL_VIDEODRIVER") == "dummy":
        del os.environ["SDL_VIDEODRIVER"]  # highway-env returns black images with this driver
    sources = [STREAMS[name].make(seed + index) for index in range(n_envs)]
    try:
        yield feed.Frames(np.stack([source.reset() for source in sources]), np.zeros(n_envs, bool), {})
        while True:
            frames, dones, terminal = [], np.zeros(n_envs, bool), {}
            for index, source in enumerate(sources):
                frame, dones[index] = source.step()
                if dones[index]:
                    terminal[index] = frame
                    frame = source.reset()
                frames.append(frame)
            yield feed.Frames(np.stack(frames), dones, terminal)
    finally:
        for source in sources:
            source.close()


def main() -> None:
    """Record the named streams, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=f"one of {', '.join(STREAMS)}; default: all")
    parser.add_argument("--steps", type=int, help="steps per environment; default: depends on the stream")
    args = parser.parse_args()
    unknown = set(args.names) - set(STREAMS)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    failed = False
    for name in args.names or STREAMS:
        try:
            folder = feed.record(name, args.steps or STREAMS[name].n_steps)
        except (FileNotFoundError, ModuleNotFoundError) as error:
            print(f"{name}: not recorded: {error}")
            failed = True
            continue
        ends = np.load(folder / "ends.npz")
        size = (folder / "frames.bin").stat().st_size / 2**20
        shape = "x".join(map(str, ends["shape"]))
        print(f"{name}: {shape} {ends['frames'].dtype}, {len(ends['dones'])} steps, {size:.0f} MiB")
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
