"""The reproduction of the paper: pre-registered rules, run schedule, run scripts and results. Not part of the installed package."""
