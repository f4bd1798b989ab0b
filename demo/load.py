"""The client that measures: seeded requests through the router, streamed, timed on CLOCK_MONOTONIC.

And one that does not measure: a load that goes on while someone looks at it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import threading
import time
import uuid
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import httpx

from kvscope.demo.model import VOCABULARY

MODEL = "tiny"

USERS = 2
"""Of the load that goes on."""
THINKING_S = (0.2, 1.5)
PROMPT_TOKENS = (120, 300, 700, 1500)
OUTPUT_TOKENS = (8, 48)


@dataclass(frozen=True)
class Load:
    """What to send."""

    prompt_tokens: Sequence[int]
    """One request per entry."""
    output_tokens: int = 8
    concurrency: int = 1
    seed: int = 0
    chat: bool = False
    """Chat completions instead of completions; the prompt is then text of about as many tokens."""
    sequential: bool = False
    """Ask a push router to send D only when P has answered."""
    timeout_s: float = 120


@dataclass
class Result:
    """One request as the client saw it. Times are CLOCK_MONOTONIC ns; 0: it did not happen."""

    request_id: str
    prompt: list[int] | str
    session: str = ""
    turn: int = 0
    status: int = 0
    """HTTP status; 0 when there was no answer."""
    error: str = ""
    text: str = ""
    output_ids: list[int] = field(default_factory=list)
    sent_ns: int = 0
    first_token_ns: int = 0
    finished_ns: int = 0
    metrics: dict[str, Any] = field(default_factory=dict)
    """D's own per-request metrics (ms), where it sends them: --enable-per-request-metrics."""
    hops: dict[str, Any] = field(default_factory=dict)
    """What the router recorded of it: `router.Hops`."""

    @property
    def ok(self) -> bool:
        return self.status == 200 and not self.error

    @property
    def ttft_ns(self) -> int:
        return self.first_token_ns - self.sent_ns

    @property
    def duration_ns(self) -> int:
        return self.finished_ns - self.sent_ns

    @property
    def tpot_ns(self) -> float:
        """Time per output token after the first, 0 where there is none."""
        after_first = len(self.output_ids) - 1
        return (self.finished_ns - self.first_token_ns) / after_first if after_first > 0 else 0.0


def make_prompt(tokens: int, rng: random.Random) -> list[int]:
    """Random token ids; never the end token."""
    return [rng.randrange(VOCABULARY - 1) for _ in range(tokens)]


async def send(
    client: httpx.AsyncClient,
    url: str,
    prompt: list[int] | str,
    output_tokens: int = 8,
    *,
    request_id: str = "",
    session: str = "",
    chat: bool = False,
    headers: Mapping[str, str] | None = None,
) -> Result:
    """One streamed greedy request. Never raises for what the server does: see `Result.error`."""
    result = Result(request_id or f"q{uuid.uuid4().hex}", prompt, session)
    body: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    if chat:
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        body["prompt"] = prompt
    own = {"X-Request-Id": result.request_id} | dict(headers or {})
    if session:
        own["X-Session-Id"] = session
    path = "/v1/chat/completions" if chat else "/v1/completions"
    result.sent_ns = time.monotonic_ns()
    try:
        async with client.stream("POST", url + path, json=body, headers=own) as answer:
            result.status = answer.status_code
            if answer.status_code != 200:
                result.error = (await answer.aread()).decode(errors="replace")
            else:
                async for line in answer.aiter_lines():
                    _take(result, line)
    except httpx.HTTPError as error:
        result.error = repr(error)
    result.finished_ns = time.monotonic_ns()
    return result


def _take(result: Result, line: str) -> None:
    if not line.startswith("data: ") or line == "data: [DONE]":
        return
    event = json.loads(line.removeprefix("data: "))
    if "error" in event:
        result.error = json.dumps(event["error"])
        return
    result.metrics = event.get("metrics") or result.metrics
    for choice in event["choices"]:
        text = choice.get("text") or choice.get("delta", {}).get("content") or ""
        ids = choice.get("token_ids") or []
        if (text or ids) and not result.first_token_ns:
            result.first_token_ns = time.monotonic_ns()
        result.text += text
        result.output_ids += ids


async def fetch_hops(client: httpx.AsyncClient, url: str, results: Sequence[Result]) -> None:
    """Fill `Result.hops` from the router."""
    by_id = {hops["request_id"]: hops for hops in (await client.get(url + "/hops")).raise_for_status().json()}
    for result in results:
        result.hops = by_id.get(result.request_id, {})


