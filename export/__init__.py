"""Checkpoint → ONNX graphs, packed weights and goldens: everything that needs torch."""
