"""The commands of `trinity`, one module each; `trinity.cli.main` declares them."""
