"""A plugin: a reward that differs between random responses and depends only on their tokens."""

from trinity.plugins import reward_function


@reward_function("spread")
def spread(item, args):  # type: ignore[no-untyped-def]
    ids = list(item.token_ids)
    return len(set(ids)) / max(1, len(ids)) + (sum(ids) % 7) / 7
