"""A simulated load: request pairs with the events, ids and sizes of real push and pull legs.

Times come from one seeded generator on a clock of its own, so that a run can be repeated.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

from kvscope import events as ev
from kvscope.ring import About, RingWriter

MS = 1_000_000
"""Nanoseconds in a millisecond."""


class Engine:
    """The two rings of one simulated engine."""

    def __init__(self, fleet: Fleet, directory: Path, engine_id: str, slots: int) -> None:
        self.id = engine_id
        fingerprint = {"model": "simulated/8b", "transfer_mode": fleet.mode, "block_size": 16}
        self.scheduler, self.worker = (
            RingWriter(
                directory,
                About(engine_id, source, label="simulated", boot_id="simulated", fingerprint=fingerprint),
                slots,
                clock=lambda: fleet.now_ns,
            )
            for source in (ev.SCHEDULER, ev.WORKER)
        )

    def close(self) -> None:
        self.scheduler.close()
        self.worker.close()


class Fleet:
    """A P and a D engine that record what a pair of legs records; `mode` is push or pull."""

    def __init__(self, directory: Path, mode: str, slots: int, seed: int = 1) -> None:
        self.mode = mode
        self.events = 0
        self.now_ns = time.monotonic_ns()
        self._wall_ns = time.time_ns() - self.now_ns
        self._random = random.Random(seed)
        self._transfers = 0
        self.p, self.d = (Engine(self, directory, self._hex(32), slots) for _ in "pd")

    def close(self) -> None:
        self.p.close()
        self.d.close()

    def request(self) -> str:
        """One client request, P leg and D leg; returns the client's id."""
        start_ns = self.now_ns
        client = f"{self._hex(8)}-{self._hex(4)}-{self._hex(4)}-{self._hex(4)}-{self._hex(12)}"
        p_name, d_name = (f"chatcmpl-{client}-{self._hex(8)}" for _ in "pd")
        push = self.mode == "push"
        ps, pw, ds, dw = self.p.scheduler, self.p.worker, self.d.scheduler, self.d.worker
        p_key, d_key = ps.text(p_name), ds.text(d_name)
        pw.text(p_name)
        dw.text(d_name)
        tokens = self._random.randrange(200, 4000)
        blocks = tokens // 16

        wall_ns = self.now_ns + self._wall_ns
        self._at(ps, 1, ev.REQUEST_ARRIVED, p_key, wall_ns, ev.FLAG_REMOTE_DECODE, tokens, *[0] * 6, 1)
        self._at(ps, 9, ev.REQUEST_CONSIDERED, p_key, 0, 0, 0)
        self._at(ps, 1, ev.REQUEST_SCHEDULED, p_key, blocks, 0, 1, 0)
        for step in range(2):
            self._at(ps, 1, ev.PREFILL_CHUNK, p_key, tokens // 2, tokens, step)
        if not push:
            self._end_prefill(p_key, tokens)

        wall_ns = self.now_ns + self._wall_ns
        arrived = (wall_ns, ev.FLAG_REMOTE_PREFILL, tokens, ds.text(self.p.id), ds.text(p_name), tokens)
        self._at(ds, 1, ev.REQUEST_ARRIVED, d_key, *arrived, 0, 0, 0, 256)
        self._at(ds, 4, ev.REQUEST_CONSIDERED, d_key, 0, tokens, 1)
        self._at(ds, 1, ev.BLOCKS_ALLOCATED, d_key, blocks, tokens, 1)
        self._at(dw, 6, ev.LOAD_STARTED, d_key, dw.text(self.p.id), dw.text(p_name), blocks)
        if push:
            self._at(dw, 1, ev.REGISTRATION_SENT, d_key, dw.text(self.p.id))
            self._at(pw, 1, ev.REGISTRATION_RECEIVED, d_key, pw.text(self.d.id))
            self._end_prefill(p_key, tokens)
        self._at(pw, 1, ev.LEASE_ARMED, p_key, self.now_ns + 480_000 * MS)
        if push:
            self._at(pw, 1, ev.PUSH_MATCHED, p_key, pw.text(self.d.id), pw.text(d_name))

        self._transfers += 1
        number, begin_ns = self._transfers, self.now_ns
        mover, key, peer = (pw, p_key, pw.text(self.d.id)) if push else (dw, d_key, dw.text(self.p.id))
        posted_ns = self._at(mover, 1, ev.TRANSFER_POSTED, key, number, int(push), begin_ns, 0, peer)
        telemetry = (self.now_ns, begin_ns, 90, 8000, tokens * 131072, blocks)
        self._at(mover, 9, ev.TRANSFER_DONE, key, number, posted_ns + MS, *telemetry)
        if push:
            self._at(pw, 1, ev.SEND_DONE, p_key, 0)
            self._at(dw, 1, ev.NOTIFICATION_RECEIVED, d_key, 1)
        self._at(dw, 1, ev.LOAD_DONE, d_key, 0)
        if not push:
            self._at(pw, 1, ev.NOTIFICATION_RECEIVED, p_key, 1)
        self._at(ds, 2, ev.LOAD_REPORTED, d_key, 0)
        self._at(ds, 5, ev.REQUEST_SCHEDULED, d_key, blocks, tokens, 2, 0)
        self._at(pw, 1, ev.LEASE_RELEASED, p_key)
        self._at(ps, 1, ev.SEND_REPORTED, p_key)
        self._at(ds, 30, ev.FIRST_TOKEN, d_key, 1)
        ended = (ds.text("FINISHED_STOPPED"), tokens, 200, tokens + 200, 0, tokens, 0, 0, blocks)
        self._at(ds, 4000, ev.REQUEST_FINISHED, d_key, *ended)
        # Requests overlap: the next one starts a few milliseconds after this one did.
        self.now_ns = start_ns + self._random.randrange(MS, 10 * MS)
        return client

    def _end_prefill(self, key: int, tokens: int) -> None:
        ring = self.p.scheduler
        self._at(ring, 80, ev.FIRST_TOKEN, key, 1)
        status = ring.text("FINISHED_LENGTH_CAPPED")
        self._at(ring, 1, ev.REQUEST_FINISHED, key, status, tokens, 1, tokens, 0, 0, 0, 1, tokens // 16)

    def _at(self, ring: RingWriter, within_ms: int, kind: int, key: int, *args: int) -> int:
        """Record at a moment within the next milliseconds; returns it."""
        self.now_ns += self._random.randrange(within_ms * MS // 2, within_ms * MS)
        ring.record(kind, key, *args)
        self.events += 1
        return self.now_ns

    def _hex(self, digits: int) -> str:
        return f"{self._random.getrandbits(4 * digits):0{digits}x}"
