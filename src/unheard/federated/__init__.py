"""Federated training: users' text stays on their nodes, and the server sees clipped integers, or only their sum.

    messages.py             the messages between the server and the nodes
    node.py                 a node: computes clipped integers from local text; sends one answer per request
    secure_aggregation.py   masks, shares and keys: the server learns only the sum of the parties that finished
    server.py               the engine of the server: sends requests to the nodes, and checks or unmasks the answers
    flower.py               Flower's ServerApp and ClientApp for server and node, and its simulation on this machine

The server runs the same training loop as `unheard train` (training/loop.py): it draws the cohort, charges the ledger,
divides by declared constants and adds the noise. Only the engine differs. Only flower.py and secure_aggregation.py
import Flower.
"""
