"""Takes the pictures of the Grafana dashboards in docs/pictures/: committed JSON, live data, no Grafana.

    python docs/grafana_pictures.py [--simulated] [--folder docs/pictures] [overview flow ...]

Real engines run mode after mode (two vLLM engines on CPU each, a router, a load), Debian's Prometheus scrapes
the daemon, and docs/grafana_pictures/ draws what the panels' queries give, in Chromium with Grafana's own UI
library. Takes about ten minutes; `--simulated` takes simulated engines, more of them, and four minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image

from kvscope.demo.collector import Collector, collector
from kvscope.demo.deployment import deployment
from kvscope.demo.engines import BIDIRECTIONAL, DECODE, MODES, PREFILL, PUSH, EngineSpec
from kvscope.demo.load import sending
from kvscope.demo.traffic import Plan, traffic
from kvscope.ring import default_directory

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "pictures"
PROGRAM = ROOT / "docs" / "grafana_pictures"
BUILD = ROOT / "build" / "grafana-pictures"
DASHBOARDS = ROOT / "dashboards" / "grafana"
NAMES = tuple(sorted(path.stem.removeprefix("kvscope-") for path in DASHBOARDS.glob("*.json")))
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
LOAD_S = 110
"""How long the load of a mode goes on."""
HELD_AFTER_S, HELD_S = 80, 8
"""Push: when P's worker stands still, and for how long, so that there is a spike to look at."""
SIMULATED_S = 180
SCRAPE = "2s"
INTERVAL_S = 5
"""What the data source is told of the scrape interval; Grafana takes rates over four of them."""
WIDTH = 1600
MOST_BYTES = 250_000


def main() -> None:
    parser = argparse.ArgumentParser(description="Take the pictures of the Grafana dashboards.")
    parser.add_argument("names", nargs="*", metavar="DASHBOARD", help=f"of {', '.join(NAMES)}; all without")
    parser.add_argument("--simulated", action="store_true", help="of simulated engines instead of real ones")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where they go (default docs/pictures)")
    arguments = parser.parse_args()
    names = arguments.names or NAMES
    if unknown := set(names) - set(NAMES):
        parser.error(f"there is no dashboard {', '.join(sorted(unknown))}")
    chromium = next((path for browser in BROWSERS if (path := shutil.which(browser))), None)
    if chromium is None:
        raise SystemExit("Chromium is not there: apt-get install chromium")
    _install()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    where = default_directory().parent
    folder = Path(tempfile.mkdtemp(prefix="kvs-", dir=where if where.is_dir() else None))
    begin = time.time()
    try:
        with contextlib.ExitStack() as stack:
            if arguments.simulated:
                plan = Plan(modes=MODES, engines=6, in_flight=40, recent=100, per_s=4)
                stack.enter_context(traffic(plan, folder / "rings", folder))
            daemon = stack.enter_context(collector(folder / "rings", folder))
            prometheus = stack.enter_context(_prometheus(daemon, folder / "prometheus"))
            if arguments.simulated:
                time.sleep(SIMULATED_S)
                note = "simulated engines"
            else:
                for mode in MODES:
                    _run(mode, folder)
                note = f"real engines: {', then '.join(MODES)}"
            source = {"url": prometheus, "daemon": daemon.url, "interval": INTERVAL_S}
            source |= {"from": int(begin), "to": int(time.time())}
            pictures = {name: arguments.folder / f"grafana-{name}.png" for name in names}
            _draw(chromium, pictures, source, note)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for picture in pictures.values():
        _shrink(picture)
        print(f"{picture}: {picture.stat().st_size >> 10} KiB", flush=True)


def _run(mode: str, folder: Path) -> None:
    """A pair of engines of a mode, and a load for a while."""
    environment = {"KVSCOPE_DIR": str(folder / "rings"), "KVSCOPE_LABEL": "demo"}
    p, d = f"p-{mode}", f"d-{mode}"
    specs = [
        EngineSpec(name, role, mode, instrumented=True, environment=environment)
        for name, role in ((p, PREFILL), (d, DECODE))
    ]
    print(f"{mode}: engines start", flush=True)
    with (
        deployment(specs, folder=folder / mode) as running,
        sending(running.url, conversations=mode == BIDIRECTIONAL, seed=1),
    ):
        print(f"{mode}: a load of {LOAD_S} s", flush=True)
        time.sleep(HELD_AFTER_S)
        if mode == PUSH:
            running.engines[p].kill("worker", signal.SIGSTOP)
            time.sleep(HELD_S)
            running.engines[p].kill("worker", signal.SIGCONT)
        time.sleep(LOAD_S - HELD_AFTER_S)


@contextlib.contextmanager
def _prometheus(daemon: Collector, folder: Path) -> Iterator[str]:
    """The URL of a Prometheus that scrapes the daemon: that of the tests."""
    spec = importlib.util.spec_from_file_location("prometheus", ROOT / "tests" / "prometheus.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    try:
        server = module.prometheus([daemon.url.removeprefix("http://")], folder, interval=SCRAPE)
        with server as running:
            yield running.url
    except module.pytest.skip.Exception as missing:
        raise SystemExit(str(missing)) from None


def _install() -> None:
    """The libraries of the lock file, below build/."""
    BUILD.mkdir(parents=True, exist_ok=True)
    lock, done = PROGRAM / "package-lock.json", BUILD / "installed.json"
    if done.exists() and done.read_bytes() == lock.read_bytes():
        return
    if not shutil.which("npm"):
        raise SystemExit("npm is not there: install Node.js 20 or later")
    for name in ("package.json", "package-lock.json"):
        shutil.copy(PROGRAM / name, BUILD / name)
    print("npm ci: half a gigabyte below build/, once", flush=True)
    command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"]
    if subprocess.run(command, cwd=BUILD, check=False).returncode:
        raise SystemExit("the libraries could not be installed: see above")
    shutil.copy(lock, done)


def _draw(chromium: str, pictures: dict[str, Path], source: dict[str, Any], note: str) -> None:
    """Draw, and print the panels that lack something."""
    job = {
        "chromium": chromium,
        "dashboards": {
            str(path.absolute()): str(DASHBOARDS / f"kvscope-{name}.json") for name, path in pictures.items()
        },
        "source": source,
        "width": WIDTH,
        "note": note,
    }
    command = ["node", str(PROGRAM / "shoot.mjs")]
    if subprocess.run(command, input=json.dumps(job), text=True, cwd=BUILD, check=False).returncode:
        raise SystemExit("the dashboards could not be drawn: see above")


def _shrink(picture: Path) -> None:
    """As many colours as fit into `MOST_BYTES`: the most frequent ones, and those of thin lines."""
    with Image.open(picture) as image:
        full = image.convert("RGB")
    frequent = sorted(full.getcolors(1 << 24) or [], reverse=True)
    for colors in (256, 128, 64, 32):
        shades = [
            shade for _, color in frequent[: colors // 4] if isinstance(color, tuple) for shade in color
        ]
        rest = full.quantize(colors - colors // 4, method=Image.Quantize.MAXCOVERAGE)
        palette = Image.new("P", (1, 1))
        palette.putpalette(shades + (rest.getpalette() or []))
        full.quantize(palette=palette, dither=Image.Dither.NONE).save(picture, optimize=True)
        if picture.stat().st_size <= MOST_BYTES:
            return


if __name__ == "__main__":
    main()
