"""DQN in a single file, in the style of CleanRL, with a compressed replay buffer and no SB3 algorithm."""

from __future__ import annotations

import random

import numpy as np
import torch
from ale_py.vector_env import AtariVectorEnv
from common import parse
from torch import nn

from sb3_extra_buffers.compressed import CompressedReplayBuffer

GAME = {"pong": "pong", "mspacman": "ms_pacman"}


def make_network(n_actions: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Conv2d(64, 64, 3, 1), nn.ReLU(),
        nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, n_actions),
    )  # fmt: skip


def main() -> None:
    options = parse(__doc__, timesteps=10_000_000, n_envs=4, buffer_size=1_000_000)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    start, batch_size = (400, 16) if options.quick else (80_000, 32)
    random.seed(options.seed)
    torch.manual_seed(options.seed)
    envs = AtariVectorEnv(GAME[options.game], num_envs=options.n_envs, autoreset_mode="SameStep")
    n_actions = int(envs.single_action_space.n)
    network, target = make_network(n_actions).to(device), make_network(n_actions).to(device)
    target.load_state_dict(network.state_dict())
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-4)
    buffer = CompressedReplayBuffer(
        options.buffer_size,
        envs.single_observation_space,
        envs.single_action_space,
        device,
        n_envs=options.n_envs,
        compression_method="auto" if options.compression == "raw" else options.compression,
        handle_timeout_termination=False,
    )
    obs, _ = envs.reset(seed=options.seed)
    score, scores = np.zeros(options.n_envs), []
    for step in range(0, options.timesteps, options.n_envs):
        epsilon = max(1 - step / (0.1 * options.timesteps), 0.01)
        actions = np.array([random.randrange(n_actions) for _ in range(options.n_envs)])
        if random.random() > epsilon:
            with torch.no_grad():
                actions = network(torch.as_tensor(obs, device=device) / 255).argmax(1).cpu().numpy()
        next_obs, rewards, terminations, truncations, infos = envs.step(actions)
        ended = terminations | truncations
        real_next_obs = np.where(ended[:, None, None, None], infos["final_obs"], next_obs) if ended.any() else next_obs
        buffer.add(obs, real_next_obs, actions, rewards, terminations, infos)
        score += rewards
        scores += score[ended].tolist()
        score[ended] = 0
        obs = next_obs
        if step > start and step % 4 == 0:
            data = buffer.sample(batch_size)
            with torch.no_grad():
                next_values = target(data.next_observations / 255).max(1).values
                td_target = data.rewards.flatten() + 0.99 * next_values * (1 - data.dones.flatten())
            q_values = network(data.observations / 255).gather(1, data.actions).squeeze(1)
            loss = nn.functional.mse_loss(q_values, td_target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if step % 1000 == 0:
            target.load_state_dict(network.state_dict())
            print(f"{step:>9,} steps, mean of the last 20 scores {np.mean(scores[-20:] or [0]):.1f}")
    print(buffer.memory_usage())
    envs.close()


if __name__ == "__main__":
    main()
