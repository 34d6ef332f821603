"""Runs YAMLs and workflows of Trinity-RFT. Its Python API for plugins is trinity.common, algorithm and utils."""
