"""Takes the pictures of `kvscope top` and of a report in docs/pictures/: real programs, real engines, mode by
mode.

    python docs/pictures.py [--mode push] [--folder docs/pictures]

Each mode is a run of its own: two vLLM engines on CPU with a tiny model, a router, a load, the daemon. The
pictures are Textual's own screenshots, made to need nothing from elsewhere; the report (of push) is drawn by
Chromium. Takes about five minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from PIL import Image

from kvscope import cli
from kvscope.client import Daemon
from kvscope.demo.collector import collector
from kvscope.demo.deployment import Deployment, deployment
from kvscope.demo.engines import BIDIRECTIONAL, DECODE, MODES, PREFILL, PULL, PUSH, EngineSpec
from kvscope.demo.load import sending
from kvscope.frame import Scope
from kvscope.ring import default_directory
from kvscope.tui.app import Start, Top

FOLDER = Path(__file__).with_name("pictures")
SIZE = (120, 36)
LOAD_S = 45
"""How long the load has been there when the first picture of a mode is taken."""
STUCK_S = 4.0
WAIT_S = 30
LABEL = "demo"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
REPORT_SIZE = (1100, 1500)
WINDOW = "1m"
PICTURES = {
    PUSH: ("fleet", "requests", "request", "stuck"),
    PULL: ("engines", "pairs"),
    BIDIRECTIONAL: ("sessions",),
}
KEYS = {
    "fleet": "1",
    "requests": "2",
    "request": "3",
    "stuck": "4",
    "engines": "5",
    "pairs": "6",
    "sessions": "7",
}
BLANK = "&#160;"
CELL = 12.2
"""Width of a character in Rich's pictures."""
_TEXT = re.compile(
    r'<text(?P<class> class="[^"]*") x="(?P<x>[\d.]+)"(?P<y> y="[\d.]+") textLength="(?P<length>[\d.]+)"'
    r"(?P<more>[^>]*)>(?P<blanks>(?:&#160;)*)(?P<content>[^<]*)</text>"
)
FONTS = "Fira Code, Cascadia Mono, DejaVu Sans Mono, Menlo, Consolas, monospace"


def main() -> None:
    parser = argparse.ArgumentParser(description="Take the pictures of `kvscope top` from a real run.")
    parser.add_argument("--mode", choices=MODES, help="of this mode only")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where they go (default docs/pictures)")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for mode in [arguments.mode] if arguments.mode else MODES:
        with _running(mode) as (url, running):
            if mode == PUSH:  # before an engine is held up on purpose
                _take_report(url, arguments.folder / "report.png")
            for name, picture in asyncio.run(_take(url, running, PICTURES[mode])).items():
                path = arguments.folder / f"{name}.svg"
                path.write_text(self_contained(picture))
                print(f"{path}: {path.stat().st_size >> 10} KiB, {mode}", flush=True)


@contextlib.contextmanager
def _running(mode: str) -> Iterator[tuple[str, Deployment]]:
    """Engines, a load that has been going on for a while, and the daemon."""
    where = default_directory().parent
    folder = Path(tempfile.mkdtemp(prefix="kvs-", dir=where if where.is_dir() else None))
    environment = {"KVSCOPE_DIR": str(folder / "rings"), "KVSCOPE_LABEL": LABEL}
    specs = [
        EngineSpec(name, role, mode, instrumented=True, environment=environment)
        for name, role in (("p", PREFILL), ("d", DECODE))
    ]
    try:
        with (
            collector(folder / "rings", folder) as daemon,
            deployment(specs, folder=folder) as running,
            sending(running.url, conversations=mode == BIDIRECTIONAL, seed=1),
        ):
            time.sleep(LOAD_S)
            yield daemon.url, running
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _take_report(url: str, picture: Path) -> None:
    """The beginning of `kvscope report`, as a browser shows it."""
    chromium = next((path for browser in BROWSERS if (path := shutil.which(browser))), None)
    if chromium is None:
        print("no picture of the report: Chromium is not there: apt-get install chromium", flush=True)
        return
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        if cli.main(["report", "--url", url, "--label", LABEL, "--since", WINDOW, "-o", str(page)]):
            raise SystemExit("the report could not be made: see above")
        command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += [f"--window-size={REPORT_SIZE[0]},{REPORT_SIZE[1]}", f"--user-data-dir={folder}/profile"]
        command += [f"--screenshot={picture.absolute()}", page.as_uri()]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with Image.open(picture) as image:
        image.convert("RGB").quantize(64, dither=Image.Dither.NONE).save(picture, optimize=True)
    print(f"{picture}: {picture.stat().st_size >> 10} KiB, {PUSH}", flush=True)


async def _take(url: str, running: Deployment, names: tuple[str, ...]) -> dict[str, str]:
    """The program on the daemon at `url`, page after page."""
    taken = {}
    start = Start(source=Daemon(url), name=url, scope=Scope(window=WINDOW, label=LABEL), refresh_s=0.5)
    app = Top(start)
    async with app.run_test(size=SIZE) as pilot:
        await _until(lambda: app.view.frame is not None and len(app.view.recent) > 10)
        for name in names:
            with _held(running) if name == "stuck" else contextlib.nullcontext():
                if name == "stuck":
                    await asyncio.sleep(STUCK_S)
                if name == "request":
                    slowest = max(app.view.recent, key=lambda row: row.ttft_ns or 0)
                    app.view.chosen = slowest.id
                await pilot.press(KEYS[name])
                await asyncio.sleep(2)
                await pilot.pause()
                taken[name] = app.export_screenshot(title=f"kvscope top: {name}")
    app.close_feeds()
    return taken


@contextlib.contextmanager
def _held(running: Deployment) -> Iterator[None]:
    """P's worker stands still meanwhile, so that requests wait for it."""
    running.engines["p"].kill("worker", signal.SIGSTOP)
    try:
        yield
    finally:
        running.engines["p"].kill("worker", signal.SIGCONT)


async def _until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit("the program shows nothing")
        await asyncio.sleep(0.1)


def self_contained(picture: str) -> str:
    """The picture without what it would load from elsewhere, and without what differs between equal ones."""
    picture = re.sub(r"\s*@font-face\s*\{.*?\}|<!--.*?-->", "", picture, flags=re.DOTALL)
    picture = _TEXT.sub(_without_margins, picture)
    picture = re.sub(r"font-family:\s*Fira Code, monospace", f"font-family: {FONTS}", picture)
    picture = re.sub(r"terminal-\d+-", "t-", picture)
    return "\n".join(line.strip() for line in picture.splitlines() if line.strip()) + "\n"


def _without_margins(text: re.Match[str]) -> str:
    """A piece of text without blanks at its ends, at the same place: some programs drop those themselves."""
    cells = text["blanks"].count(BLANK)
    content = text["content"].rstrip()
    while content.endswith(BLANK):
        content = content.removesuffix(BLANK)
    if not content:
        return ""
    after = text["content"].count(BLANK) - content.count(BLANK)
    x = float(text["x"]) + cells * CELL
    length = float(text["length"]) - (cells + after) * CELL
    return f'<text{text["class"]} x="{x:g}"{text["y"]} textLength="{length:g}"{text["more"]}>{content}</text>'


if __name__ == "__main__":
    main()
