"""A WebShop server of AgentGym's protocol around the mini shop, on a free port of this machine."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlparse

from trinity.environments.webshop.mini import MiniShop


class Shops:
    """The visits of one server. `broken`: path -> what to send instead of an answer, or seconds to wait before it."""

    def __init__(self) -> None:
        self.open: dict[int, MiniShop] = {}
        self.count = 0
        self.broken: dict[str, bytes | float] = {}

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        if path == "create":
            self.count += 1
            self.open[self.count] = MiniShop()
            return self.count
        shop = self.open[int(body["env_idx"])]
        if path == "reset":
            return [shop.reset(body["session_id"]).text, None]
        if path == "step":
            page, reward, done = shop.step(body["action"])
            return {"state": page.text, "reward": reward, "done": done, "info": None}
        if path == "close":
            del self.open[int(body["env_idx"])]
            return True
        page = shop._page()
        known = {"has_search_bar": page.search_bar, "clickables": list(page.clickables)}
        return {"observation": page.text, "instruction_text": page.instruction, "available_actions": known}[path]


@contextmanager
def webshop_server() -> Iterator[tuple[str, Shops]]:
    shops = Shops()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            query = parse_qs(urlparse(self.path).query)
            self._answer({name: values[0] for name, values in query.items()})

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _answer(self, body: dict[str, Any]) -> None:
            path = urlparse(self.path).path.strip("/")
            broken = shops.broken.get(path)
            if isinstance(broken, float):
                time.sleep(broken)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(broken if isinstance(broken, bytes) else json.dumps(shops.answer(path, body)).encode())

        def log_message(self, *_: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", shops
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()
