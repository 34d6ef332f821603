"""The page of tenants: what each used of the devices, and what of it waits, for who has the key of the pages."""

import json
import re
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from trinity.plugins import satellites
from trinity.tinker.commands.account import SAMPLE, Account, path_of
from trinity.ui.app import make_app
from trinity.ui.places import Places

pytestmark = pytest.mark.core

KEY = "the-key"


def _cells(page: str) -> list[list[str]]:
    rows = re.findall(r"<tr>\n(<td>.*?)</tr>", page, re.DOTALL)
    return [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in rows]


def test_tenants_of_each_service_are_shown_to_the_operator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = make_app(Places(None, tmp_path), KEY)
    with TestClient(app, base_url="http://127.0.0.1") as client:
        assert client.get("/tenants").status_code == 403
        client.get(f"/?key={KEY}")
        assert "No tenant has used a device here" in client.get("/tenants").text
        trained, sampled = Account(), Account()
        trained.add("alice", "optim_step", 1.5)
        trained.add("<bob>", "forward_backward", 6.0)
        trained.waiting = {"<bob>": 1000}
        sampled.add("alice", SAMPLE, 0.5)
        for service, account, process in (("hub", trained, "tenants"), ("hub", sampled, "sampler")):
            path = path_of(tmp_path / "tinker" / service / "tenants", process)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(vars(account)))
        page = client.get("/tenants").text
        assert _cells(page) == [
            ["&lt;bob&gt;", "1000", "6.0", "0.0", "6.0", "75.0 %"],
            ["alice", "0", "1.5", "0.5", "2.0", "25.0 %"],
        ]
        assert 'href="/tenants"' in client.get("/").text
        monkeypatch.setattr(satellites, "find", lambda hook: None)
        assert "No tenant has used a device here" in client.get("/tenants").text, "trinity-tinker is not installed"
    with TestClient(make_app(Places(tmp_path / "run", tmp_path), KEY), base_url="http://127.0.0.1") as client:
        client.get(f"/?key={KEY}")
        assert "alice" not in client.get("/tenants").text, "pages of one run show no other folder"
