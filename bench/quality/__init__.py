"""The cost of each precision on the held-out text."""
