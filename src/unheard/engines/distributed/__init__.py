"""Engines on several processes (torch.distributed): the leader asks, every rank sums its share of a cohort."""
