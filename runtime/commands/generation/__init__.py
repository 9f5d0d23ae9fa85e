"""What `generate` runs: prompts read and checked, run side by side, shown and saved."""
