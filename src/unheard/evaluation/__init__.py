"""Evaluation of a model on held-out users.

Modules: `next_word` (accuracy, loss and predictions, as training reports them), `measures` (accuracies by token, by
user and by word frequency, and two baselines, written to measures.json), `kernels` (ranks and losses on a GPU).
"""
