"""The mechanism: many users' deltas in, one noisy average out (sampling, clipping, aggregation, estimators, noise,
plan)."""
