"""User updates: one user's data in, the batches and the weight of that user out."""
