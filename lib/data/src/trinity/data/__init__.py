"""Tasks and experience as data: their types and wire format, datasets, the task pipeline, selectors, archives."""
