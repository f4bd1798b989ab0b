"""Opens the ring of a connector, or says in one line why nothing will be recorded."""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from typing import Any

from kvscope.connectors.guard import Observer, switch_off
from kvscope.errors import KvscopeError
from kvscope.ring import DEFAULT_SLOTS, About, RingWriter, default_directory

SLOTS = "KVSCOPE_RING_SLOTS"

logger = logging.getLogger("vllm.kvscope")


def open_observer(kind: type[Observer], about: About) -> Observer | None:
    """An observer with a ring of its own; None, and one warning, when the ring can't be made."""
    directory = default_directory()
    try:
        writer = RingWriter(directory, about, _slots())
    except Exception as error:
        # A KvscopeError says what to do by itself; an OSError names the file.
        known = isinstance(error, KvscopeError)
        hint = "" if known else f"; set KVSCOPE_DIR to a directory that can be written, not {directory}"
        logger.warning(
            "kvscope: nothing is recorded in this process, vLLM is not affected: %s%s", error, hint
        )
        return None
    observer = kind(writer)
    _forget_in_forks(observer)
    logger.info("kvscope: recording to %s", writer.path)
    return observer


def _slots() -> int:
    value = os.environ.get(SLOTS, "")
    if value and not value.isdecimal():
        raise KvscopeError(f"{SLOTS} is a number of slots, not {value!r}")
    return int(value) if value else DEFAULT_SLOTS


def _forget_in_forks(observer: Observer) -> None:
    """A forked child must not write to its parent's ring, nor hold the lock that shows the parent alive."""
    reference: Any = weakref.ref(observer)

    def in_child() -> None:
        inherited = reference()
        if inherited is not None:
            switch_off(inherited)
            with contextlib.suppress(Exception):
                inherited.writer.close()

    os.register_at_fork(after_in_child=in_child)
