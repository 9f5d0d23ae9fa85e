"""Goldens: the values that parity compares against."""
