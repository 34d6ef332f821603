"""What the sync service keeps in KV: records and manifests, mirrored in memory, changed by compare-and-set."""
