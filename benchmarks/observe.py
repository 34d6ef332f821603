"""Speed of `trinity ui`: pages of a run of a million samples, and scrolling through a response of 100,000 tokens.

`python benchmarks/observe.py [--samples 1000000] [--tokens 100000]`. Run with tests/ on PYTHONPATH. Pages are
requested over ASGI in this process; tokens are scrolled in Debian's chromium.
"""

import argparse
import base64
import json
import shutil
import statistics
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import uvicorn
from starlette.testclient import TestClient

from support.fakes.pages.recorded_run import experience, make_job
from trinity.runtime.process import free_port
from trinity.ui.app import make_app
from trinity.ui.places import Places

KEY = "the-key"
REPEATS = 20
# Intervals of frames in milliseconds, while the page is scrolled to its end by 600 pixels a frame.
FRAMES = """async () => {
  const found = [];
  let before = performance.now(), still = 0;
  while (still < 60 && found.length < 20000) {
    window.scrollBy(0, 600);
    const now = await new Promise(requestAnimationFrame);
    found.push(now - before);
    before = now;
    const isWhole = !document.querySelector("main [data-more]");
    const isEnd = isWhole && window.innerHeight + window.scrollY >= document.documentElement.scrollHeight - 2;
    still = isEnd ? still + 1 : 0;
  }
  return found;
}"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--tokens", type=int, default=100_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.samples:
            measure_pages(make_job(Path(folder, "many")), options.samples)
        if options.tokens:
            measure_tokens(make_job(Path(folder, "long")), options.tokens)


def measure_pages(job: Path, samples: int) -> None:
    """Prints medians and the slowest of REPEATS, for the list of runs, the run, and a sample of the newest step."""
    steps = max(1, samples // 1000)
    with (job / "buffer/experience_buffer.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            file.writelines(
                json.dumps(experience(step, 125 * step + place // 8, place % 8)) + "\n" for place in range(1000)
            )
    line = {"time": 1.7e9, "sample/reward_mean": 0.5, "time/step": 1.0, "time/wait": 2.0}
    with (job / "monitor/trainer.jsonl").open("w") as file:
        file.writelines(json.dumps({"step": step, **line}) + "\n" for step in range(1, steps + 1))
    size = (job / "buffer/experience_buffer.jsonl").stat().st_size
    print(f"{1000 * steps:,} samples, {size / 2**20:.0f} MiB")
    with TestClient(make_app(Places(job), KEY), base_url="http://127.0.0.1") as client:
        client.get(f"/?key={KEY}")
        run = f"/run/{next(iter(Places(job).find()))}"
        for name, path in {"runs": "/", "run": run, "newest sample": f"{run}/step/{steps}/sample/3"}.items():
            first, *others = [_seconds(client, path) for _ in range(REPEATS)]
            print(f"{name}: first {1000 * first:.0f} ms, then {1000 * statistics.median(others):.0f} ms (limit 300)")


def _seconds(client: TestClient, path: str) -> float:
    begin = time.perf_counter()
    client.get(path).raise_for_status()
    return time.perf_counter() - begin


def measure_tokens(job: Path, tokens: int) -> None:
    """Prints the intervals between frames while a response is scrolled through from its first to its last token."""
    from playwright.sync_api import sync_playwright

    random = np.random.default_rng(1)
    arrays = {
        "token_ids": random.integers(1, 1000, tokens + 2).astype("<i4"),
        "mask": (random.random(tokens) < 0.9).astype("u1"),
        "logprobs": -random.exponential(1.0, tokens).astype("<f4"),
    }
    packed = {name: base64.b64encode(values.tobytes()).decode() for name, values in arrays.items()}
    row = experience(1, 1, 0, arrays=packed, response_tokens=tokens, versions=[[0, 0, tokens]])
    (job / "buffer/experience_buffer.jsonl").write_text(json.dumps(row) + "\n")
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(make_app(Places(job), KEY), port=port, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.02)
    run = f"http://127.0.0.1:{port}/run/{next(iter(Places(job).find()))}"
    with sync_playwright() as playwright:
        options = {"executable_path": shutil.which("chromium"), "args": ["--headless", "--no-sandbox"]}
        browser = playwright.chromium.launch(**options)  # type: ignore[arg-type]
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.goto(f"{run}?key={KEY}")
        page.goto(f"{run}/step/1/sample/0?by=logprob")
        frames = page.evaluate(FRAMES)
        shown = page.locator(".tokens").last.text_content() or ""
        browser.close()
    server.should_exit = True
    thread.join(30)
    p50, p95 = np.percentile(frames, [50, 95])
    print(f"{tokens:,} tokens, {len(shown):,} characters: {len(frames)} frames, {p50:.0f} ms in the middle, "
          f"{p95:.0f} ms at 95 % (limit 33), {max(frames):.0f} ms at most")  # fmt: skip


if __name__ == "__main__":
    main()
