"""Operators and scores of the task pipeline."""

import os
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.fakes.data.task_pipeline import CONTEXT, Rows, left, rows_of, scores
from trinity.data.datasets import DatasetError
from trinity.task_pipeline.base import Candidate, Context
from trinity.task_pipeline.scores import SCORES
from trinity.task_pipeline.texts import normalised, quality, repeated_share, symbol_share, text_of

pytestmark = pytest.mark.core

# Operators


@pytest.mark.parametrize(
    ("name", "args", "texts", "expected"),
    [
        ("text_length_filter", {}, ["short", "long enough"], [1]),
        ("text_length_filter", {"min_len": 2, "max_len": 3}, ["a", "ab", "abc", "abcd", "数学题"], [1, 2, 4]),
        ("words_num_filter", {"min_num": 2, "max_num": 3}, ["one", "one two", " a  b\nc ", "a b c d"], [1, 2]),
        ("alphanumeric_filter", {}, ["a...", "a....", "", "数学？"], [0, 3]),
        ("alphanumeric_filter", {"min_ratio": 0, "max_ratio": 0.5}, ["ab", "a.", ""], [1, 2]),
        ("symbols_filter", {"max_ratio": 0.25}, ["abc#", "ab##", "a, b! c?", "", "é√√√"], [0, 2, 3]),
        ("repetition_filter", {"ngram": 1}, ["a a a", "a b a", "", "a b c"], [1, 2, 3]),
        ("repetition_filter", {"unit": "character", "ngram": 2, "max_ratio": 0.0}, ["abab", "abcd", "x"], [1, 2]),
        ("exact_dedup", {}, ["What is  1+1?", "what is 1+1?", "What is 1+2?", "Ｗhat is 1+1?"], [0, 2]),
        ("exact_dedup", {"lowercase": False}, ["A b", "a b", "A\nb"], [0, 1]),
        ("exact_dedup", {"ignore_punctuation": True}, ["is it 1?", "Is it: 1", "is it 2?"], [0, 2]),
    ],
)  # fmt: skip
def test_texts_are_filtered_by_length_content_and_repetition(
    name: str, args: dict[str, Any], texts: list[str], expected: list[int]
) -> None:
    assert left(name, rows_of(*texts), **args) == expected


def test_target_fields_are_joined_and_an_operator_may_choose_its_own() -> None:
    rows = [{"q": "abc", "a": "de"}, {"q": "abc"}, {"q": "abc", "a": None}, {"q": "a", "a": "cdefg"}]
    both = Context(fields=("q", "a"))
    assert left("text_length_filter", rows, both, min_len=6) == [0, 3]  # "abc\nde"
    assert left("text_length_filter", rows, both, min_len=3, fields=["q"]) == [0, 1, 2]
    with pytest.raises(DatasetError, match="no row has a column 'question'; they have q, a"):
        left("text_length_filter", rows, Context(fields=("question",)))
    assert text_of([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]) == "hi\nyo"
    assert text_of({"a": [1, "é"]}) == '{"a": [1, "é"]}' and text_of(None) == "" and text_of(3) == "3"


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({"op": "==", "value": 3}, [2]),
        ({"value": "x"}, [3]),
        ({"op": "!=", "value": 3}, [0, 1, 3, 4, 5]),
        ({"op": "in", "value": [1, "x"]}, [0, 3]),
        ({"op": "exists"}, [0, 1, 2, 3]),
        ({"op": "exists", "value": False}, [4, 5]),
    ],
)
def test_rows_are_filtered_by_a_column(args: dict[str, Any], expected: list[int]) -> None:
    rows: Rows = [{"v": 1}, {"v": 2}, {"v": 3}, {"v": "x"}, {"v": None}, {"w": 1}]
    assert left("field_filter", rows, column="v", **args) == expected


