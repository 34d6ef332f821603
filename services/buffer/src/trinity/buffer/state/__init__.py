"""What a run is, for every room of the buffer: its context, the window over its log, the streams."""
