"""The readable model in the checkpoint's layout."""
