"""Commands that look into a run, and repair it: log, samples, batches, weight versions, dead letters, providers."""
