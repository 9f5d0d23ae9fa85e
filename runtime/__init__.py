"""Engines, weights and cache → tokens. Opens nothing outside a build folder."""
