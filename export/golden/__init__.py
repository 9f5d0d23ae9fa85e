"""What parity compares against."""
