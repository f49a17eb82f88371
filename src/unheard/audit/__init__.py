"""A finished run in, what can be believed of it out: does its folder fit together, and what did its model give away."""
