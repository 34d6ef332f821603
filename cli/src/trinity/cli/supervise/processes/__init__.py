"""The processes of one stage: commands, settings, ports, devices."""
