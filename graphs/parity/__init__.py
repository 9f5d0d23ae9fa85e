"""Graphs held against the reference: replays, comparisons, findings and their causes."""
