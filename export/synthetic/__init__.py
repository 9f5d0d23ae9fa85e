"""Models made here, in the family's own format."""
