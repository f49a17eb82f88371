"""Measures how fast this machine trains (`benchmark`), and estimates the machine time of a plan (`estimate`)."""
