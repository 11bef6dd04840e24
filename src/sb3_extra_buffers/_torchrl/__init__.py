"""Integration with TorchRL: what `sb3_extra_buffers.replay_buffers` is built from."""
