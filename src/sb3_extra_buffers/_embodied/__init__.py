"""Parts of `CompressedEmbodiedReplay`."""
