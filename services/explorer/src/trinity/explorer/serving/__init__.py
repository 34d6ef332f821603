"""The OpenAI-compatible endpoint, and the checkpoints it follows where no run is live."""