def _client(timeout_s: float) -> httpx.AsyncClient:
    return httpx.AsyncClient(timeout=timeout_s, limits=httpx.Limits(max_connections=None), trust_env=False)


async def run_load(url: str, load: Load) -> list[Result]:
    """Send the load through the router at `url`; results in the order of `prompt_tokens`."""
    rng = random.Random(load.seed)
    prompts: list[list[int] | str] = [
        " ".join(rng.choices(("tea", "ran", "hot", "sun"), k=tokens // 3 + 1))
        if load.chat
        else make_prompt(tokens, rng)
        for tokens in load.prompt_tokens
    ]
    gate = asyncio.Semaphore(load.concurrency)
    headers = {"X-Sequential": "1"} if load.sequential else None

    async with _client(load.timeout_s) as client:

        async def one(prompt: list[int] | str) -> Result:
            async with gate:
                return await send(client, url, prompt, load.output_tokens, chat=load.chat, headers=headers)

        results = await asyncio.gather(*(one(prompt) for prompt in prompts))
        await fetch_hops(client, url, results)
    return results


async def run_conversation(
    url: str,
    turns: int,
    first_prompt_tokens: int = 300,
    added_tokens: int = 40,
    output_tokens: int = 16,
    seed: int = 0,
    timeout_s: float = 120,
    session: str = "",
    pause_s: float = 0.0,
) -> list[Result]:
    """One session: each turn's prompt is all tokens so far and `added_tokens` new ones. Stops at an error.

    Between turns it waits for up to `pause_s`.
    """
    rng = random.Random(seed)
    session = session or f"s{uuid.uuid4().hex}"
    results: list[Result] = []
    prompt = make_prompt(first_prompt_tokens, rng)
    async with _client(timeout_s) as client:
        for turn in range(1, turns + 1):
            if pause_s and turn > 1:
                await asyncio.sleep(rng.uniform(0, pause_s))
            result = await send(client, url, list(prompt), output_tokens, session=session)
            result.turn = turn
            results.append(result)
            if not result.ok:
                break
            prompt += result.output_ids + make_prompt(added_tokens, rng)
        await fetch_hops(client, url, results)
    return results


@dataclass
class Failed:
    """Requests of a load that goes on, or whole conversations, that did not succeed."""

    count: int = 0


@contextlib.contextmanager
def sending(url: str, conversations: bool, seed: int = 0) -> Iterator[Failed]:
    """Send a gentle load through the router at `url`, in a thread, until the end.

    Single requests, or `conversations` of some turns. One that fails is counted; the next one comes.
    """
    failed = Failed()
    begun: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[None]]] = Future()

    async def send_on() -> None:
        users = [
            _user(url, conversations, random.Random(f"{seed}/{number}"), failed) for number in range(USERS)
        ]
        task = asyncio.create_task(_together(users))
        begun.set_result((asyncio.get_running_loop(), task))
        with contextlib.suppress(asyncio.CancelledError):
            await task

    def run() -> None:
        try:
            asyncio.run(send_on())
        except Exception as error:
            if begun.done():
                raise
            begun.set_exception(error)

    thread = threading.Thread(target=run, name="load", daemon=True)
    thread.start()
    loop, task = begun.result()
    try:
        yield failed
    finally:
        with contextlib.suppress(RuntimeError):  # it has ended by itself
            loop.call_soon_threadsafe(task.cancel)
        thread.join()


async def _together(users: Sequence[Awaitable[None]]) -> None:
    await asyncio.gather(*users)


async def _user(url: str, conversations: bool, rng: random.Random, failed: Failed) -> None:
    async with _client(120) as client:
        while True:
            await asyncio.sleep(rng.uniform(*THINKING_S))
            tokens, output_tokens = rng.choice(PROMPT_TOKENS), rng.randint(*OUTPUT_TOKENS)
            try:
                if conversations:
                    turns, seed = rng.randint(2, 5), rng.getrandbits(32)
                    first = min(tokens, 700)
                    sent = await run_conversation(url, turns, first, 60, output_tokens, seed, pause_s=4)
                    failed.count += not sent[-1].ok
                else:
                    failed.count += not (await send(client, url, make_prompt(tokens, rng), output_tokens)).ok
            except Exception:  # whatever the router answers: the load goes on, and the screen stays clean
                failed.count += 1
