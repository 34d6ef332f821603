"""The shop's search: BM25 over everything that is written about a product."""

import math
import re
from collections import Counter
from collections.abc import Sequence

from trinity.environments.webshop.catalogue import Product

_WORD = re.compile(r"[a-z0-9]+")
_K1, _B = 1.2, 0.75
MAX_RESULTS = 50
MAX_QUERY_WORDS = 50


class Search:
    """Ranks a fixed catalogue (Robertson and Zaragoza 2009, with the usual k1 and b)."""

    def __init__(self, products: Sequence[Product]) -> None:
        self._products = products
        self._words = [Counter(_WORD.findall(_text(product))) for product in products]
        self._mean_length = sum(map(Counter.total, self._words)) / len(products)
        self._documents = Counter(word for counts in self._words for word in counts)

    def find(self, query: str) -> list[Product]:
        """The best first; none that shares no word with the query."""
        wanted = _WORD.findall(query.lower())[:MAX_QUERY_WORDS]
        scored = [
            (self._score(wanted, words), product) for words, product in zip(self._words, self._products, strict=True)
        ]
        found = sorted((pair for pair in scored if pair[0] > 0), key=lambda pair: -pair[0])
        return [product for _, product in found[:MAX_RESULTS]]

    def _score(self, wanted: Sequence[str], words: Counter[str]) -> float:
        length = _K1 * (1 - _B + _B * words.total() / self._mean_length)
        return sum(self._rarity(word) * words[word] * (_K1 + 1) / (words[word] + length) for word in wanted)

    def _rarity(self, word: str) -> float:
        documents = self._documents[word]
        return math.log(1 + (len(self._products) - documents + 0.5) / (documents + 0.5))


def _text(product: Product) -> str:
    options = (value for values in product.options.values() for value in values)
    parts = (product.title, product.description, *product.bullets, *product.attributes, *options)
    return " ".join(parts).lower()
