"""Evaluation of a model on held-out users.

Modules: `next_word` (accuracy, loss and predictions, as training reports them), `measures` (figures by token, user and
word frequency, and two baselines, as measures.json).
"""
