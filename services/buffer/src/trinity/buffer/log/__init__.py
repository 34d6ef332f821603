"""The experience log: read, validated, summarised for the window, archived; and its dead letters."""
