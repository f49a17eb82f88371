"""A model in, numbers out."""
