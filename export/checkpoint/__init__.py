"""Reading a published checkpoint."""
