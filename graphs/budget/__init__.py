"""What a model costs a GPU, computed from its config: bytes, operations, memory, time at best."""
