"""The weights the engines serve: what is wanted, how it gets into the engines, and whether it is right."""
