"""What each command of `trinity` does, one module each; `trinity.cli.main` declares them."""
