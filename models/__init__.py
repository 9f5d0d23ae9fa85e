"""The small trained model and its training."""
