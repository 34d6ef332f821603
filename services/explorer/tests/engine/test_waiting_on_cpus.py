"""vLLM's processes sleep between messages on a CPU, and a notification that ZeroMQ drops costs them no seconds."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from vllm.distributed.device_communicators import shm_broadcast
from vllm.platforms import current_platform

from trinity.explorer.engine.waiting import poll_briefly_on_cpus

pytestmark = [pytest.mark.core, pytest.mark.skipif(not current_platform.is_cpu(), reason="vLLM is built for GPUs")]


def test_a_message_whose_notification_is_lost_is_read_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm_broadcast.SpinCondition, "wait", shm_broadcast.SpinCondition.wait)  # is set below, undone
    poll_briefly_on_cpus()
    writer = shm_broadcast.MessageQueue(1, 1, max_chunk_bytes=2**16)
    reader = shm_broadcast.MessageQueue.create_from_handle(writer.export_handle(), 0)
    ready = threading.Thread(target=reader.wait_until_ready)
    ready.start()
    writer.wait_until_ready()
    ready.join()
    monkeypatch.setattr(writer._spin_condition, "notify", lambda: None)
    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(reader.dequeue, indefinite=True)
        time.sleep(0.1)  # it sleeps by now
        began = time.monotonic()
        writer.enqueue("a message")
        assert found.result(timeout=20) == "a message"
    assert time.monotonic() - began < 1.0
