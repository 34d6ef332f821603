"""YAMLs of runs on a user's model and data: `trinity init`, and --model and --data of run and check."""
