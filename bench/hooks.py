"""Engine-thread time that kvscope's hooks take: instrumented calls minus stock calls, in one run.

    python bench/hooks.py [--json] [--pairs N]

vLLM's own schedulers and NIXL workers serve request pairs without engines (`_vllm.py`): every call that
crosses from the engine into the connector is timed, stock and instrumented in turn, in random order. A row
is one thread; `stock` and `ours` are medians of its calls for one request pair, `hooks` the median of the
paired differences, with the quartiles of these. What is not vLLM: the model, and NIXL's agent, which
answers at once. The hooks run as in an engine, between other work that takes the caches: in a loop that
does nothing else (bench/recorder.py) the same code is two to three times as fast.

A pair is one P leg (one prefill chunk) and one D leg (two output tokens) alone in its steps, whose own cost
is in the row. Each further step costs what `idle step` says, shared by all requests in it.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TOKENS = 400
IDLE_STEPS = 50
WARM_UP = 50

Call = Callable[..., Any]


class Meter:
    """Nanoseconds spent in the calls that go through it."""

    def __init__(self) -> None:
        self.ns = 0

    def timed(self, call: Call) -> Call:
        def method(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter_ns()
            result = call(*args, **kwargs)
            self.ns += time.perf_counter_ns() - begin
            return result

        return method

    def take(self) -> int:
        ns, self.ns = self.ns, 0
        return ns


class Side:
    """P and D, stock or instrumented: one scheduler and one worker each."""

    def __init__(self, mode: str, model: Path, instrumented: bool) -> None:
        import _vllm as vllm

        from kvscope.connectors import hooks

        self.vllm = vllm
        self.push = mode == hooks.PUSH
        self.meters = {name: Meter() for name in ("P scheduler", "D scheduler", "P worker", "D worker")}
        if self.push:
            self.meters |= {name: Meter() for name in ("P push writer", "D push writer")}
        self.schedulers, self.workers = {}, {}
        for engine, peer in (("P", "D"), ("D", "P")):
            names = [f"{name.lower()}-0123456789ab" for name in (engine, peer)]
            scheduler = vllm.make_scheduler(model, mode, names[0], instrumented)
            meter = self.meters[f"{engine} scheduler"]
            for hook in hooks.hooks_of(hooks.CONNECTOR, mode):
                call = getattr(scheduler.connector, hook.method)
                setattr(scheduler.connector, hook.method, meter.timed(call))
            worker = vllm.make_worker(mode, names[0], names[1], instrumented)
            for method in ("start_load_kv", "get_transfer_results"):
                setattr(worker, method, self.meters[f"{engine} worker"].timed(getattr(worker, method)))
            if self.push:
                call = self.meters[f"{engine} push writer"].timed(worker._push_writer_loop)
                worker._push_writer_loop = call
            self.schedulers[engine], self.workers[engine] = scheduler, worker

    def serve(self, name: str) -> dict[str, int]:
        """One request pair, all the way; nanoseconds in the connector per thread."""
        self._schedule(name, f"cmpl-{name}-0-0000000a", f"cmpl-{name}-0-0000000b")
        (self._work_push if self.push else self._work_pull)(
            f"cmpl-{name}-0-0000000a", f"cmpl-{name}-0-0000000b"
        )
        return self._take()

    def idle(self) -> dict[str, float]:
        """Nanoseconds per step with nothing to do."""
        for _ in range(IDLE_STEPS):
            for scheduler in self.schedulers.values():
                self.vllm.step(scheduler)
            for worker in self.workers.values():
                worker.start_load_kv(self.vllm.metadata())
                worker.get_transfer_results()
                if self.push:
                    worker._push_writer_loop()
        return {name: ns / IDLE_STEPS for name, ns in self._take().items()}

    def _take(self) -> dict[str, int]:
        return {name: meter.take() for name, meter in self.meters.items()}

    def _schedule(self, name: str, p: str, d: str) -> None:
        step, make_request = self.vllm.step, self.vllm.make_request
        prefill, decode = self.schedulers["P"], self.schedulers["D"]
        prefill.add_request(make_request(p, TOKENS, 1, {"do_remote_decode": True}))
        step(prefill)
        step(prefill, sent={p})
        asked = {
            "do_remote_prefill": True,
            "remote_engine_id": "p-0123456789ab",
            "remote_request_id": p,
            "remote_host": "127.0.0.1",
            "remote_port": 1,
            "remote_block_ids": [list(range(TOKENS // self.vllm.BLOCK))],
            "remote_num_tokens": TOKENS,
            "tp_size": 1,
        }
        decode.add_request(make_request(d, TOKENS, 2, asked))
        step(decode)
        step(decode, received={d})
        while d in decode.requests:
            step(decode)
        assert p not in prefill.requests

    def _work_pull(self, p: str, d: str) -> None:
        prefill, decode = self.workers["P"], self.workers["D"]
        self._lend(prefill, p)
        decode.nixl_wrapper.state = "PROC"
        decode.start_load_kv(self.vllm.metadata(reqs_to_recv={d: self._peer_of(d, p)}))
        decode.get_transfer_results()
        decode.nixl_wrapper.state = "DONE"
        decode.start_load_kv(self.vllm.metadata())
        assert decode.get_transfer_results().finished_recving == {d}
        prefill.nixl_wrapper.inbox = {"D": [f"{p}:1".encode()]}
        assert prefill.get_transfer_results().finished_sending == {p}

    def _work_push(self, p: str, d: str) -> None:
        prefill, decode = self.workers["P"], self.workers["D"]
        blocks = [list(range(TOKENS // self.vllm.BLOCK))]
        registration = {
            "request_id": d,
            "decode_engine_id": "d-0123456789ab",
            "decode_host": "127.0.0.1",
            "decode_port": 1,
            "decode_tp_size": 1,
            "local_block_ids": blocks,
            "remote_engine_id": "p-0123456789ab",
            "remote_host": "127.0.0.1",
            "remote_port": 1,
            "remote_tp_size": 1,
        }
        awaited = {d: self._peer_of(d, p)}
        decode.start_load_kv(self.vllm.metadata(reqs_to_recv=awaited, push_registrations={d: registration}))
        decode.get_transfer_results()
        decode._push_writer_loop()
        prefill.nixl_wrapper.inbox = {"D": [decode.nixl_wrapper.sent.pop()]}
        prefill._push_writer_loop()
        prefill.nixl_wrapper.state = "PROC"
        self._lend(prefill, p, push_finished_blocks={p: blocks})
        prefill._push_writer_loop()
        prefill.get_transfer_results()
        prefill.nixl_wrapper.state = "DONE"
        prefill.start_load_kv(self.vllm.metadata())
        assert prefill.get_transfer_results().finished_sending == {p}
        prefill._push_writer_loop()
        decode.nixl_wrapper.inbox = {"P": [f"{d}:1".encode()]}
        decode._push_writer_loop()
        decode.start_load_kv(self.vllm.metadata())
        assert decode.get_transfer_results().finished_recving == {d}

    def _lend(self, worker: Any, request: str, **more: Any) -> None:
        """The prefill's step, and the next one, which says that the blocks are kept."""
        worker.start_load_kv(self.vllm.metadata(reqs_in_batch={request}))
        worker.get_transfer_results()
        lent = {request: time.perf_counter() + 30}
        worker.start_load_kv(self.vllm.metadata(reqs_to_send=lent, **more))
        worker.get_transfer_results()

    def _peer_of(self, d: str, p: str) -> Any:
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import RemoteMeta, ReqMeta

        blocks = [list(range(TOKENS // self.vllm.BLOCK))]
        remote = RemoteMeta(
            block_ids=blocks, host="127.0.0.1", port=1, engine_id="p-0123456789ab", request_id=p
        )
        return ReqMeta(blocks, blocks, tp_size=1, remote=remote, awaiting_kvs=True)


def compare(mode: str, model: Path, pairs: int, rings: Path) -> dict[str, Any]:
    """Medians per thread, in µs per request pair and ns per idle step."""
    from kvscope.ring import ring_paths

    before = set(ring_paths(rings))
    sides = [Side(mode, model, instrumented) for instrumented in (False, True)]
    own = [path for path in ring_paths(rings) if path not in before]
    rng = random.Random(1)
    served: dict[str, list[tuple[float, float]]] = {name: [] for name in sides[0].meters}
    idle: dict[str, list[float]] = {name: [] for name in served}
    totals = []
    for number in range(-WARM_UP, pairs):
        name = f"q{rng.getrandbits(128):032x}"
        if number == 0:
            recorded = _count(own)
        costs = _both(sides, lambda side: side.serve(name), rng)  # noqa: B023 (called at once)
        idles = _both(sides, lambda side: side.idle(), rng) if number % 10 == 0 else None
        if number < 0:
            continue
        for thread, both in served.items():
            both.append((costs[0][thread] / 1e3, costs[1][thread] / 1e3))
        totals.append(sum(costs[1].values()) / 1e3 - sum(costs[0].values()) / 1e3)
        if idles:
            for thread, differences in idle.items():
                differences.append(idles[1][thread] - idles[0][thread])
    threads = {}
    for thread, both in served.items():
        differences = [ours - stock for stock, ours in both]
        low, middle, high = statistics.quantiles(differences, n=4)
        threads[thread] = {
            "stock_us": statistics.median(stock for stock, _ in both),
            "ours_us": statistics.median(ours for _, ours in both),
            "hooks_us": middle,
            "hooks_us_quartiles": [low, high],
            "idle_step_ns": statistics.median(idle[thread]),
        }
    return {
        "threads": threads,
        "hooks_us_per_pair": statistics.median(totals),
        "events_per_pair": round((_count(own) - recorded) / pairs, 1),
    }


def _both(
    sides: list[Side], call: Callable[[Side], dict[str, Any]], rng: random.Random
) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{}, {}]
    for i in rng.sample((0, 1), 2):
        found[i] = call(sides[i])
    return found


def _count(rings: list[Path]) -> int:
    """Events in the rings, without the once-a-second samples; texts are not events."""
    from kvscope import events
    from kvscope.ring import RingReader

    found = 0
    for path in rings:
        reader = RingReader(path)
        found += sum(event.kind != events.ENGINE_SAMPLE for event in reader.events())
        assert not reader.lost, "the rings are too small for this many pairs"
        reader.close()
    return found


def show(mode: str, found: dict[str, Any], pairs: int) -> None:
    print(f"{mode}: {pairs} request pairs, {found['events_per_pair']:g} events each")
    columns = ("stock µs", "ours µs", "hooks µs", "quartiles", "idle step ns")
    print(f"  {'thread':<14}" + "".join(f"{column:>13}" for column in columns))
    for thread, row in found["threads"].items():
        low, high = row["hooks_us_quartiles"]
        print(
            f"  {thread:<14}{row['stock_us']:>13.1f}{row['ours_us']:>13.1f}{row['hooks_us']:>13.1f}"
            f"{f'{low:.1f}-{high:.1f}':>13}{row['idle_step_ns']:>13,.0f}"
        )
    print(f"  {'all':<14}{'':>26}{found['hooks_us_per_pair']:>13.1f}")


def main() -> int:
    parser = argparse.ArgumentParser(description="µs of engine-thread time that the hooks take.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--pairs", type=int, default=1000, help="request pairs per mode (default 1000)")
    arguments = parser.parse_args()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    logging.disable(logging.WARNING)  # vLLM's, about a set-up that serves nobody
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from kvscope.connectors.hooks import PULL, PUSH
    from kvscope.demo.model import make_model
    from kvscope.ring import default_directory

    where = default_directory().parent
    with tempfile.TemporaryDirectory(dir=where if where.is_dir() else None) as folder:
        rings = Path(folder, "rings")
        os.environ["KVSCOPE_DIR"] = str(rings)
        model = make_model(Path(folder, "model"))
        found = {mode: compare(mode, model, arguments.pairs, rings) for mode in (PUSH, PULL)}
    if arguments.json:
        print(json.dumps({"hooks": found, "pairs": arguments.pairs}, indent=2))
        return 0
    for mode, figures in found.items():
        show(mode, figures, arguments.pairs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
