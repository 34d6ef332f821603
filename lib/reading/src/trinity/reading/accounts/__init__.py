"""Which devices a run had, for how long, and what their seconds went to."""
