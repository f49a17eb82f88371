"""Federated training: users' text stays on their nodes, and the server sees integers, or only their sum.

    messages.py             what server and nodes send each other
    node.py                 a node: local text in, clipped integers out; one answer per request
    secure_aggregation.py   masks, shares and keys: the server learns the sum of those who finished, and nothing else
    server.py               the engine of the server: asks the nodes, checks or unmasks what they send
    flower.py               Flower's ServerApp and ClientApp around the two, and its simulation on this machine

The server runs the same training loop as `unheard train` (training/loop.py): it draws the cohort, charges the ledger,
divides by declared constants and adds the noise. Only the engine differs. Nothing but flower.py and
secure_aggregation.py imports Flower.
"""
