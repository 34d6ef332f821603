"""Commands of tenants that train adapters through the `tinker` client: messages, checks, and their log on NATS."""
