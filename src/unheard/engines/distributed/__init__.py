"""One engine on several processes.

process_group   connects the processes, and sends messages and sums between them
engine          divides the users of a cohort among the processes and adds their sums
parallel_map    computes evaluations and audits on all processes
"""
