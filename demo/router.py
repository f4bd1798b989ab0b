"""The router of the demo and the tests: one OpenAI request in, a prefill and a decode leg out.

    python -m kvscope.demo.router --port 8000 --mode push \
        --prefill http://127.0.0.1:8100,ENGINE_ID,127.0.0.1,5600 --decode http://127.0.0.1:8200

Modes:

push            both legs leave at once; D registers with P while P computes. `--sequential`, or the header
                `X-Sequential: 1` on a request, sends D only when P has answered.
pull            P first (one token, do_remote_decode), then D with the parameters P returned.
bidirectional   as pull; and a request with `X-Session-Id` continues its session: P gets the parameters that
                D returned for the turn before, and pulls that KV from D.
                vLLM 0.32 returns kv_transfer_params only with a response that is not streamed. D is
                therefore asked for a whole response when the request has a session, and a client that
                wanted a stream gets it as one event at the end: its first byte says nothing about D's
                first token. Sessionless requests stream as ever, and leave D's blocks to their TTL.

Both legs carry one X-Request-Id: the client's, or a new one (vLLM's push matches legs by it). An error of
either leg reaches the client with the header `X-Failed-Leg`; a client that leaves aborts both legs.

`GET /hops` returns what happened when, by request id (`GET /hops?id=...` one of them): CLOCK_MONOTONIC ns of
this process, so that a test on the same host can take the router's own time off.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import itertools
import json
import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

PUSH = "push"
PULL = "pull"
BIDIRECTIONAL = "bidirectional"
MODES = (PUSH, PULL, BIDIRECTIONAL)

APIS = ("/v1/completions", "/v1/chat/completions")
KEPT_HOPS = 20_000
KEPT_SESSIONS = 1_000

Json = dict[str, Any]


@dataclass(frozen=True)
class Prefill:
    """A prefill engine; what follows the url is needed only where D must know it before P answers."""

    url: str
    engine_id: str = ""
    host: str = ""
    port: int = 0
    """Of the NIXL side channel."""

    @staticmethod
    def parse(text: str) -> Prefill:
        parts = text.split(",")
        if len(parts) == 1:
            return Prefill(parts[0])
        url, engine_id, host, port = parts
        return Prefill(url, engine_id, host, int(port))


@dataclass
class Hops:
    """One request through the router. Times are CLOCK_MONOTONIC ns; 0: it did not happen."""

    request_id: str
    prefill_url: str = ""
    decode_url: str = ""
    session: str = ""
    turn: int = 0
    streamed_from_decode: bool = False
    received_ns: int = 0
    prefill_sent_ns: int = 0
    prefill_answered_ns: int = 0
    decode_sent_ns: int = 0
    decode_first_byte_ns: int = 0
    first_byte_forwarded_ns: int = 0
    finished_ns: int = 0
    outcome: str = ""
    """`ok`, `client left`, or the leg that failed and how."""
    prefill_engine: str = ""
    prefill_internal_id: str = ""
    """vLLM's request id on P, as P returned it."""


class LegError(Exception):
    """One leg answered with an error, or not at all."""

    def __init__(self, leg: str, status: int, body: bytes) -> None:
        super().__init__(f"{leg} leg: {status} {body[:300].decode(errors='replace')}")
        self.leg = leg
        self.status = status
        self.body = body


@dataclass
class Session:
    """What D left of the last turn, for P's next one."""

    parameters: Json | None = None
    turn: int = 0


class Router:
    def __init__(
        self, mode: str, prefills: list[Prefill], decodes: list[str], sequential: bool = False
    ) -> None:
        self.mode = mode
        self.sequential = sequential
        self.prefills = itertools.cycle(prefills)
        self.decodes = itertools.cycle(decodes)
        self.hops: OrderedDict[str, Hops] = OrderedDict()
        self.sessions: OrderedDict[str, Session] = OrderedDict()
        self.client = httpx.AsyncClient(
            timeout=httpx.Timeout(600, connect=10), limits=httpx.Limits(max_connections=None), trust_env=False
        )

    def app(self) -> Starlette:
        routes: list[Route] = [Route(path, _Endpoint(self)) for path in APIS]
        routes += [Route("/health", lambda _: Response()), Route("/hops", self.get_hops)]

        @contextlib.asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            async with self.client:
                yield

        return Starlette(routes=routes, lifespan=lifespan)

    async def get_hops(self, request: Request) -> Response:
        wanted = request.query_params.get("id")
        if wanted is None:
            return JSONResponse([asdict(hops) for hops in self.hops.values()])
        if wanted not in self.hops:
            return JSONResponse({"error": f"no request {wanted}"}, status_code=404)
        return JSONResponse(asdict(self.hops[wanted]))

    async def handle(self, request: Request, body: Json, send: Send) -> None:
        """Serve one request up to its last byte."""
        hops = Hops(request.headers.get("x-request-id") or uuid.uuid4().hex, received_ns=time.monotonic_ns())
        self.hops[hops.request_id] = hops
        if len(self.hops) > KEPT_HOPS:
            self.hops.popitem(last=False)
        hops.session = request.headers.get("x-session-id", "")
        leg = _Legs(self, request, body, hops, send)
        try:
            await leg.run()
            hops.outcome = "ok"
        except asyncio.CancelledError:
            hops.outcome = "client left"
            raise
        except LegError as error:
            hops.outcome = str(error)
            await leg.send_error(error)
        finally:
            hops.finished_ns = time.monotonic_ns()

    def session(self, name: str) -> Session:
        session = self.sessions.setdefault(name, Session())
        self.sessions.move_to_end(name)
        if len(self.sessions) > KEPT_SESSIONS:
            self.sessions.popitem(last=False)
        return session


