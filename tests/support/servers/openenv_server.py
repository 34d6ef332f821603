"""A small OpenEnv server: a guessing game, with any other answer that a test sets."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from websockets.datastructures import Headers
from websockets.http11 import Request, Response
from websockets.sync.server import ServerConnection, serve


class Guessing:
    """Guess the number. `says`: type of message -> text to send instead of an answer, or None for silence."""

    def __init__(self) -> None:
        self.places = 2
        self.open = 0
        self.closed = 0
        self.required = ["guess"]
        self.says: dict[str, str | None] = {}

    def play(self, connection: ServerConnection) -> None:
        if self.open >= self.places:
            return  # the server closes with code 1000
        self.open += 1
        try:
            for text in connection:
                message = json.loads(text)
                if message["type"] == "close":
                    self.closed += 1
                    return
                answer = self.says.get(message["type"], "")
                if answer is not None:
                    connection.send(answer or json.dumps(self.answer(message)))
        finally:
            self.open -= 1

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        if message["type"] == "reset":
            self.target = message["data"]["seed"] % 10
            seen, reward, done = "Guess a digit.", None, False
        else:
            done = message["data"]["guess"] == str(self.target)
            seen, reward = "yes" if done else "no", float(done)
        return {"type": "observation", "data": {"observation": {"text": seen}, "reward": reward, "done": done}}

    def http(self, connection: ServerConnection, request: Request) -> Response | None:
        if request.path != "/schema":
            return None
        body = json.dumps({"action": {"required": self.required}}).encode()
        return Response(200, "OK", Headers({"Content-Length": str(len(body))}), body)


@contextmanager
def openenv_server() -> Iterator[tuple[str, Guessing]]:
    game = Guessing()
    with serve(game.play, "127.0.0.1", 0, process_request=game.http) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.socket.getsockname()[1]}", game
        server.shutdown()
        thread.join(10)
