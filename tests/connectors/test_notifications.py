"""Notifications come from other processes: whatever they hold, reading them must not raise."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvscope.connectors.notifications import completion, registration


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (b"cmpl-a-0-12345678:1", ("cmpl-a-0-12345678", 1)),
        (b"___prefill_addr_10.0.0.1:8100___x:12", ("___prefill_addr_10.0.0.1:8100___x", 12)),
        (b"HB:a,b:1", None),
        (b"PUSH_REG:\x80:1", None),
        (b"no-count:", None),
        (b":1", None),
        (b"negative:-1", None),
        (b"huge:9999999999", None),
        (b"\xff\xfe:1", None),
        ("text:1", None),
        (None, None),
    ],
)
def test_completion(message: object, expected: tuple[str, int] | None) -> None:
    assert completion(message) == expected


@given(st.binary(max_size=64) | st.binary(max_size=32).map(lambda b: b"PUSH_REG:" + b) | st.text(max_size=8))
def test_anything_can_be_read(message: object) -> None:
    found = completion(message)
    if found is not None:
        request, count = found
        assert isinstance(message, bytes)
        assert message.startswith(request.encode() + b":")
        assert 0 <= count < 10**9
    registration(message)


@given(st.text(min_size=1, max_size=200), st.integers(0, 10**9 - 1))
def test_every_completion_of_vllm_is_understood(request: str, count: int) -> None:
    message = f"{request}:{count}".encode("utf-8", "surrogatepass")
    if not message.startswith((b"HB:", b"PUSH_REG:")):
        assert completion(message) in ((request, count), None)


def test_registration_reads_what_it_needs_and_skips_the_rest() -> None:
    message = {"request_id": "d-1", "decode_engine_id": "D", "local_block_ids": [[1, 2, 3]], "decode_port": 1}
    found = registration(b"PUSH_REG:" + msgspec.msgpack.encode(message))
    assert found is not None
    assert (found.request_id, found.decode_engine_id) == ("d-1", "D")


@pytest.mark.parametrize("content", [{}, {"request_id": 5}, {"request_id": None}, [1], "x", 7])
def test_registration_of_another_shape_is_none(content: object) -> None:
    assert registration(b"PUSH_REG:" + msgspec.msgpack.encode(content)) is None
