"""Weight versions, the explorers that serve them, and the way back."""
