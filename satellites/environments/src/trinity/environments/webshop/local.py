"""WebShop as its authors publish it: web_agent_site from a folder that the user has set up."""

import os
import sys
import threading
from pathlib import Path
from typing import Any

from trinity.environments.webshop.backend import Page
from trinity.runtime.errors import Conflict

PATH_VARIABLE = "WEBSHOP_PATH"
_lock = threading.RLock()
_servers: dict[int | None, Any] = {}


class LocalShop:
    """A visit. All visits of a process share the goods, which take gigabytes, and come one at a time."""

    def __init__(self, num_products: int | None) -> None:
        environment_class = _import()
        with _lock:
            shared = {"server": _servers[num_products]} if num_products in _servers else {}
            self._engine = environment_class(
                observation_mode="text_rich", num_products=num_products, human_goals=True, **shared
            )
            _servers.setdefault(num_products, self._engine.server)

    def reset(self, session: int) -> Page:
        with _lock:
            self._engine.reset(session=session)
            return self._page()

    def step(self, action: str) -> tuple[Page, float, bool]:
        with _lock:
            _, reward, done, _ = self._engine.step(action)
            return self._page(), float(reward), bool(done)

    def close(self) -> None:
        with _lock:
            self._engine.close()

    def _page(self) -> Page:
        available = self._engine.get_available_actions()
        clickables = tuple(str(c).lower() for c in available["clickables"])
        return Page(
            self._engine.observation, bool(available["has_search_bar"]), clickables, self._engine.get_instruction_text()
        )


def _import() -> Any:
    folder = os.environ.get(PATH_VARIABLE, "")
    if folder and not (Path(folder) / "web_agent_site").is_dir():
        raise Conflict(f"{PATH_VARIABLE} is {folder}, which holds no folder web_agent_site")
    if folder and folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        from web_agent_site.envs import WebAgentTextEnv
    except ImportError as error:
        raise Conflict(
            f"webshop: backend local needs web_agent_site ({error}); clone github.com/princeton-nlp/WebShop, set it "
            f"up, and set {PATH_VARIABLE} to its folder; or use backend mini or http"
        ) from None
    return WebAgentTextEnv
