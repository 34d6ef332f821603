"""A process of the trainer: its rank and device, what ranks exchange, and messages between its threads."""
