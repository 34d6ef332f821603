"""The ledger: which experience each optimizer step consumes, who writes it, who serves it, what it lets go."""
