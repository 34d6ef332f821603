"""On which addresses processes listen."""

import psutil

LOOPBACK = ("127.0.0.1", "::1")


def listeners(pid: int) -> set[tuple[str, int]]:
    """(host, port) of each TCP socket that a process listens on; none if it ended meanwhile."""
    try:
        found = psutil.Process(pid).net_connections(kind="tcp")
    except psutil.NoSuchProcess:
        return set()
    return {(one.laddr.ip, one.laddr.port) for one in found if one.status == psutil.CONN_LISTEN}
