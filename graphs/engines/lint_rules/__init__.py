"""The rules of `graphs lint`, by what they are about."""
