"""State in, next state out."""
