"""The policy as a torch module: attention, fused layers, log-probabilities, adapters, activation memory."""