@pytest.mark.parametrize(("op", "expected"), [("<", [0]), ("<=", [0, 1]), (">", [2]), (">=", [1, 2])])
def test_numbers_of_a_column_are_compared_also_inside_of_it(op: str, expected: list[int]) -> None:
    rows: Rows = [{"v": 1}, {"v": 2.0}, {"v": 3}, {"v": None}]
    assert left("field_filter", rows, column="v", op=op, value=2) == expected
    nested: Rows = [{"meta": row} for row in rows]
    assert left("field_filter", nested, column="meta.v", op=op, value=2) == expected
    assert left("field_filter", [{"meta.v": row["v"]} for row in rows], column="meta.v", op=op, value=2) == expected


def test_a_column_may_contain_a_text_or_an_element() -> None:
    rows: Rows = [{"v": "algebra"}, {"v": ["algebra", "easy"]}, {"v": "geometry"}]
    assert left("field_filter", rows, column="v", op="contains", value="algebra") == [0, 1]


def test_values_that_cannot_be_compared_are_refused_with_their_row() -> None:
    rows: Rows = [{"v": 1}, {"v": "Level 5"}]
    with pytest.raises(DatasetError, match=r"row 1: 'v' is 'Level 5', which cannot be compared: > 3"):
        left("field_filter", rows, column="v", op=">", value=3)
    with pytest.raises(DatasetError, match="no row has a column 'lvl'; they have v"):
        left("field_filter", rows, column="lvl", value=3)


def test_a_sample_is_drawn_by_its_seed_and_keeps_the_order() -> None:
    rows = rows_of(*map(str, range(100)))
    first = left("sample", rows, size=10)
    assert first == sorted(first) == left("sample", rows, size=10) and len(set(first)) == 10
    assert left("sample", rows, size=10, seed=7) != first
    assert len(left("sample", rows, ratio=0.07)) == 7
    assert len(left("sample", rows, ratio=0.25)) == 25 and len(left("sample", rows, size=1000)) == 100


def grams(text: str, size: int) -> set[str]:
    text = normalised(text)
    return {text[i : i + size] for i in range(max(1, len(text) - size + 1))}


@settings(max_examples=150, deadline=None)
@given(
    texts=st.lists(st.text("ab c", max_size=12), max_size=14),
    size=st.integers(1, 3),
    threshold=st.sampled_from([0.1, 0.34, 0.5, 0.75, 0.8, 1.0]),
)
def test_near_duplicates_are_those_that_comparing_all_pairs_finds(
    texts: list[str], size: int, threshold: float
) -> None:
    kept: list[int] = []
    for number, text in enumerate(texts):
        sets = [(grams(text, size), grams(texts[other], size)) for other in kept]
        if all(len(a & b) / len(a | b) < threshold - 1e-12 for a, b in sets):
            kept.append(number)
    assert left("near_dedup", rows_of(*texts), ngram=size, threshold=threshold) == kept


def test_near_duplicates_by_words() -> None:
    texts = [
        "Tom has three apples and two pears",
        "tom has three  apples and two plums",
        "A train leaves at noon today",
    ]
    assert left("near_dedup", rows_of(*texts), unit="word", ngram=2, threshold=0.7) == [0, 2]
    assert left("near_dedup", rows_of(*texts), unit="word", ngram=2, threshold=0.8) == [0, 1, 2]


# Scores


def test_difficulty_is_the_logarithm_of_the_length() -> None:
    rows = rows_of("abc", "abcdefg", "abcdefghijklmno")  # 3, 7, 15 characters: logarithms of 4, 8, 16
    assert scores("difficulty", rows) == [0.0, 0.5, 1.0]
    assert scores("difficulty", rows, reverse=True) == [1.0, 0.5, 0.0]
    assert scores("difficulty", rows_of("abc", "xyz")) == [0.0, 0.0]


