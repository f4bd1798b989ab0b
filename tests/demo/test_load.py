"""The load that goes on while someone looks: nothing that goes wrong in it hangs or ends it."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from kvscope.demo import load


def test_a_load_that_can_not_begin_raises_instead_of_hanging(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(users: Any) -> Any:
        for user in users:
            user.close()
        raise OSError("too many open files")

    monkeypatch.setattr(load, "_together", fails)
    with pytest.raises(OSError, match="too many open files"), load.sending("http://127.0.0.1:1", False):
        raise AssertionError("it did not begin")


@pytest.mark.parametrize("conversations", [False, True])
def test_a_request_that_raises_is_counted_and_the_next_one_comes(
    monkeypatch: pytest.MonkeyPatch, conversations: bool
) -> None:
    again = threading.Event()
    calls = 0

    async def breaks(*_: Any, **__: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 2 * load.USERS:
            again.set()
            await asyncio.Event().wait()
        raise KeyError("choices")

    monkeypatch.setattr(load, "THINKING_S", (0, 0))
    monkeypatch.setattr(load, "send", breaks)
    monkeypatch.setattr(load, "run_conversation", breaks)
    with load.sending("http://127.0.0.1:1", conversations) as failed:
        assert again.wait(20), "each user goes on after an error"
    assert failed.count == 2 * load.USERS
