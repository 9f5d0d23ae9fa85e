"""Requests: admission, sampling, and what ends them."""
