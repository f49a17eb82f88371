"""How fast this machine trains (`benchmark`), and what a plan costs in machine time (`estimate`)."""
