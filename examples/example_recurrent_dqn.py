"""Train a recurrent DQN like R2D2, with burn-in, stored states and priorities, on a maze that needs memory."""

from __future__ import annotations

import argparse
import copy

import memory_maze
import numpy as np
import torch
from stable_baselines3.common.utils import set_random_seed
from stable_baselines3.common.vec_env import DummyVecEnv

from sb3_extra_buffers.compressed import CompressedSequenceReplayBuffer

N_ENVS, HIDDEN, BURN_IN, LENGTH = 16, 64, 2, 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--timesteps", type=int, default=100_000, help="steps of all environments together")
    parser.add_argument("--quick", action="store_true", help="stop when nine in ten turns are right")
    options = parser.parse_args()
    set_random_seed(0)
    rng, env = np.random.default_rng(0), DummyVecEnv([memory_maze.MemoryMaze] * N_ENVS)
    env.seed(0)
    network = memory_maze.RecurrentQ(2, HIDDEN)
    target, optimizer = copy.deepcopy(network), torch.optim.Adam(network.parameters(), lr=1e-3)
    settings = {"n_envs": N_ENVS, "recurrent_states": {"h": HIDDEN}, "prioritized": True}
    buffer = CompressedSequenceReplayBuffer(100_000, env.observation_space, env.action_space, "cpu", **settings)
    obs, state, turns = env.reset(), torch.zeros(N_ENVS, HIDDEN), []
    for step in range(1, options.timesteps // N_ENVS + 1):
        with torch.no_grad():
            values, states = network(torch.as_tensor(obs)[:, None], state)
        greedy = rng.random(N_ENVS) > max(1 - step / 500, 0.1)
        actions = np.where(greedy, values[:, 0].argmax(1).numpy(), rng.integers(2, size=N_ENVS))
        next_obs, rewards, dones, infos = env.step(actions)
        real_next = next_obs.copy()
        for i in np.flatnonzero(dones):
            real_next[i] = infos[i]["terminal_observation"]
        turns += (rewards > 0)[dones & greedy].tolist()
        buffer.add(obs, real_next, actions, rewards, dones, infos, recurrent_state={"h": state.numpy()})
        obs, state = next_obs, states[:, 0] * torch.as_tensor(~dones)[:, None]  # a new episode begins with zeros
        if step >= 100 and step % 4 == 0:
            learn(buffer, network, target, optimizer)
        if step % 200 == 0:
            target.load_state_dict(network.state_dict())
            right = np.mean(turns[-200:])
            print(f"{step * N_ENVS:>7,} steps: {right:.0%} of the last turns were right (50% without memory)")
            if options.quick and right > 0.9:
                break
    print(buffer.memory_usage())


def learn(buffer, network, target, optimizer) -> None:  # type: ignore[no-untyped-def]
    batch = buffer.sample_sequences(32, LENGTH, BURN_IN, episode_end="pad")
    with torch.no_grad():  # the network has changed since the state was stored: bring it up to date
        _, warm = network(batch.observations[:, :BURN_IN], batch.recurrent_states["h"])
    values, states = network(batch.observations[:, BURN_IN:], warm[:, -1])
    rewards, dones, discounts, mask = (
        part[:, BURN_IN:] for part in (batch.rewards, batch.dones, batch.discounts, batch.learn_mask)
    )
    chosen = values.gather(2, batch.actions[:, BURN_IN:])[..., 0]
    with torch.no_grad():  # values of each next observation, from the state after the step
        images, after = batch.next_observations[:, BURN_IN:].flatten(0, 1)[:, None], states.flatten(0, 1)
        best = network(images, after)[0].argmax(2, keepdim=True)
        goal = rewards + discounts * (1 - dones) * target(images, after)[0].gather(2, best).view_as(chosen)
    errors = (chosen - goal) * mask
    optimizer.zero_grad()
    ((batch.weights[:, None] * errors**2).sum() / mask.sum()).backward()
    optimizer.step()
    buffer.update_priorities(batch, errors.detach().abs())
    # the states before the second and all later steps
    buffer.update_recurrent_states(batch, {"h": torch.cat([warm, states], 1)[:, :-1].detach()}, offset=1)


if __name__ == "__main__":
    main()
