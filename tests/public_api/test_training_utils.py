"""The documented imports and calls of `sb3_extra_buffers.training_utils`."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

from sb3_extra_buffers.training_utils.atari import make_env
from sb3_extra_buffers.training_utils.buffer_warmup import warm_up
from sb3_extra_buffers.training_utils.eval_model import eval_model


def test_signatures() -> None:
    parameters = inspect.signature(make_env).parameters
    assert list(parameters)[:3] == ["env_id", "n_envs", "framestack"]
    assert parameters["framestack"].default == 4
    assert {"vec_env_cls", "seed", "wrapper_kwargs"} <= set(parameters)
    assert inspect.signature(eval_model).parameters["buffer"].default is None
    assert list(inspect.signature(warm_up).parameters)[:3] == ["model", "env", "buffer"]


def test_importing_needs_no_optional_package() -> None:
    code = (
        "import sys, gymnasium\n"
        "theirs = set(sys.modules)\n"
        "import sb3_extra_buffers.training_utils.atari, sb3_extra_buffers.training_utils.doom\n"
        "import sb3_extra_buffers.training_utils.eval_model, sb3_extra_buffers.training_utils.buffer_warmup\n"
        "print(*({'ale_py', 'vizdoom', 'cv2', 'tqdm', 'stable_baselines3'} & (sys.modules.keys() - theirs)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert (ran.stdout.strip(), ran.stderr) == ("", "")


def test_the_documented_snippet() -> None:
    pytest.importorskip("ale_py")
    pytest.importorskip("cv2")
    from sb3_extra_buffers.compressed import find_buffer_dtypes

    obs = make_env(env_id="PongNoFrameskip-v4", n_envs=1, framestack=4).observation_space
    assert obs.shape == (4, 84, 84)
    found = find_buffer_dtypes(obs_shape=obs.shape, elem_dtype=obs.dtype, compression_method="rle")  # type: ignore[arg-type]  # Gymnasium allows None
    assert found == {"elem_type": obs.dtype, "runs_type": "uint16"}
