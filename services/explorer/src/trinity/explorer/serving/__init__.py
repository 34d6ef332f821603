"""The OpenAI-compatible endpoint over this explorer's engines, and the checkpoints it follows without a live run."""
