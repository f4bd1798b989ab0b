"""The fleet page as plain text, for tickets and scripts."""

from __future__ import annotations

from kvscope.frame import Frame
from kvscope.text import printable, span, utc
from kvscope.tui.lines import plain
from kvscope.tui.pages import fleet, grid
from kvscope.tui.view import figures_at_ns


def once_text(frame: Frame, width: int = 100, source: str = "") -> str:
    """The fleet page's figures as text of `width` columns, without colour or control characters.

    Args:
        source: where the frame came from: the daemon's address, or a file.
    """
    came = source or ("a daemon" if frame.live else "a store")
    title = (
        f"kvscope top · {span(frame.window_ns)} up to {utc(figures_at_ns(frame))} UTC"
        f" · label {printable(frame.label) or 'production'} · filter {fleet.filters(frame)}"
        f" · {'live from' if frame.live else 'history of'} {printable(came)}"
        f" · kvscope {printable(frame.kvscope)}"
    )
    lines = grid.wrapped(title, width, indent="  ")
    wrong = list(frame.problems)
    wrong += [f"{one.text}: {one.advice}" if one.advice else one.text for one in frame.findings]
    for text in wrong:
        lines += grid.wrapped(f"! {printable(text)}", width, indent="  ")
    lines += [[], *fleet.text_lines(frame, width)]
    return "\n".join(plain(line) for line in lines).rstrip() + "\n"
