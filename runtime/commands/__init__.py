"""What `python -m runtime` asks and shows: options, prompts, results, signals."""
