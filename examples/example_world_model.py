"""Train a small world model on windows of a game: encode each frame, remember, predict the next frame."""

from __future__ import annotations

import argparse

import numpy as np
import torch
from torch import nn

from sb3_extra_buffers.replay_buffers import CompressedEmbodiedReplay
from sb3_extra_buffers.training_utils.atari import make_env


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="record 3,200 steps and train for 40 updates")
    n_steps, n_updates = (400, 40) if parser.parse_args().quick else (10_000, 5_000)
    torch.manual_seed(0)

    # record: as DreamerV3 does, one step of one worker at a time
    replay = CompressedEmbodiedReplay(length=64, capacity=100_000, online=True)
    env = make_env("MsPacmanNoFrameskip-v4", n_envs=8, framestack=1, seed=0, native=True)
    frames, dones = env.reset(), np.ones(8, bool)
    for _ in range(n_steps):
        actions = np.array([env.action_space.sample() for _ in range(8)])
        for worker in range(8):
            step = {"image": frames[worker], "action": actions[worker], "is_first": dones[worker]}
            replay.add(step, worker)
        frames, _, dones, _ = env.step(actions)
    env.close()

    # train: the state after frame t and action t predicts how frame t + 1 differs from frame t
    encoder = nn.Sequential(nn.Conv2d(1, 16, 8, 4), nn.ReLU(), nn.Conv2d(16, 16, 4, 2), nn.ReLU(), nn.Flatten())
    memory, decoder = nn.GRU(16 * 81 + 9, 128, batch_first=True), nn.Linear(128, 84 * 84)
    parameters = [*encoder.parameters(), *memory.parameters(), *decoder.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=1e-3)
    for parameter in decoder.parameters():
        nn.init.zeros_(parameter)  # begin with "nothing changes"
    losses: list[float] = []
    for update in range(1, n_updates + 1):
        batch = replay.sample(8)
        images = torch.from_numpy(batch["image"]).float() / 255  # [batch, 64, 1, 84, 84]
        actions = nn.functional.one_hot(torch.from_numpy(batch["action"]), 9)
        encoded = encoder(images.flatten(0, 1)).unflatten(0, images.shape[:2])
        states, _ = memory(torch.cat([encoded, actions], 2))
        change = (images[:, 1:] - images[:, :-1]).flatten(2)
        continues = torch.from_numpy(~batch["is_first"][:, 1:])
        loss = ((decoder(states[:, :-1]) - change)[continues] ** 2).mean() / (change[continues] ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if update % max(n_updates // 8, 1) == 0:
            print(f"update {update:>5,}: {np.mean(losses[-5:]):.1%} of the error of a model in which nothing changes")
    print(replay.memory_usage())


if __name__ == "__main__":
    main()
