"""Rows of a forward pass to samples: exact for every mix of chunks, decode rows and strangers."""

import pytest
from hslake_sglang.split import Piece, real_rows, split_batch
from hypothesis import given, settings
from hypothesis import strategies as st

from hslake.ids import RequestId

LAKE = "0123abcd"


def rid(name: str, length: int, lake8: str = LAKE) -> RequestId:
    return RequestId(lake8, "att0" + name.lower(), length, "A1", name)


def test_chunks_of_several_requests_and_padding() -> None:
    a, b = rid("a", 10), rid("b", 4)
    pieces = split_batch([a.encode(), "HEALTH_CHECK_1", b.encode()], [6, 1, 4], [4, 0, 0], LAKE)
    assert pieces == [Piece(a, 0, 0, 6, 4), Piece(b, 2, 7, 4, 0)]
    assert real_rows([6, 1, 4]) == 11  # rows 11 and up are padding: no piece reaches them


def test_decode_rows_of_a_mixed_chunk_are_dropped() -> None:
    a, b = rid("a", 10), rid("b", 4)
    assert split_batch([a.encode(), b.encode()], [1, 4], [10, 0], LAKE) == [Piece(b, 1, 1, 4, 0)]
    assert split_batch([a.encode()], [1], [57], LAKE) == []


def test_strangers_yield_nothing() -> None:
    other = rid("a", 5, lake8="ffffffff").encode()
    assert split_batch([other, "4f1c", None, 7, "hslake.x"], [5] * 5, [0] * 5, LAKE) == []


def test_a_prompt_longer_than_its_id_says_is_flagged() -> None:
    (piece,) = split_batch([rid("a", 5).encode()], [6], [0], LAKE)
    assert piece.overflows
    (piece,) = split_batch([rid("a", 5).encode()], [5], [0], LAKE)
    assert not piece.overflows


@pytest.mark.parametrize(
    ("rids", "lengths", "prefixes"), [([], [1], [0]), (["x"], [1], []), (["x"], [-1], [0])]
)
def test_a_batch_that_contradicts_itself_is_an_error(rids, lengths, prefixes) -> None:
    with pytest.raises(ValueError):
        split_batch(rids, lengths, prefixes, LAKE)


# One entry of a batch: (kind, prompt length, prefix, rows).
entry = st.tuples(
    st.sampled_from(["ours", "other lake", "stranger"]),
    st.integers(1, 50),
    st.integers(0, 60),
    st.integers(0, 40),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(entry, max_size=12))
def test_pieces_cover_exactly_the_prompt_rows_of_this_lake(entries) -> None:
    ids = [
        {
            "ours": rid(f"s{i}", n).encode(),
            "other lake": rid(f"s{i}", n, "ffffffff").encode(),
            "stranger": f"{i:032x}",
        }[kind]
        for i, (kind, n, _, _) in enumerate(entries)
    ]
    lengths = [rows for *_, rows in entries]
    prefixes = [prefix for _, _, prefix, _ in entries]
    expected = {}  # row of the forward -> (sample, position)
    row = 0
    for i, (kind, n, prefix, rows) in enumerate(entries):
        for k in range(rows):
            if kind == "ours" and prefix < n:
                expected[row + k] = (f"s{i}", prefix + k)
        row += rows
    got = {}
    for piece in split_batch(ids, lengths, prefixes, LAKE):
        assert piece.count > 0 and ids[piece.index] == piece.rid.encode()
        for k in range(piece.count):
            assert piece.row + k not in got, "one row given twice"
            got[piece.row + k] = (piece.rid.sample_id, piece.position + k)
    assert got == expected
    assert all(r < real_rows(lengths) for r in got)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 200), st.integers(1, 50))
def test_chunked_prefill_covers_a_prompt_once_in_order(length: int, chunk: int) -> None:
    one = rid("a", length).encode()
    positions = []
    for prefix in range(0, length, chunk):
        for piece in split_batch([one], [min(chunk, length - prefix)], [prefix], LAKE):
            assert not piece.overflows
            positions += range(piece.position, piece.position + piece.count)
    assert positions == list(range(length))
