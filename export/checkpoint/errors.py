"""The error of a checkpoint that cannot be used; apart, so that catching it needs no torch."""


class CheckpointError(ValueError):
    """Names the tensor or file of a checkpoint that cannot be used, and what was expected."""
