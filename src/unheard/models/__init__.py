"""Language models: parameters and tokens in, logits and losses out."""
