"""Sokoban: rules, a generator of levels, a solver, and the environment."""
