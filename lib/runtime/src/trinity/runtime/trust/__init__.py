"""Identities: roles, what they may call, and how processes show who they are. See docs/security.md."""
