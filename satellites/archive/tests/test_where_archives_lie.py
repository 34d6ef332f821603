"""A relative archive belongs to its job; an absolute one and a database lie where they say."""

from pathlib import Path

import pytest

from trinity.archive.mirror import in_folder

pytestmark = pytest.mark.core


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("kept.jsonl", "/job/buffer/kept.jsonl"),
        ("parts/", "/job/buffer/parts/"),
        ("/data/kept.db", "/data/kept.db"),
        ("sqlite:///gsm8k.db", "sqlite:////job/buffer/gsm8k.db"),
        ("sqlite:////data/gsm8k.db", "sqlite:////data/gsm8k.db"),
        ("postgresql://user@host/base", "postgresql://user@host/base"),
    ],
)
def test_where_an_archive_lies(path: str, expected: str) -> None:
    assert in_folder(path, Path("/job/buffer")) == expected
