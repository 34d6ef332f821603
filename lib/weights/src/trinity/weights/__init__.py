"""Weight versions: their contents, their storage, their transport. See docs/weights.md."""