class _Endpoint:
    """ASGI endpoint: runs the request, and cancels it when the client leaves."""

    def __init__(self, router: Router) -> None:
        self.router = router

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            body = json.loads(await request.body())
        except ValueError as error:
            await JSONResponse({"error": f"not JSON: {error}"}, status_code=400)(scope, receive, send)
            return
        work = asyncio.create_task(self.router.handle(request, body, send))
        gone = asyncio.create_task(_disconnected(receive))
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        await _cancel(gone)
        if work.done():
            work.result()
        else:
            await _cancel(work)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, LegError):
        await task


class _Legs:
    """The two legs of one request."""

    def __init__(self, router: Router, request: Request, body: Json, hops: Hops, send: Send) -> None:
        self.router = router
        self.path = request.url.path
        self.body = body
        self.hops = hops
        self.send = send
        self.started = False
        self.prefill = next(router.prefills)
        self.decode_url = next(router.decodes)
        hops.prefill_url, hops.decode_url = self.prefill.url, self.decode_url
        self.headers = {"X-Request-Id": hops.request_id}
        for name in ("authorization", "traceparent", "tracestate", "x-session-id"):
            if name in request.headers:
                self.headers[name] = request.headers[name]
        self.sequential = router.sequential or request.headers.get("x-sequential") == "1"

    def sent(self, hop: str) -> Callable[[str, Any], Awaitable[None]]:
        """Corrects a leg's sending time to when its last byte left: what lies before is the router's own."""

        async def trace(event: str, info: Any) -> None:
            if event == "http11.send_request_body.complete":
                setattr(self.hops, hop, time.monotonic_ns())

        return trace

    async def run(self) -> None:
        if self.router.mode == PUSH and not self.sequential:
            await self.run_concurrent()
            return
        session = None
        if self.router.mode == BIDIRECTIONAL and self.hops.session:
            session = self.router.session(self.hops.session)
            session.turn += 1
            self.hops.turn = session.turn
        parameters = await self.run_prefill(session.parameters if session else None)
        if session:
            session.parameters = await self.run_decode_whole(parameters)
        else:
            await self.run_decode(parameters)

    async def run_concurrent(self) -> None:
        """Both legs at once: D waits for the KV, so its first event is never long before P's answer."""
        if not self.prefill.engine_id:
            raise LegError("decode", 500, b"push: --prefill needs URL,ENGINE_ID,HOST,PORT")
        parameters = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.prefill.engine_id,
            "remote_host": self.prefill.host,
            "remote_port": self.prefill.port,
            "tp_size": 1,
            # P's internal id is not known yet; vLLM matches the legs by X-Request-Id and wants any text here.
            "remote_request_id": self.hops.request_id,
        }
        prefill = asyncio.create_task(self.run_prefill(None))
        decode = asyncio.create_task(self.run_decode(parameters))
        try:
            await asyncio.wait({prefill, decode}, return_when=asyncio.FIRST_COMPLETED)
            if prefill.done():
                prefill.result()
            await decode
            await prefill
        finally:
            await _cancel(decode)
            await _cancel(prefill)

    async def run_prefill(self, kept_on_decode: Json | None) -> Json:
        """P's leg: the prompt and one token nobody reads. Returns what D needs."""
        body = {key: value for key, value in self.body.items() if key not in ("stream_options", "min_tokens")}
        body |= {"stream": False, "max_tokens": 1}
        if "max_completion_tokens" in body:
            body["max_completion_tokens"] = 1
        body["kv_transfer_params"] = kept_on_decode or {"do_remote_decode": True, "do_remote_prefill": False}
        self.hops.prefill_sent_ns = time.monotonic_ns()
        try:
            answer = await self.router.client.post(
                self.prefill.url + self.path,
                json=body,
                headers=self.headers,
                extensions={"trace": self.sent("prefill_sent_ns")},
            )
        except httpx.HTTPError as error:
            raise LegError("prefill", 502, _error_body(error)) from error
        self.hops.prefill_answered_ns = time.monotonic_ns()
        if answer.status_code != 200:
            raise LegError("prefill", answer.status_code, answer.content)
        parameters: Json = answer.json().get("kv_transfer_params") or {}
        self.hops.prefill_engine = parameters.get("remote_engine_id", "")
        self.hops.prefill_internal_id = parameters.get("remote_request_id", "")
        return parameters

    async def run_decode(self, parameters: Json) -> None:
        """D's leg, forwarded as it comes."""
        body = self.body | {"kv_transfer_params": parameters}
        self.hops.streamed_from_decode = bool(body.get("stream"))
        self.hops.decode_sent_ns = time.monotonic_ns()
        try:
            async with self.router.client.stream(
                "POST",
                self.decode_url + self.path,
                json=body,
                headers=self.headers,
                extensions={"trace": self.sent("decode_sent_ns")},
            ) as answer:
                if answer.status_code != 200:
                    raise LegError("decode", answer.status_code, await answer.aread())
                media = answer.headers.get("content-type", "application/json")
                async for part in answer.aiter_raw():
                    await self.forward(part, media)
        except httpx.HTTPError as error:
            raise LegError("decode", 502, _error_body(error)) from error
        await self.send({"type": "http.response.body", "body": b""})

    async def run_decode_whole(self, parameters: Json) -> Json | None:
        """D's leg as one response, for the parameters that come with it. Returns those."""
        body = {key: value for key, value in self.body.items() if key != "stream_options"}
        body |= {"stream": False, "kv_transfer_params": parameters}
        self.hops.decode_sent_ns = time.monotonic_ns()
        try:
            answer = await self.router.client.post(
                self.decode_url + self.path,
                json=body,
                headers=self.headers,
                extensions={"trace": self.sent("decode_sent_ns")},
            )
        except httpx.HTTPError as error:
            raise LegError("decode", 502, _error_body(error)) from error
        if answer.status_code != 200:
            raise LegError("decode", answer.status_code, answer.content)
        if self.body.get("stream"):
            await self.forward(_as_events(answer.json()), "text/event-stream")
        else:
            await self.forward(answer.content, "application/json")
        await self.send({"type": "http.response.body", "body": b""})
        kept: Json | None = answer.json().get("kv_transfer_params")
        return kept

    async def forward(self, part: bytes, media: str) -> None:
        if not self.started:
            self.hops.decode_first_byte_ns = time.monotonic_ns()
            await self.start(200, media)
        await self.send({"type": "http.response.body", "body": part, "more_body": True})
        if not self.hops.first_byte_forwarded_ns:
            self.hops.first_byte_forwarded_ns = time.monotonic_ns()

    async def start(self, status: int, media: str, leg: str = "") -> None:
        self.started = True
        headers = [(b"content-type", media.encode()), (b"x-request-id", self.hops.request_id.encode())]
        if leg:
            headers.append((b"x-failed-leg", leg.encode()))
        await self.send({"type": "http.response.start", "status": status, "headers": headers})

    async def send_error(self, error: LegError) -> None:
        if self.started:  # too late for a status: say it in the stream, as vLLM does
            text = json.dumps({"error": {"message": str(error), "type": "LegError", "code": error.status}})
            body = f"data: {text}\n\n".encode()
        else:
            await self.start(error.status, "application/json", error.leg)
            body = error.body
        await self.send({"type": "http.response.body", "body": body})


