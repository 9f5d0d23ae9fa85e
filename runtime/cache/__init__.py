"""The latent cache: its rows, the sequences that hold them, and what they cost."""