def test_difficulty_is_a_pass_rate_or_a_level() -> None:
    rows: Rows = [{"rate": 0.25, "level": "hard"}, {"rate": 0.5, "level": "easy"}, {"rate": 0.75, "level": "medium"}]
    assert scores("difficulty", rows, column="rate") == [0.0, 0.5, 1.0]
    assert scores("difficulty", rows, column="rate", low=0, high=1, reverse=True) == [0.75, 0.5, 0.25]
    assert scores("difficulty", rows, column="rate", low=0.5) == [0.0, 0.0, 1.0]
    assert scores("difficulty", rows, column="level", levels=["easy", "medium", "hard"]) == [1.0, 0.0, 0.5]
    with pytest.raises(DatasetError, match=r"row 0: 'level' is 'hard', must be a number; levels gives an order"):
        scores("difficulty", rows, column="level")
    with pytest.raises(DatasetError, match=r"row 0: 'rate' is 10+, must be a number"):
        scores("difficulty", [{"rate": 10**400}], column="rate")
    with pytest.raises(DatasetError, match=r"row 2: 'level' is 'medium', none of levels"):
        scores("difficulty", rows, column="level", levels=["easy", "hard"])
    with pytest.raises(DatasetError, match=r"row 0: 'pass' is missing"):
        scores("quality", rows, column="pass")


def test_quality_is_the_mean_of_three_shares() -> None:
    assert symbol_share("ab#%") == 0.5 and repeated_share("a b a b a b", "word", 2) == pytest.approx(3 / 5)
    assert quality("seven plus two") == 1.0
    assert quality("") == quality(" \n") == 0.0
    assert quality("ab##") == pytest.approx((0.5 + 1 + 0.5) / 3)
    assert quality("x y x y x y") == pytest.approx((1 + 0.5 + 1) / 3)
    assert scores("quality", rows_of("seven plus two", "ab##")) == [1.0, round(2 / 3, 6)]


def test_what_data_juicer_said_of_every_row_goes_before_the_formula() -> None:
    candidates = [
        Candidate(number, row, {"llm_difficulty_score": 0.2 + number}) for number, row in enumerate(rows_of("a", "b"))
    ]
    score = SCORES["difficulty"]()
    assert score.values(candidates, CONTEXT) == [0.2, 1.0]
    assert score.values([*candidates, Candidate(2, {"q": "abcdef"})], CONTEXT)[0] == 0.0  # it did not see the third


def test_diversity_is_the_distance_to_what_was_chosen_before() -> None:
    rows = rows_of("aaaa bbbb", "aaaa bbbb", "cccc dddd", "aaaa bbbb cccc", "")
    found = scores("diversity", rows)
    assert found[0] == 1.0 and found[1] == 0.0
    assert found[2] > found[3] > 0 and found[4] == 1.0
    assert scores("diversity", rows, centers=1)[1:3] == [0.0, found[2]]
    assert scores("diversity", rows[:1]) == [1.0] and scores("diversity", []) == []


@settings(max_examples=40, deadline=None)
@given(texts=st.lists(st.text("abcd", min_size=1, max_size=9), min_size=1, max_size=12), centers=st.integers(1, 12))
def test_diversity_is_a_farthest_first_traversal(texts: list[str], centers: int) -> None:
    found = scores("diversity", rows_of(*texts), ngram=2, centers=centers)
    whole = scores("diversity", rows_of(*texts), ngram=2)
    assert found[0] == 1.0 and scores("diversity", rows_of(*texts, texts[0]), ngram=2)[-1] == 0.0
    best = sorted(whole, reverse=True)[:centers]
    assert sorted(found, reverse=True)[: len(best)] == best  # the first `centers` are chosen alike
    assert all(one >= other for one, other in zip(found, whole, strict=True))


def test_the_order_does_not_depend_on_the_number_of_threads() -> None:
    code = (
        "import random\nfrom trinity.task_pipeline.base import Context, Candidate\n"
        "from trinity.task_pipeline.scores import SCORES\nrng = random.Random(1)\n"
        "texts = [' '.join(str(rng.randrange(50)) for _ in range(rng.randrange(900))) for _ in range(60)]\n"
        "rows = [Candidate(number, {'q': text}) for number, text in enumerate(texts)]\n"
        "print(SCORES['diversity']().values(rows, Context(fields=('q',))))"
    )
    found = set()
    for threads in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60,
            env={**os.environ, "OPENBLAS_NUM_THREADS": threads, "OMP_NUM_THREADS": threads, "PYTHONHASHSEED": threads},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found.add(done.stdout)
    assert len(found) == 1
