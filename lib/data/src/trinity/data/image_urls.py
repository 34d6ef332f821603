"""Reads images from http(s) URLs with a prefix that the YAML lists (format.image_urls).

Rows are untrusted. Neither a row, nor a redirect, nor a name server can lead to an address that the YAML does not list:
a private address must be the host of a listed URL.
"""

import contextlib
import ipaddress
import socket
import ssl
import string
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from urllib.parse import SplitResult, quote, urldefrag, urljoin, urlsplit

from trinity.data.tables import DatasetError

SECONDS = 30.0  # for all images of a row
_TRIES, _PAUSE_SECONDS = 3, 0.5
_REDIRECTS = 5
_KEPT_BYTES = 256 * 1024 * 1024
_PORTS = {"http": 80, "https": 443}
_REDIRECTED = (301, 302, 303, 307, 308)
_AGAIN = (408, 429, 500, 502, 503, 504)  # temporary statuses
_HEADERS = {"User-Agent": "trinity-rl", "Accept": "image/*", "Connection": "close"}

_kept: OrderedDict[str, bytes] = OrderedDict()  # by URL, the most recently used at the end
_keeping = threading.Lock()


class _Passing(DatasetError):
    """A temporary error, after which the request is repeated."""


class UrlReader:
    """Reads the URLs of one row, together at most `most_bytes` in `seconds`. URLs must begin with one of `prefixes`.

    Fetched files are cached, up to 256 MiB in a process. Connects directly, never through a proxy.
    """

    def __init__(self, prefixes: Sequence[str], most_bytes: int, seconds: float = SECONDS) -> None:
        self._prefixes = prefixes
        self._listed = {_endpoint(urlsplit(prefix)) for prefix in prefixes}
        self._left = most_bytes
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds

    def read(self, url: str) -> bytes:
        """The file at a URL. Raises DatasetError, without the URL."""
        url = self._allowed(url)
        with _keeping:
            if (found := _kept.get(url)) is not None:
                _kept.move_to_end(url)
        if found is None:
            found = self._fetched(url)
            _keep(url, found)
        self._check_size(found)
        self._left -= len(found)
        return found

    def _check_size(self, found: bytes) -> None:
        if len(found) > self._left:
            raise DatasetError(f"has more than the {self._left:,} bytes that its task has room for; make it smaller")

    def _allowed(self, url: str) -> str:
        """The URL, normalized like the prefixes. Raises DatasetError unless it begins with one of them."""
        if not self._prefixes:
            raise DatasetError("URLs are not fetched. List its beginning in format.image_urls, or download it")
        try:
            found = urlsplit(quote(urldefrag(url).url, safe=string.punctuation))
            text = found._replace(scheme=found.scheme.lower(), netloc=found.netloc.lower(), path=found.path or "/")
        except ValueError as error:
            raise DatasetError(f"is no URL: {error}") from None
        steps = text.path.replace("\\", "/").lower().replace("%2e", ".").replace("%2f", "/").replace("%5c", "/")
        if not text.geturl().startswith(tuple(self._prefixes)) or {".", ".."}.intersection(steps.split("/")):
            listed = ", ".join(self._prefixes)
            raise DatasetError(f"format.image_urls has no beginning of it; list that, or download it (now: {listed})")
        return text.geturl()

    def _fetched(self, url: str) -> bytes:
        for left in reversed(range(_TRIES)):
            try:
                return self._followed(url)
            except _Passing:
                if not left or time.monotonic() + _PAUSE_SECONDS > self._deadline:
                    raise
                time.sleep(_PAUSE_SECONDS)
        raise AssertionError("unreachable")

    def _followed(self, url: str) -> bytes:
        for _ in range(_REDIRECTS + 1):
            found = self._answer(url)
            if isinstance(found, bytes):
                return found
            try:
                url = self._allowed(urljoin(url, found))
            except ValueError as error:  # a DatasetError, or a malformed URL
                raise DatasetError(f"is redirected to {found:.200}: {error}") from None
        raise DatasetError(f"is redirected more than {_REDIRECTS} times")

    def _answer(self, url: str) -> bytes | str:
        """A file, or the location to which the server redirects."""
        where = urlsplit(url)
        try:
            with self._connection(where) as connection:
                path = where.path + (f"?{where.query}" if where.query else "")
                connection.request("GET", path, headers=_HEADERS)
                return self._body(connection.getresponse())
        except ssl.SSLCertVerificationError as error:
            raise DatasetError(f"has a certificate that is not accepted: {error.verify_message}") from None
        except (OSError, HTTPException) as error:
            if time.monotonic() >= self._deadline:
                raise DatasetError(self._late) from None
            raise _Passing(f"cannot be fetched: {str(error) or type(error).__name__}") from None

    def _body(self, response: HTTPResponse) -> bytes | str:
        if response.status in _REDIRECTED:
            return response.getheader("Location") or ""
        if response.status != 200:
            kind = _Passing if response.status in _AGAIN else DatasetError
            raise kind(f"is answered with {response.status} {response.reason:.100}")
        body = response.read(self._left + 1)
        if time.monotonic() >= self._deadline:
            raise DatasetError(self._late)
        self._check_size(body)
        if response.length:
            raise _Passing(f"ends {response.length:,} bytes too early")
        return body

    @property
    def _late(self) -> str:
        return f"was not there in {self._seconds:g} s (all images of a row together)"

    @contextlib.contextmanager
    def _connection(self, where: SplitResult) -> Iterator[HTTPConnection]:
        """Connects to the checked address, since its name may resolve differently later. Shut down at the deadline."""
        host, port = _endpoint(where)
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        plain = socket.create_connection((self._address(host, port), port), timeout=left)
        with contextlib.closing(_wrapped(plain, where.scheme, host)) as link:
            # A socket's timeout applies to each read, so a server that sends byte by byte would never time out.
            cut = threading.Timer(max(0.0, self._deadline - time.monotonic()), _shut, [link])
            cut.daemon = True
            cut.start()
            try:
                if isinstance(link, ssl.SSLSocket):
                    link.do_handshake()
                connection = (HTTPSConnection if where.scheme == "https" else HTTPConnection)(host, port)
                connection.sock = link
                yield connection
            finally:
                cut.cancel()

    def _address(self, host: str, port: int) -> str:
        """The first address of a host. Raises DatasetError if one of its addresses is private and not listed."""
        found = [str(one[4][0]) for one in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
        for address in found:
            if not self._may_be_called(address, host, port):
                fix = "list it by that address if it may be called"
                raise DatasetError(f"is at {address}, which is no public address; {fix}")
        return found[0]

    def _may_be_called(self, address: str, host: str, port: int) -> bool:
        judged = ipaddress.ip_address(address.partition("%")[0])
        judged = getattr(judged, "ipv4_mapped", None) or judged
        if host == "localhost" and judged.is_loopback:
            return True  # it is listed: other URLs were refused before
        return judged.is_global or (str(judged), port) in self._listed


def _endpoint(where: SplitResult) -> tuple[str, int]:
    return where.hostname or "", where.port or _PORTS[where.scheme]


def _wrapped(plain: socket.socket, scheme: str, host: str) -> socket.socket:
    if scheme == "http":
        return plain
    return ssl.create_default_context().wrap_socket(plain, server_hostname=host, do_handshake_on_connect=False)


def _shut(link: socket.socket) -> None:
    with contextlib.suppress(OSError):
        socket.socket.shutdown(link, socket.SHUT_RDWR)


def _keep(url: str, found: bytes) -> None:
    with _keeping:
        _kept[url] = found
        while sum(map(len, _kept.values())) > _KEPT_BYTES:
            _kept.popitem(last=False)
