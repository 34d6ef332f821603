"""The stages of a job, one after the other, and explorers that join."""
