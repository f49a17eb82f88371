"""How fast this machine trains, and what a plan costs in machine time."""
