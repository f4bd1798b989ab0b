"""A program in a terminal of its own: what the bench measures and the tests look at. Nobody sees it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Mapping, Sequence

from kvscope.errors import KvscopeError

DRAIN_S = 0.5

_CONTROL = re.compile(
    rb"\x1b\[[0-?]*[ -/]*[@-~]"  # CSI
    rb"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)"  # OSC
    rb"|\x1b[P^_][^\x1b]*\x1b\\"  # DCS, PM, APC
    rb"|\x1b[ -/]*[0-~]"
)


class Terminal:
    """A running program and all it has written to its terminal.

    A thread reads along from the start, as a terminal does: a program that is not read is held up.
    """

    def __init__(
        self,
        command: Sequence[str],
        columns: int = 120,
        rows: int = 40,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._master, slave = pty.openpty()
        self.resize(columns, rows)
        self.settings = termios.tcgetattr(slave)
        """Of the terminal before the program started."""
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**os.environ, "TERM": "xterm-256color", **(environment or {})},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        self._slave = slave  # held open, so that its settings can be looked at after the program
        self.chunks: list[tuple[int, bytes]] = []
        """What it wrote, with the CLOCK_MONOTONIC time at which it came."""
        self._came = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._master, 1 << 16)
            except OSError:
                return
            now_ns = time.monotonic_ns()
            with self._came:
                self.chunks.append((now_ns, data))
                self._came.notify_all()

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def press(self, keys: str) -> int:
        """Type; returns when that was, CLOCK_MONOTONIC ns."""
        now_ns = time.monotonic_ns()
        os.write(self._master, keys.encode())
        return now_ns

    def written(self, since: int = 0) -> str:
        """Its output without control sequences, from chunk `since` on."""
        with self._came:
            data = b"".join(chunk for _, chunk in self.chunks[since:])
        return _CONTROL.sub(b"", data).decode(errors="replace")

    def wait_for(self, pattern: str, seconds: float, since: int = 0) -> str:
        """Wait until a regular expression matches its output; returns that output.

        Raises:
            KvscopeError: it did not, or the program ended before.
        """
        deadline = time.monotonic() + seconds
        while True:
            text = self.written(since)
            if re.search(pattern, text):
                return text
            with self._came:
                # What it wrote last may still be on its way.
                ended = self.process.poll() is not None and not self._came.wait(DRAIN_S)
            if ended or time.monotonic() > deadline:
                why = f"ended with {self.process.returncode}" if ended else f"{seconds:.0f} s went by"
                raise KvscopeError(f"{pattern!r} was not shown: {why}; the end: {text[-2000:]}")
            with self._came:
                self._came.wait(0.1)

    def burst(self, after_ns: int, quiet_s: float, timeout_s: float) -> tuple[int, int] | None:
        """When the first output after a moment came, and the last before it was quiet for so long.

        None when nothing came in time.
        """
        deadline = time.monotonic() + timeout_s
        with self._came:
            while True:
                times = [at for at, _ in self.chunks[-4096:] if at >= after_ns]
                now_ns = time.monotonic_ns()
                if times:
                    for one, following in zip(times, [*times[1:], now_ns], strict=True):
                        if following - one >= quiet_s * 1e9:
                            return times[0], one
                elif time.monotonic() > deadline:
                    return None
                self._came.wait(quiet_s)

    def settings_now(self) -> list[object]:
        """The terminal's settings; equal to `settings` when the program left it as it was."""
        return list(termios.tcgetattr(self._slave))

    def close(self) -> None:
        """End the program if it still runs, as closing a terminal's window does."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGHUP)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        os.close(self._slave)  # the reader then sees the end
        self._reader.join(5)
        os.close(self._master)
