"""What knows how Stable-Baselines3's buffers are laid out; the documented classes are thin over it."""
