"""Events in, epsilon out. Nothing here imports torch: an auditor runs it on a laptop."""
