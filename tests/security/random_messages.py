"""Messages of any type with random content: what the fuzz sends."""

import importlib
import random
from typing import Any

from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from trinity.environments import ENVIRONMENTS
from trinity.environments.scorers import SCORERS
from trinity.runtime import headers
from trinity.sdk.contract import PROTOCOL_VERSION

TOKEN = "fuzz"
_ROW = '{"nums": [1, 2, 3], "target": 6, "question": "1+1", "answer": "2", "id": "FrozenLake-v1", "seed": 1}'
KNOWN: dict[str, dict[str, list[Any]]] = {
    "environment": {
        "environment": sorted(ENVIRONMENTS),
        "scorer": sorted(SCORERS),
        "task_json": [_ROW],
        "args_json": ["{}", '{"max_steps": 1}', '{"with_think": true}'],
        "protocol_version": [PROTOCOL_VERSION],
        "token": [TOKEN],
        "name": ["ours"],
        "step_timeout_seconds": [1.0],
    },
    "explorer": {
        "prompt_token_ids": [1, 2, 127],
        "messages_json": [
            '[{"role": "user", "content": "?"}]', '[{"role": 7}]', "[[]]", '[{"content": null, "role": "\\u0000"}]',
            '[{"role": "user", "content": [{"type": "text"}]}]', '[{"role": "user", "content": "\\ud800"}]',
        ],
        "max_tokens": [8], "min_tokens": [0], "temperature": [1.0], "top_p": [1.0], "n": [1, 3],
    },
}  # fmt: skip
_TEXTS = ("", "x", "a b", "../..", "{}", "[" * 3000, "null", '{"a": NaN}', "\0\x1b[31m", "sums", "é" * 300)


class Maker:
    """Messages of a type with random content, and what becomes of their bytes when some are changed."""

    def __init__(self, seed: int, run: str, **known: list[Any]) -> None:
        """`known`: values by the name of a field, with which a message comes further than with random ones."""
        self._random = random.Random(seed)
        self._known = {"run": [run], **known}

    def data(self, kind: Descriptor) -> bytes:
        chance = self._random.random()
        if chance < 0.1:
            return self._random.randbytes(self._random.randrange(200))
        data = bytearray(self._message(kind, 0).SerializeToString())
        if chance < 0.5 and data:
            for _ in range(self._random.randrange(1, 4)):
                data[self._random.randrange(len(data))] = self._random.randrange(256)
        return bytes(data[: self._random.randrange(len(data) + 1)]) if 0.5 <= chance < 0.6 else bytes(data)

    def _message(self, kind: Descriptor, depth: int) -> Any:
        message = message_factory.GetMessageClass(kind)()
        for one in kind.fields:
            if self._random.random() < 0.4 or depth > 4:
                continue
            if one.message_type is not None and one.message_type.GetOptions().map_entry:
                continue
            try:
                self._fill(message, one, depth)
            except (ValueError, TypeError, UnicodeEncodeError):
                continue  # protobuf itself refuses it
        return message

    def _fill(self, message: Any, one: FieldDescriptor, depth: int) -> None:
        if one.is_repeated:
            for _ in range(self._random.choice((0, 1, 2, 20))):
                if one.message_type is not None:
                    getattr(message, one.name).add().CopyFrom(self._message(one.message_type, depth + 1))
                else:
                    getattr(message, one.name).append(self._value(one))
        elif one.message_type is not None:
            getattr(message, one.name).CopyFrom(self._message(one.message_type, depth + 1))
        else:
            setattr(message, one.name, self._value(one))

    def _value(self, one: FieldDescriptor) -> Any:
        if one.name in self._known and self._random.random() < 0.8:
            return self._random.choice(self._known[one.name])
        match one.cpp_type:
            case FieldDescriptor.CPPTYPE_STRING if one.type == FieldDescriptor.TYPE_BYTES:
                return self._random.randbytes(self._random.randrange(60))
            case FieldDescriptor.CPPTYPE_STRING:
                return self._random.choice(_TEXTS)
            case FieldDescriptor.CPPTYPE_BOOL:
                return self._random.random() < 0.5
            case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
                return self._random.choice((0.0, -1.0, 0.5, 1e30, 1e308, float("inf"), float("nan")))
            case _:
                return self._random.choice((0, 1, 2, -1, 7, 2**31 - 1, -(2**31), 2**62, -(2**63)))

    def outcome(self) -> bytes:
        """For a subject of any kind."""
        kinds = [("experience_pb2", "Outcome"), ("task_pb2", "Task"), ("experience_pb2", "AttemptFailure")]
        module, name = self._random.choice(kinds)
        pb: Any = importlib.import_module(f"trinity.api.common.v1.{module}")
        return self.data(getattr(pb, name).DESCRIPTOR)

    def header(self) -> dict[str, str]:
        known = (headers.CRC32, headers.ORDINAL, headers.POSITION, headers.FED, headers.EVALUATION_STEP, "traceparent")
        values = ("", "x", "-1", "9" * 40, "1")
        return {name: self._random.choice(values) for name in known if self._random.random() < 0.3}
