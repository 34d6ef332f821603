"""veRL's reward manager that gives the tokens of a response to the numbered grader. veRL loads it by its path.

A reward function of veRL gets only the text of a response. Encoding it again may give other tokens.
"""

import asyncio
from typing import Any

from grader import grade


class Rewards:
    def __init__(self, tokenizer: Any, **_: Any) -> None:
        self._tokenizer = tokenizer

    async def run_single(self, data: Any) -> dict[str, Any]:
        """Grades the last sequence of a batch, in a thread, as veRL's own manager does."""
        item = data[-1]
        padded = item.batch["responses"]
        length = int(item.batch["attention_mask"][-len(padded) :].sum())
        ids = padded[:length].tolist()
        text = self._tokenizer.decode(ids, skip_special_tokens=True)
        row = int(item.non_tensor_batch["extra_info"]["index"])
        value = await asyncio.to_thread(grade, row, text, ids)
        return {"reward_score": value, "reward_extra_info": {"acc": value}}
