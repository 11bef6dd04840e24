"""DQN in a single file, in the style of CleanRL: on a GPU, the whole update, sampling included, is one CUDA graph."""

from __future__ import annotations

import random
import time

import numpy as np
import torch
from ale_py.vector_env import AtariVectorEnv
from common import parse
from example_cleanrl import GAME, make_network
from graph_parts import DenseBuffer, capture
from torch import nn

from sb3_extra_buffers.tensor_buffers import TensorReplayBuffer

SPECS = {"obs": ((4, 84, 84), "uint8"), "actions": ((), "int64"), "rewards": ((), "float32"), "dones": ((), "float32")}


def main() -> None:
    sizes = {"buffer_size": 1_000_000, "learning_starts": 80_000, "batch_size": 32}
    options = parse(__doc__, timesteps=10_000_000, n_envs=8, buffer="tensor", **sizes)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    start, batch_size = (400, 16) if options.quick else (options.learning_starts, options.batch_size)
    random.seed(options.seed)
    torch.manual_seed(options.seed)
    envs = AtariVectorEnv(GAME[options.game], num_envs=options.n_envs, autoreset_mode="SameStep")
    n_actions = int(envs.single_action_space.n)
    network, target = make_network(n_actions).to(device), make_network(n_actions).to(device)
    target.load_state_dict(network.state_dict())
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-4, capturable=device.type == "cuda")
    size = options.buffer_size, SPECS, options.n_envs, device
    if options.buffer == "dense-cpu":  # for comparison, without a graph
        buffer = DenseBuffer(*size)
    else:
        buffer = TensorReplayBuffer(*size, compression_method=options.compression, image_dtype=torch.float32)

    def update() -> None:
        data = buffer.sample(batch_size)
        with torch.no_grad():
            td_target = data["rewards"] + 0.99 * target(data["next_obs"]).amax(1) * (1 - data["dones"])
        q_values = network(data["obs"]).gather(1, data["actions"][:, None]).squeeze(1)
        optimizer.zero_grad()
        nn.functional.mse_loss(q_values, td_target).backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(target.parameters(), network.parameters(), strict=True):
                slow.lerp_(fast, 0.001)

    train, began = None, time.perf_counter()
    obs, _ = envs.reset(seed=options.seed)
    score, scores = np.zeros(options.n_envs), []
    for step in range(0, options.timesteps, options.n_envs):
        actions = np.array([random.randrange(n_actions) for _ in range(options.n_envs)])
        if random.random() > max(1 - step / (0.1 * options.timesteps), 0.01):
            with torch.no_grad():
                actions = network(torch.as_tensor(obs, device=device) / 255).argmax(1).cpu().numpy()
        next_obs, rewards, dones, truncations, infos = envs.step(actions)
        ended = dones | truncations
        real_next_obs = np.where(ended[:, None, None, None], infos["final_obs"], next_obs) if ended.any() else next_obs
        buffer.add({"obs": obs, "next_obs": real_next_obs, "actions": actions, "rewards": rewards, "dones": dones})
        score += rewards
        scores += score[ended].tolist()
        score[ended] = 0
        obs = next_obs
        if step > start:
            train = train or (update if options.buffer == "dense-cpu" else capture(update, device))
            for _ in range(max(options.n_envs // 4, 1)):
                train()
        if step % 5_000 < options.n_envs:
            speed = step / (time.perf_counter() - began)
            print(f"{step:>9,} steps, {speed:,.0f} per second, mean of 20 scores {np.mean(scores[-20:] or [0]):.1f}")
    print(buffer.memory_usage())
    envs.close()


if __name__ == "__main__":
    main()
