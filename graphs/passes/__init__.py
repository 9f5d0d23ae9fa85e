"""Rewrites of ONNX graphs, one a file: each takes a model and returns a new one."""
