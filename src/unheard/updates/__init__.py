"""One user in, one delta out."""
