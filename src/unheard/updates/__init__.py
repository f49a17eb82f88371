"""User updates: read the data of a user, divide it into batches for the local steps, and compute the user's weight."""
