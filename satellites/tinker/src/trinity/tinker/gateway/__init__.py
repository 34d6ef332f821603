"""Takes the commands of tinker clients over HTTP, and hands out results."""
