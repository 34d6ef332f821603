"""Rewards of plain calls: a run with `explorer.traffic` learns from what its clients say of its replies, later.

done = OpenAI(base_url=url, api_key=key).chat.completions.create(model="policy", messages=messages)
...
reward_call(url, key, done.id, 1.0)
"""

from trinity.api.numbers import real_number
from trinity.sdk.sessions import send


def reward_call(base_url: str, key: str, call_id: str, reward: float) -> None:
    """Sends the reward of a response, by its id, with the key of its call. Any explorer of the run takes it.

    Raises CallRefused (unknown_id, already_rewarded, invalid_value), InvalidInput for a reward that is no number, and
    OSError if no server answers.
    """
    send("POST", f"{base_url.rstrip('/')}/rewards", key, {"id": call_id, "reward": real_number(reward, "reward")})


def delete_call(base_url: str, key: str, call_id: str) -> None:
    """Deletes the recording of a response, and its reward. Raises as `reward_call` does."""
    send("DELETE", f"{base_url.rstrip('/')}/chat/completions/{call_id}", key)
