"""One step over all layers."""
