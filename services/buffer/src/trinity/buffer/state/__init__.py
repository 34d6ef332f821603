"""The state that all rooms of the buffer share about one run: its context, its streams, its record in KV."""
