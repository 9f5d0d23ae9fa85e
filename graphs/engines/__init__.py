"""Engines: rules that keep them fast, building them, and what they may allocate."""
