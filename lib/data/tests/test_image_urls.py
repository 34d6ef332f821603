"""Images behind URLs that the YAML lists: fetched once, within limits, and from nowhere else."""

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from support.fakes.data.vision import picture
from trinity.config import ConfigError, make_plan
from trinity.config.load import parse
from trinity.data import image_urls, images
from trinity.data.experience import TaskKind
from trinity.data.image_urls import UrlReader
from trinity.data.tables import DatasetError
from trinity.data.task_source import TaskSource
from trinity.runtime.trust.ca import issue, make_authority

pytestmark = pytest.mark.core

WHITE = picture(colour="white")
MOVED = {
    "moved.png": "/p/white.png",
    "outside.png": "/q/white.png",
    "ring.png": "/p/ring.png",
    "metadata.png": "http://169.254.169.254/p/white.png",
    "bad.png": "http://[::1",
}


class Shop(BaseHTTPRequestHandler):
    """/p/white.png is a picture, /p/busy.png at the second try; other names say what is wrong with them."""

    def do_GET(self) -> None:
        server: Any = self.server
        server.asked.append(self.requestline.split()[1])
        name = self.path.rpartition("/")[2]
        goes_to = MOVED.get(name)
        if goes_to:
            self.send_response(302)
            self.send_header("Location", goes_to)
            self.end_headers()
            return
        busy = name == "busy.png" and server.asked.count(self.path) == 1
        self.send_response(503 if busy else 404 if name == "gone.png" else 200)
        self.send_header("Content-Length", str(len(WHITE) + (name == "short.png")))
        self.end_headers()
        if name != "drip.png":
            self.wfile.write(WHITE)
            return
        for index in range(len(WHITE)):  # each byte in time, the whole one is not
            time.sleep(0.1)
            self.wfile.write(WHITE[index : index + 1])
            self.wfile.flush()

    def log_message(self, *_: Any) -> None:
        return


@pytest.fixture
def shop(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadingHTTPServer]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Shop)
    server.asked, server.daemon_threads, server.block_on_close = [], True, False
    monkeypatch.setattr(image_urls, "_PAUSE_SECONDS", 0.01)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def base(shop: ThreadingHTTPServer, host: str = "127.0.0.1") -> str:
    return f"http://{host}:{shop.server_address[1]}/p/"


def test_an_image_is_fetched_once(shop: Any) -> None:
    here = base(shop)
    forms: list[Any] = [
        here + "white.png",
        {"type": "image_url", "image_url": {"url": here + "white.png"}},
        [here + "white.png", here + "white.png#part"],
    ]
    for form in forms:
        assert set(images.of_row({"i": form}, "i", Path(), [here])) == {WHITE}
    assert shop.asked == ["/p/white.png"]
    assert images.of_row({"i": f"http://127.0.0.1:{shop.server_port}//p/a b/\u00e9.png?x=1"}, "i", Path(), [here[:-2]])
    assert shop.asked[1:] == ["//p/a%20b/%C3%A9.png?x=1"]


@pytest.mark.parametrize("name", ["moved.png", "busy.png"])
def test_redirects_among_what_is_listed_are_followed_and_what_passes_is_tried_again(name: str, shop: Any) -> None:
    assert UrlReader([base(shop)], 1000).read(base(shop) + name) == WHITE
    assert len(shop.asked) == 2


@pytest.mark.parametrize(
    ("name", "said", "asked"),
    [
        ("../q/white.png", "format.image_urls has no beginning of it; list that, or download it", 0),
        ("%2e%2E/q/white.png", "format.image_urls has no beginning of it", 0),
        ("a%2F..%2f..%2fq.png", "format.image_urls has no beginning of it", 0),
        ("outside.png", "is redirected to /q/white.png: format.image_urls has no beginning of it", 1),
        ("metadata.png", "is redirected to http://169.254.169.254/p/white.png: format.image_urls has no", 1),
        ("bad.png", "is redirected to http://[::1: ", 1),
        ("ring.png", "is redirected more than 5 times", 6),
        ("gone.png", "is answered with 404 Not Found", 1),
        ("short.png", "ends 1 bytes too early", 3),
    ],
)
def test_what_cannot_be_fetched_says_why(name: str, said: str, asked: int, shop: Any) -> None:
    with pytest.raises(DatasetError) as error:
        images.check({"i": base(shop) + name}, 3, "i", Path(), None, 40, [base(shop)])
    assert str(error.value).startswith(f"row 3: 'i' holds {base(shop)}{name}; ")
    assert said in str(error.value)
    assert len(shop.asked) == asked


