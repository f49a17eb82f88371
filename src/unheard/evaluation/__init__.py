"""Evaluation of a model on held-out users.

Modules: `next_word` (accuracy, loss and predictions, as training reports them), `scores` (one row per target, and
figures by token, user and word frequency), `full` (all of them and two baselines as measures.json).
"""
