"""The latent cache: its rows, who holds them, and what they cost."""
