"""A recurrent DQN in the style of R2D2: windows with burn-in, stored states and priorities, on a maze that needs memory."""

from __future__ import annotations

import argparse
import copy

import memory_maze
import numpy as np
import torch
from stable_baselines3.common.env_util import make_vec_env

from sb3_extra_buffers.compressed import CompressedSequenceReplayBuffer

N_ENVS, HIDDEN, BURN_IN, LENGTH = 16, 64, 2, 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--timesteps", type=int, default=400_000, help="steps of all environments together")
    parser.add_argument("--quick", action="store_true", help="stop once 90 % of the turns are right")
    options = parser.parse_args()
    torch.manual_seed(0)
    np.random.seed(0)
    env = make_vec_env("MemoryMaze-v0", N_ENVS, seed=0)
    network = memory_maze.RecurrentQ(2, HIDDEN)
    target = copy.deepcopy(network)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    buffer = CompressedSequenceReplayBuffer(
        100_000, env.observation_space, env.action_space, "cpu", n_envs=N_ENVS, recurrent_states={"h": HIDDEN},
        prioritized=True,
    )  # fmt: skip
    obs, state, turns = env.reset(), torch.zeros(N_ENVS, HIDDEN), []
    for step in range(options.timesteps // N_ENVS):
        with torch.no_grad():
            values, states = network(torch.as_tensor(obs)[:, None], state)
        greedy = np.random.random(N_ENVS) > max(1 - step / 500, 0.1)
        actions = np.where(greedy, values[:, 0].argmax(1).numpy(), np.random.randint(2, size=N_ENVS))
        next_obs, rewards, dones, infos = env.step(actions)
        real_next = next_obs.copy()
        for i in np.flatnonzero(dones):
            real_next[i] = infos[i]["terminal_observation"]
            turns += [rewards[i] > 0] if greedy[i] else []
        buffer.add(obs, real_next, actions, rewards, dones, infos, recurrent_state={"h": state.numpy()})
        obs, state = next_obs, states[:, 0] * torch.as_tensor(~dones)[:, None]  # a new episode begins with zeros
        if step >= 100 and step % 4 == 0:
            learn(buffer, network, target, optimizer)
        if step % 200 == 0:
            target.load_state_dict(network.state_dict())
            right = np.mean(turns[-200:] or [0])
            print(f"{step * N_ENVS:>7,} steps: {right:.0%} of the last turns were right (50% without memory)")
            if options.quick and len(turns) >= 200 and right > 0.9:
                break
    print(buffer.memory_usage())


def learn(buffer, network, target, optimizer) -> None:  # type: ignore[no-untyped-def]
    batch = buffer.sample_sequences(32, LENGTH, BURN_IN, episode_end="pad")
    with torch.no_grad():
        # warm up the state that was stored when the steps were taken: the network has changed since
        _, warm = network(batch.observations[:, :BURN_IN], batch.recurrent_states["h"])
    values, states = network(batch.observations[:, BURN_IN:], warm[:, -1])
    chosen = values.gather(2, batch.actions[:, BURN_IN:])[..., 0]
    with torch.no_grad():
        # the next observation of each step, from the state after that step
        images, after = batch.next_observations[:, BURN_IN:].flatten(0, 1)[:, None], states.flatten(0, 1)
        best = network(images, after)[0].argmax(2, keepdim=True)
        following = target(images, after)[0].gather(2, best).view_as(chosen)
        goal = batch.rewards + batch.discounts * (1 - batch.dones) * torch.nn.functional.pad(following, (BURN_IN, 0))
    errors = (chosen - goal[:, BURN_IN:]) * batch.learn_mask[:, BURN_IN:]
    loss = (batch.weights[:, None] * errors**2).sum() / batch.learn_mask.sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    buffer.update_priorities(batch, errors.detach().abs())
    buffer.update_recurrent_states(batch, {"h": torch.cat([warm, states], 1)[:, :-1].detach()}, offset=1)


if __name__ == "__main__":
    main()
