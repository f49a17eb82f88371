"""Run folders in, pages out (no torch)."""
