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
        self._anchors.setdefault(boot, wall_ns - mono_ns)

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
            low, high = (bound.low_ns, bound.high_ns) if bound.high_ns - bound.low_ns < _OPEN else (low, low)
        return Offset(low, high)

    def _narrow(self, from_boot: str, to_boot: str, low: int | None, high: int | None) -> None:
        if from_boot == to_boot:
            return
        known = self._bounds.get((from_boot, to_boot), Offset(-_OPEN, _OPEN))
        low = known.low_ns if low is None else max(low, known.low_ns)
        high = known.high_ns if high is None else min(high, known.high_ns)
        if low > high:
            return  # contradicts what is known (a clock was stepped): keep the older bound
        self._bounds[from_boot, to_boot] = Offset(low, high)
        self._bounds[to_boot, from_boot] = Offset(-high, -low)


_OPEN = 1 << 62
