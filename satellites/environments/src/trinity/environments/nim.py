"""Nim with one pile, a game of two players: the one who takes the last stone wins."""

from typing import Any

from trinity.environments.arguments import Arguments
from trinity.environments.replies import ReplyFormat, parse
from trinity.sdk.environment import Description, Environment, Observation

FIRST, SECOND = "first", "second"


class Nim(Environment):
    """Players take 1 to `most` stones in turn. The one who takes the last stone wins: reward 1, and -1 for the other.

    A reply that is no such number loses at once. A row is {"stones": 9}. Metrics of a player: `best_moves`, the share
    of its moves that left a multiple of `most` + 1 where this was possible (Bouton, "Nim, a game with a complete
    mathematical theory", 1901), and `unusable`, 1 after a reply that lost at once.
    """

    description = Description(
        "nim", "Two players take stones in turn; the last one wins.", deterministic=True, players=(FIRST, SECOND)
    )
    isolation = "none"

    def reset(self, task: dict[str, Any], args: dict[str, Any], seed: int) -> Observation:
        row, arguments = Arguments(task, "task"), Arguments(args)
        self.stones = row.integer("stones", 9, low=1, high=1000)
        self.most = arguments.integer("most", 3, low=1, high=100)
        forms = [form.value for form in ReplyFormat]
        self.form = arguments.choice("reply_format", ReplyFormat.LENIENT, forms)
        arguments.finish()
        self.acting, self.waiting = FIRST, SECOND
        self.best: dict[str, list[bool]] = {FIRST: [], SECOND: []}
        instructions = (
            f"Two players take 1 to {self.most} stones from a pile in turn. Whoever takes the last stone wins. "
            "Reply with the number of stones that you take."
        )
        text = f"{instructions}\n\n{self._pile()}"
        return Observation(text, info={"instructions": instructions}, player=self.acting)

    def step(self, action: str) -> Observation:
        taken = self._taken(action)
        if taken is None:
            return self._over(self.waiting, f"Only 1 to {min(self.most, self.stones)} can be taken.", unusable=True)
        if wanted := self.stones % (self.most + 1):
            self.best[self.acting].append(taken == wanted)
        self.stones -= taken
        if not self.stones:
            return self._over(self.acting, f"{self.acting} took the last stone.")
        metrics = self._metrics(unusable=False)
        self.acting, self.waiting = self.waiting, self.acting
        return Observation(self._pile(), metrics=metrics, player=self.acting)

    def _taken(self, action: str) -> int | None:
        """The number of stones in a reply; None for a reply that cannot be used."""
        said = parse(action, self.form).action
        return int(said) if said in map(str, range(1, min(self.most, self.stones) + 1)) else None

    def _over(self, winner: str, text: str, unusable: bool = False) -> Observation:
        rewards = {player: 1.0 if player == winner else -1.0 for player in (FIRST, SECOND)}
        return Observation(text, done=True, metrics=self._metrics(unusable), rewards=rewards)

    def _metrics(self, unusable: bool) -> dict[str, float]:
        best = self.best[self.acting]
        return {"unusable": float(unusable)} | ({"best_moves": sum(best) / len(best)} if best else {})

    def _pile(self) -> str:
        return f"{self.stones} stone{'s' if self.stones > 1 else ''}"
