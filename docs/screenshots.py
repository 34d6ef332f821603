"""Writes the pictures of docs/ui.md from the recorded runs: `python docs/screenshots.py [FOLDER]`.

Needs Debian's chromium: apt-get install chromium. FOLDER is docs/images unless given.
"""

import io
import shutil
import subprocess
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

IMAGES = Path(__file__).parent / "images"
WIDTH, MOST_HEIGHT = 1000, 620
HEIGHTS = {"ui_run": 1030}  # with the first curves
COLOURS = 48  # a picture with all colours is four times as large
RUN, OTHER = "demo~lr-2e-4", "demo~lr-1e-4"
PAGES = {
    "ui_run": "",
    "ui_step": "/step/36",
    "ui_sample": "/step/36/sample/0?by=logprob",
    "ui_compare": f"/overlay?run={RUN}&run={OTHER}",
    "ui_lanes": "/step/35/lanes",
    "ui_trace": "/step/16/sample/0/trace",
    "ui_waste": "/waste?price=2.5",
}


def main(folder: Path) -> None:
    command = [sys.executable, "-m", "trinity.cli.main", "ui", "--demo"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as service:
        assert service.stdout is not None
        address = service.stdout.readline().strip()
        try:
            _write(address, folder)
        finally:
            service.terminate()


def _write(address: str, folder: Path) -> None:
    with sync_playwright() as playwright:
        arguments = ["--headless", "--no-sandbox"]
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=arguments)
        page = browser.new_page(viewport={"width": WIDTH, "height": MOST_HEIGHT})
        page.goto(address)
        for name, path in PAGES.items():
            page.goto(f"{address.partition('?')[0]}run/{RUN}{path}")
            page.evaluate("document.querySelector('.command')?.remove()")  # the element shows a folder of this machine
            height = min(HEIGHTS.get(name, MOST_HEIGHT), int(page.evaluate("document.body.offsetHeight")))
            clip = {"x": 0, "y": 0, "width": WIDTH, "height": height}
            taken = page.screenshot(clip=clip, full_page=True)  # type: ignore[arg-type]
            Image.open(io.BytesIO(taken)).quantize(COLOURS).save(folder / f"{name}.png", optimize=True)
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGES)
