"""Parameters and tokens in, losses out."""
