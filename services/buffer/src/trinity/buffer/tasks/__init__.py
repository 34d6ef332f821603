"""From datasets to the queue of tasks: rows become tasks, tasksets are mixed, the feeder publishes."""
