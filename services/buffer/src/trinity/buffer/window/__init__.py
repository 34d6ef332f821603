"""The decision which log entries count and which groups become the next batch. Pure: reads no clock, log or network."""
