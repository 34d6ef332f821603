"""The experts to which the engine's routers sent the tokens of an experience, for router replay (arXiv:2510.11370)."""

import zlib
from dataclasses import dataclass

import numpy as np

from trinity.config.experts import Mixture
from trinity.runtime.errors import InvalidInput

# Bytes of a token's routes before compression. Kimi-K2 has 976: 61 layers of 8 experts, 2 bytes each.
MOST_BYTES_OF_A_TOKEN = 4096
MOST_EXPERTS = 2**15  # ids fit into int16


@dataclass(frozen=True)
class Routes:
    """Expert ids of every token but the last, which no engine reads, in every layer.

    data: zlib of little-endian unsigned ids of `id_bytes` (1 or 2) each, [layers, chosen, T - 1] for T tokens. Layers
    without experts have zeros.
    """

    layers: int
    chosen: int
    id_bytes: int
    data: bytes

    @classmethod
    def of(cls, ids: np.ndarray) -> "Routes":
        """Compresses uint8 or uint16 [T - 1, layers, chosen]."""
        kind = ids.dtype.newbyteorder("<")
        data = np.ascontiguousarray(ids.transpose(1, 2, 0), dtype=kind).tobytes()
        return cls(ids.shape[1], ids.shape[2], kind.itemsize, zlib.compress(data, 1))

    def ids(self, tokens: int, field: str = "routes") -> np.ndarray:
        """Unsigned [tokens - 1, layers, chosen]. Raises InvalidInput naming `field` for data of another size."""
        of_token = self.layers * self.chosen * self.id_bytes
        if self.id_bytes not in (1, 2):
            raise InvalidInput(f"{field}.id_bytes", f"is {self.id_bytes}, must be 1 or 2")
        if min(self.layers, self.chosen) < 1 or of_token > MOST_BYTES_OF_A_TOKEN:
            problem = f"are {self.layers} x {self.chosen} ids of {self.id_bytes} bytes a token"
            raise InvalidInput(field, f"{problem}, must have 1 to {MOST_BYTES_OF_A_TOKEN} bytes")
        expected = of_token * (tokens - 1)
        reader = zlib.decompressobj()
        try:
            data = reader.decompress(self.data, expected + 1)
        except zlib.error as error:
            raise InvalidInput(f"{field}.data", f"cannot be decompressed: {error}") from None
        if len(data) != expected or not reader.eof or reader.unused_data:
            raise InvalidInput(
                f"{field}.data", f"does not have {expected} bytes, those of {tokens} tokens but the last"
            )
        ids = np.frombuffer(data, f"<u{self.id_bytes}").reshape(self.layers, self.chosen, tokens - 1)
        return ids.transpose(2, 0, 1)

    def check(self, field: str, tokens: int, mixture: Mixture | None) -> None:
        """Raises InvalidInput for malformed data, and for routes that the model does not have."""
        if mixture is not None and (self.layers, self.chosen) != (mixture.layers, mixture.chosen):
            problem = f"are of {self.layers} layers and {self.chosen} experts a token"
            raise InvalidInput(field, f"{problem}, the model has {mixture.layers} and {mixture.chosen}")
        largest = int(self.ids(tokens, field).max(initial=0))
        experts = MOST_EXPERTS if mixture is None else mixture.experts
        if largest >= experts:
            raise InvalidInput(f"{field}.data", f"has expert {largest}; ids are below {experts}")