def _error_body(error: Exception) -> bytes:
    return json.dumps({"error": {"message": repr(error), "type": type(error).__name__}}).encode()


def _as_events(answer: Json) -> bytes:
    """A whole response as the one event of a stream."""
    choices = [
        {key: value for key, value in choice.items() if key != "message"}
        | ({"delta": choice["message"]} if "message" in choice else {})
        for choice in answer["choices"]
    ]
    event = {key: value for key, value in answer.items() if key != "kv_transfer_params"}
    event["choices"] = choices
    event["object"] = answer["object"].replace("chat.completion", "chat.completion.chunk")
    return f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n".encode()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m kvscope.demo.router")
    parser.add_argument("--port", type=int, required=True, help="TCP port on 127.0.0.1")
    parser.add_argument("--mode", choices=MODES, required=True)
    parser.add_argument("--prefill", action="append", required=True, help="URL[,ENGINE_ID,HOST,PORT]")
    parser.add_argument("--decode", action="append", required=True, help="URL")
    parser.add_argument("--sequential", action="store_true", help="push: send D only when P has answered")
    options = parser.parse_args()
    router = Router(
        options.mode, [Prefill.parse(text) for text in options.prefill], options.decode, options.sequential
    )
    # A full collection would stop every request for tens of milliseconds.
    gc.freeze()
    gc.set_threshold(50_000, 100, 1000)
    uvicorn.run(router.app(), host="127.0.0.1", port=options.port, log_level="warning", access_log=False)


if __name__ == "__main__":
    main()
