"""The filter of system calls in a sandbox: no new namespaces, no mounts, no memory outside of all limits."""

import errno
import platform
import struct

from trinity.runtime.errors import Unavailable

# machine -> (its number, those of unshare, setns, mount, memfd_create, shmget, userfaultfd, bpf, keyctl,
# perf_event_open, and that of clone)
_NUMBERS = {
    "x86_64": (0xC000003E, (272, 308, 165, 319, 29, 323, 321, 250, 298), 56),
    "aarch64": (0xC00000B7, (97, 268, 40, 279, 194, 282, 280, 219, 241), 220),
}
_NEWER = (425, 428, 430, 432, 435, 442, 447)  # io_uring_setup, open_tree, fsopen, fsmount, clone3, mount_setattr,
_CLONE_NEWUSER = 0x10000000  # memfd_secret: one number on every machine
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06


def program() -> bytes:
    """Instructions of classic BPF for this machine. Raises Unavailable for one whose calls are not known."""
    machine = platform.machine()
    if machine not in _NUMBERS:
        raise Unavailable(f"the sandbox knows no system calls of {machine}; it needs {' or '.join(_NUMBERS)}")
    architecture, refused, clone = _NUMBERS[machine]
    denied = _ERROR | errno.EPERM
    absent = _ERROR | errno.ENOSYS  # libraries then use the older call
    lines = [
        (_LOAD, 0, 0, 4),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, denied),
        (_LOAD, 0, 0, 0),
        (_AT_LEAST, 0, 1, 0x40000000),  # x32
        (_RETURN, 0, 0, denied),
    ]
    for number in refused:
        lines += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, denied)]
    for number in _NEWER:
        lines += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, absent)]
    lines += [
        (_EQUAL, 0, 3, clone),
        (_LOAD, 0, 0, 16),
        (_ANY_BIT, 0, 1, _CLONE_NEWUSER),
        (_RETURN, 0, 0, denied),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *line) for line in lines)
