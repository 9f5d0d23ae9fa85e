"""From a checkpoint to the files that engines read."""
