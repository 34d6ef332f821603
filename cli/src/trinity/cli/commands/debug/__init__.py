"""`trinity debug`: a workflow alone against one engine."""
