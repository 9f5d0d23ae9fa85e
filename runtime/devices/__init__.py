"""Where tensors lie: a host's memory or a GPU's."""
