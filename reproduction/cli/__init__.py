"""Commands of the reproduction."""
