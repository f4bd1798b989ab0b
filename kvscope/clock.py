"""One time axis over hosts. Processes of one boot share CLOCK_MONOTONIC; across boots an offset with an
error bound is kept, from handshakes, from causality, and at worst from the rings' wall-clock anchors."""

from __future__ import annotations

from typing import NamedTuple

WALL_ERROR_NS = 1_000_000_000
"""Assumed error between two hosts' wall clocks: the last resort, and shown as such."""


class Offset(NamedTuple):
    """What to add to one clock to read another: the true value lies in [low_ns, high_ns]."""

    low_ns: int
    high_ns: int

    @property
    def ns(self) -> int:
        return (self.low_ns + self.high_ns) // 2

    @property
    def error_ns(self) -> int:
        return (self.high_ns - self.low_ns + 1) // 2


class Clocks:
    """Offsets between the monotonic clocks of boots, each bound narrowed by every observation."""

    def __init__(self) -> None:
        self._anchors: dict[str, int] = {}
        self._bounds: dict[tuple[str, str], Offset] = {}

    def anchor(self, boot: str, wall_ns: int, mono_ns: int) -> None:
        """A (wall, monotonic) pair read together on `boot`; the first one is kept, so that steps of the
        wall clock don't move what was already shown."""
        self._anchors.setdefault(boot, max(-_OPEN, min(wall_ns - mono_ns, _OPEN)))

    def wall_ns(self, boot: str, mono_ns: int) -> int:
        """Nanoseconds since the Unix epoch of a moment on `boot`'s clock."""
        return mono_ns + self._anchors.get(boot, 0)

    def message(self, sender: str, sent_ns: int, receiver: str, received_ns: int) -> None:
        """A message arrived after it was sent: receiver clock - sender clock <= received - sent."""
        self._narrow(receiver, sender, sent_ns - received_ns, None)

    def estimate(self, local: str, remote: str, offset_ns: int, error_ns: int) -> None:
        """remote clock - local clock, as measured by a round trip whose half is `error_ns`."""
        self._narrow(local, remote, offset_ns - error_ns, offset_ns + error_ns)

    def offset(self, from_boot: str, to_boot: str) -> Offset:
        """What to add to `from_boot`'s monotonic time to get `to_boot`'s."""
        if from_boot == to_boot:
            return Offset(0, 0)
        wall = self._anchors.get(from_boot, 0) - self._anchors.get(to_boot, 0)
        widest = Offset(wall - WALL_ERROR_NS, wall + WALL_ERROR_NS)
        bound = self._bounds.get((from_boot, to_boot), widest)
        # One-sided knowledge leans on the wall clocks for the other side.
        low, high = max(bound.low_ns, widest.low_ns), min(bound.high_ns, widest.high_ns)
        if low > high:
            # The wall clocks contradict what was measured: believe the measurement alone.
            low = bound.low_ns if bound.low_ns > -_OPEN else bound.high_ns - 2 * WALL_ERROR_NS
            high = bound.high_ns if bound.high_ns < _OPEN else bound.low_ns + 2 * WALL_ERROR_NS
        return Offset(*(max(-_OPEN // 2, min(ns, _OPEN // 2)) for ns in (low, high)))

    def _narrow(self, from_boot: str, to_boot: str, low: int | None, high: int | None) -> None:
        if from_boot == to_boot:
            return
        if any(ns is not None and abs(ns) >= _OPEN for ns in (low, high)):
            return
        known = self._bounds.get((from_boot, to_boot), Offset(-_OPEN, _OPEN))
        new = Offset(-_OPEN if low is None else low, _OPEN if high is None else high)
        if new.low_ns > new.high_ns:
            return
        both = Offset(max(known.low_ns, new.low_ns), min(known.high_ns, new.high_ns))
        if both.low_ns > both.high_ns:
            # They contradict each other: the clocks drifted apart. What covers both is what can be said.
            ends = [ns for ns in (*known, *new) if abs(ns) < _OPEN]
            both = Offset(min(ends), max(ends))
        self._bounds[from_boot, to_boot] = both
        self._bounds[to_boot, from_boot] = Offset(-both.high_ns, -both.low_ns)


_OPEN = 1 << 62
