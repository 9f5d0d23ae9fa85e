"""Parts of `generate`: prompts are read, checked, run side by side, shown and saved."""
