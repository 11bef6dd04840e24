"""Integration with Stable-Baselines3: how its buffers are laid out. The public classes are thin wrappers."""
