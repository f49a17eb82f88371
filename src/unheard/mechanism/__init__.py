"""The mechanism: many users' deltas in, one noisy average out."""
