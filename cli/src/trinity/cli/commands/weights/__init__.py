"""Commands on weight versions: list, pin, roll back, and the explorers that serve them."""