@pytest.mark.parametrize(
    "answer",
    [
        b"no http\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"a" * 70_000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
        b"HTTP/1.1 302 Found\r\n\r\n",
        b"",
    ],
    ids=["no http", "a long header", "no chunk", "no location", "nothing"],
)
def test_a_server_that_answers_nonsense_is_named(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_urls, "_PAUSE_SECONDS", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    link, _ = server.accept()
                    with link:
                        link.recv(65_536)
                        link.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        here = f"http://127.0.0.1:{server.getsockname()[1]}/"
        with pytest.raises(DatasetError, match=r"cannot be fetched: |is redirected more than"):
            UrlReader([here], 1000, 5).read(here + "a.png")
        server.shutdown(socket.SHUT_RDWR)
        thread.join(5)


def test_the_images_of_a_row_have_a_size_and_a_time_together(shop: Any) -> None:
    reader = UrlReader([base(shop)], len(WHITE) + 10)
    assert reader.read(base(shop) + "white.png?1") == WHITE
    for again in (2, 1):  # not there, and kept
        with pytest.raises(DatasetError, match="has more than the 10 bytes that its task has room for"):
            reader.read(base(shop) + f"white.png?{again}")
    begin = time.monotonic()
    with pytest.raises(DatasetError, match=r"was not there in 0.5 s"):
        UrlReader([base(shop)], 1000, 0.5).read(base(shop) + "drip.png")
    assert time.monotonic() - begin < 3


def test_private_addresses_are_called_by_their_own_name_alone(shop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    named, port = base(shop, "pictures.example"), shop.server_address[1]
    ends = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]
    real = socket.getaddrinfo

    def resolve(host: str, *args: Any, **kwargs: Any) -> Any:
        return ends if host == "pictures.example" else real(host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    for others in ([], [f"http://127.0.0.1:{port + 1}/p/"], [base(shop, "localhost")]):
        with pytest.raises(DatasetError, match=r"is at 127.0.0.1, which is no public address; list it by that address"):
            UrlReader([named, *others], 1000).read(named + "white.png")
    assert shop.asked == []
    assert UrlReader([named, base(shop)], 1000).read(named + "white.png") == WHITE
    monkeypatch.setattr(socket, "getaddrinfo", real)
    assert UrlReader([base(shop, "localhost")], 1000).read(base(shop, "localhost") + "white.png") == WHITE


def test_a_server_shows_a_certificate_that_is_accepted(
    shop: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    authority = make_authority(1)
    server = issue(authority, "shop", hosts=["127.0.0.1"], days=1)
    (tmp_path / "ca.pem").write_bytes(authority.certificate)
    (tmp_path / "server.pem").write_bytes(server.certificate + server.key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "server.pem")
    shop.socket = context.wrap_socket(shop.socket, server_side=True)
    here = base(shop).replace("http:", "https:")
    with pytest.raises(DatasetError, match="has a certificate that is not accepted: "):
        UrlReader([here], 1000, 5).read(here + "white.png")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    assert UrlReader([here], 1000, 5).read(here + "moved.png") == WHITE


def test_ipv4_in_ipv6_is_no_way_around() -> None:
    reader = UrlReader(["https://pictures.example/"], 1)
    for address in ("::ffff:127.0.0.1", "::ffff:10.0.0.1", "169.254.169.254", "100.64.0.1", "fe80::1%eth0", "::1"):
        assert not reader._may_be_called(address, "pictures.example", 443), address
    assert reader._may_be_called("8.8.8.8", "pictures.example", 443)


def test_what_is_kept_has_a_limit(monkeypatch: pytest.MonkeyPatch, shop: Any) -> None:
    monkeypatch.setattr(image_urls, "_KEPT_BYTES", 2 * len(WHITE))
    monkeypatch.setattr(image_urls, "_kept", type(image_urls._kept)())
    for name in ("a", "b", "a", "c", "a", "b"):
        assert UrlReader([base(shop)], 1000).read(f"{base(shop)}white.png?{name}") == WHITE
    assert [path[-1] for path in shop.asked] == ["a", "b", "c", "b"]


def source_of(folder: Path, rows: str, form: str) -> TaskSource:
    (folder / "rows.jsonl").write_text(rows)
    plan = make_plan(
        parse(
            f"""
model: {{model_path: m}}
algorithm: {{repeat_times: 2}}
buffer:
  batch_size: 1
  explorer_input:
    taskset: {{path: {folder}/rows.jsonl, default_workflow_type: simple_mm_workflow, format: {{{form}}}}}
""",
            "test",
        )
    )
    return TaskSource.open("run", plan, plan.tasksets[0], TaskKind.TRAIN)


def test_a_task_carries_what_its_row_names(shop: Any, tmp_path: Path) -> None:
    names = "".join(f'{{"prompt": "?", "response": "1", "i": "{base(shop)}{n}.png"}}\n' for n in ("white", "gone"))
    source = source_of(tmp_path, names, f"image_key: i, image_urls: ['{base(shop)}']")
    later = [source.train_task_later(position, 1, 0) for position in (0, 1)]
    assert [source.evaluation_id(row, 4) for row in (0, 1)] == [f"{source.taskset.name}/eval/4/{row}" for row in (0, 1)]
    assert shop.asked == []
    good, bad = later[0](), later[1]()
    assert (good.images, good.raw["i"]) == ((WHITE,), [images.digest(WHITE).hex()])
    assert bad.images == ()
    assert "gone.png; is answered with 404 Not Found" in bad.raw["i"]["problem"]


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ("image_urls: ['https://example.org/a/']", "format.image_urls: is given without image_key"),
        *(
            (f"image_key: i, image_urls: ['{url}']", "a host in small letters, and folders, with / at the end")
            for url in (
                "https://example.org", "https://example.org/a", "ftp://example.org/", "https://me@example.org/",
                "https://Example.org/", "https://example.org/a/../", "https://example.org/%2e/", "https:///a/",
                "https://example.org/?a=/", "https://a..b/", "//example.org/",
            )
        ),
        ("image_key: i, image_urls: ['https://example.org:70000/']", "must have a port of 1 to 65535"),
    ],
)  # fmt: skip
def test_what_is_no_beginning_of_a_url_is_refused(form: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        source_of(tmp_path, "{}", form)
    assert said in str(error.value)
    assert "image_urls" in str(error.value)
