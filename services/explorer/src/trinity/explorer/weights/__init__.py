"""The weights that the engines serve: which version, how it is loaded, and whether it is right."""
