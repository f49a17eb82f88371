"""Many deltas in, one noisy average out."""
