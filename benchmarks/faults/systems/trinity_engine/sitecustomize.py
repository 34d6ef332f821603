"""Python imports this file at the start of every process of a run, also of vLLM's engine core."""

import probe_engine

probe_engine.install()
