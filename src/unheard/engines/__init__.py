"""How a cohort's work is run, never what it means."""
