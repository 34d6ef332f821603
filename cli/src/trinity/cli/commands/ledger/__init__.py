"""What optimizer steps learnt from: dead letters, batches, replays."""
