"""Records and manifests in KV, mirrored in memory and changed by compare-and-set."""
