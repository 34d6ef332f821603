"""`trinity debug`: one workflow on one engine."""
