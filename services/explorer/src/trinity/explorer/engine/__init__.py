"""vLLM in this process: sampling with per-token log-probabilities and weight versions, and updates in flight."""
