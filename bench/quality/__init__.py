"""What each precision costs on the held-out text."""
