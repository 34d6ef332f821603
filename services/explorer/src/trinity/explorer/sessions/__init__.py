"""Sessions of agents that speak HTTP: a key each, recorded tokens, and branches that become experience."""
