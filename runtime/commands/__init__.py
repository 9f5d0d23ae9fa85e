"""The commands of `python -m runtime`, a module each, and what they share."""
