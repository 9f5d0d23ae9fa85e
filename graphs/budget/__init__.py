"""A model's cost on a GPU, computed from its config: bytes, operations, memory, least time."""
