"""What operators watch of an explorer: its engines' load, its tasks and its tokens."""

from trinity.explorer.engine.pool import EnginePool
from trinity.explorer.rollout.loop import Progress
from trinity.runtime.metrics import Gauge

RUNNING = Gauge("trinity_explorer_requests_running", "Sequences that vLLM samples now", ["engine"])
WAITING = Gauge("trinity_explorer_requests_waiting", "Sequences in vLLM's queue", ["engine"])
KV_CACHE = Gauge("trinity_explorer_kv_cache_usage_ratio", "Used part of vLLM's key-value cache, 0 to 1", ["engine"])
TASKS = Gauge(
    "trinity_explorer_tasks",
    "Leased tasks: running, those of evaluations among them, or waiting for a provider",
    ["state"],
)


async def measure(pool: EnginePool, progress: Progress) -> None:
    """Set the gauges."""
    for index, usage in enumerate(pool.usage()):
        RUNNING.labels(index).set(usage.running)
        WAITING.labels(index).set(usage.waiting)
        KV_CACHE.labels(index).set(usage.kv_cache_ratio)
    TASKS.labels("running").set(progress.running_tasks)
    TASKS.labels("evaluation").set(progress.evaluations)
    TASKS.labels("waiting_for_provider").set(progress.waiting_tasks)
