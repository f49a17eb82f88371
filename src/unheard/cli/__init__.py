"""Words in, calls out: one file per verb, heavy imports inside the verb."""
