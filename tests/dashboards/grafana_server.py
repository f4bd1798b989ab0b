"""A stand-in for Grafana's HTTP API: keeps state, and refuses what Grafana refuses, in its words.

Written from Grafana's source and documentation; it is not Grafana. What it checks: who asks, uids and titles,
folders that must exist, versions of dashboards and data sources (412, 409), names that must differ, the
interval and the fields of rule groups. It adds what Grafana adds by itself: ids, versions, times, defaults.
"""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import unquote

TOKEN = "glsa_1S3cretT0kenOfAServiceAccount_5f3a"
USER, PASSWORD = "kv-admin", "p4ss/w&rd-of-admin"

_UID = re.compile(r"[A-Za-z0-9_-]{1,40}")


class Asked(NamedTuple):
    """A request that came in."""

    method: str
    path: str
    body: Any


class Refused(Exception):
    """An answer that is an error."""

    def __init__(self, code: int, message: str, **more: Any) -> None:
        super().__init__(message)
        self.code, self.body = code, {"message": message, **more}


Answer = Callable[[BaseHTTPRequestHandler], None]
"""Writes a whole answer by itself."""


class GrafanaServer:
    """The state, and what happened."""

    def __init__(self, prefix: str = "") -> None:
        self.prefix = prefix
        self.url = ""
        self.asked: list[Asked] = []
        self.seen_headers: list[dict[str, str]] = []
        self.folders: dict[str, dict[str, Any]] = {}
        self.sources: dict[str, dict[str, Any]] = {}
        self.dashboards: dict[str, dict[str, Any]] = {}
        self.groups: dict[tuple[str, str], dict[str, Any]] = {}
        self.anonymous = False
        self._instead: list[tuple[str, Answer]] = []
        self._ids = iter(range(1, 1 << 30))

    @property
    def writes(self) -> list[str]:
        return [f"{a.method} {a.path}" for a in self.asked if a.method != "GET"]

    def instead(self, request: str, answer: Answer) -> None:
        """Answer requests that begin with `request`, such as `PUT /api/folders`, in another way."""
        self._instead.append((request, answer))

    def fails(self, request: str, status: int, body: Any = None) -> None:
        """Answer requests that begin with `request` with an error."""
        text = body if isinstance(body, str) else json.dumps(body or {"message": f"made to fail: {status}"})
        self.instead(request, lambda handler: reply(handler, status, text))

    def heals(self) -> None:
        self._instead.clear()

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        length = int(handler.headers.get("Content-Length") or 0)
        raw = handler.rfile.read(length)
        path = handler.path.removeprefix(self.prefix)
        body = json.loads(raw) if raw else None
        self.asked.append(Asked(handler.command, unquote(path), body))
        self.seen_headers.append(dict(handler.headers))
        for request, answer in self._instead:
            if f"{handler.command} {path}".startswith(request):
                answer(handler)
                return
        try:
            self._check_who_asks(handler.headers.get("Authorization") or "")
            if self.prefix and not handler.path.startswith(self.prefix):
                raise Refused(404, "Not found")
            status, found = self._route(handler.command, path, body)
        except Refused as error:
            status, found = error.code, error.body
        reply(handler, status, json.dumps(found))

    def _check_who_asks(self, header: str) -> None:
        basic = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        if not self.anonymous and header not in (f"Bearer {TOKEN}", f"Basic {basic}"):
            raise Refused(401, "Invalid API key" if header else "Unauthorized", statusCode=401)

    def _route(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        part = [unquote(piece) for piece in path.strip("/").split("/")]
        match [method, *part]:
            case ["GET", "api", "frontend", "settings"]:
                return 200, {"buildInfo": {"version": "12.4.3", "edition": "Open Source"}, "datasources": {}}
            case ["GET", "api", "folders", uid]:
                return 200, _there(self.folders, uid, "folder not found")
            case ["POST", "api", "folders"]:
                return 200, self._make_folder(body)
            case ["GET", "api", "datasources", "uid", uid]:
                return 200, _there(self.sources, uid, "Data source not found")
            case ["POST", "api", "datasources"]:
                return 200, self._make_source(body)
            case ["PUT", "api", "datasources", "uid", uid]:
                return 200, self._change_source(uid, body)
            case ["GET", "api", "dashboards", "uid", uid]:
                return 200, self._dashboard(uid)
            case ["POST", "api", "dashboards", "db"]:
                return 200, self._save_dashboard(body)
            case ["GET", "api", "v1", "provisioning", "folder", folder, "rule-groups", name]:
                return 200, _there(self.groups, (folder, name), "rule group not found")
            case ["PUT", "api", "v1", "provisioning", "folder", folder, "rule-groups", name]:
                return 200, self._put_group(folder, name, body)
        raise Refused(404, "Not found")

    def _make_folder(self, body: Any) -> dict[str, Any]:
        uid, title = _text(body, "uid"), _text(body, "title")
        _check_uid(uid)
        if not title:
            raise Refused(400, "folder title cannot be empty")
        if uid in self.folders:
            raise Refused(412, "a folder with that uid already exists", status="name-exists")
        if any(folder["title"] == title for folder in self.folders.values()):
            raise Refused(409, "a folder with the same name already exists in the current location")
        self.folders[uid] = {"id": next(self._ids), "uid": uid, "title": title, "version": 1, "canEdit": True}
        return self.folders[uid]

    def _make_source(self, body: Any) -> dict[str, Any]:
        uid, name = _text(body, "uid"), _text(body, "name")
        self._check_source(uid, body)
        if uid in self.sources:
            raise Refused(409, "data source with the same uid already exists")
        if any(source["name"] == name for source in self.sources.values()):
            raise Refused(409, "data source with the same name already exists")
        self.sources[uid] = {**self._source(body), "id": next(self._ids), "version": 1}
        return {"message": "Datasource added", "name": name, "datasource": self.sources[uid]}

    def _change_source(self, uid: str, body: Any) -> dict[str, Any]:
        there = _there(self.sources, uid, "Data source not found")
        self._check_source(uid, body)
        if there["readOnly"]:
            raise Refused(403, "Cannot update read-only data source")
        if body.get("version", 0) and body["version"] < there["version"]:
            raise Refused(
                409, "Datasource has already been updated by someone else. Please reload and try again"
            )
        self.sources[uid] = {**self._source(body), "id": there["id"], "version": there["version"] + 1}
        return {"message": "Datasource updated", "name": body["name"], "datasource": self.sources[uid]}

    def _check_source(self, uid: str, body: Any) -> None:
        _check_uid(uid)
        if not all(_text(body, key) for key in ("name", "type", "access")):
            raise Refused(400, "bad request data")
        if not _text(body, "url").startswith(("http://", "https://")):
            raise Refused(400, "Validation error, invalid URL")

    def _source(self, body: dict[str, Any]) -> dict[str, Any]:
        """A data source with all the fields that Grafana tells; what the request leaves out is reset."""
        defaults: dict[str, Any] = {
            "orgId": 1,
            "typeLogoUrl": "",
            "user": "",
            "database": "",
            "basicAuth": False,
            "basicAuthUser": "",
            "withCredentials": False,
            "isDefault": False,
            "jsonData": {},
            "secureJsonFields": {},
            "readOnly": False,
        }
        sent = ("uid", "name", "type", "access", "url", *defaults)
        return {**defaults, **{key: body[key] for key in sent if key in body}, "readOnly": False}

    def _dashboard(self, uid: str) -> dict[str, Any]:
        saved = _there(self.dashboards, uid, "Dashboard not found")
        folder = self.folders.get(saved["folder"], {})
        meta = {
            "folderUid": saved["folder"],
            "folderTitle": folder.get("title", ""),
            "version": saved["dashboard"]["version"],
            "provisioned": saved.get("provisioned", False),
        }
        return {"meta": meta, "dashboard": saved["dashboard"]}

    def _save_dashboard(self, body: Any) -> dict[str, Any]:
        dashboard, folder = body.get("dashboard"), body.get("folderUid", "")
        uid = _text(dashboard, "uid")
        _check_uid(uid)
        if not _text(dashboard, "title"):
            raise Refused(400, "Dashboard title cannot be empty", status="empty-name")
        if len(dashboard["title"]) > 5000:
            raise Refused(400, "Dashboard title cannot contain more than 5 000 characters")
        if len(body.get("message", "")) > 500:
            raise Refused(400, "message too long, max 500 characters")
        if folder and folder not in self.folders:
            raise Refused(400, "folder not found")
        there = self.dashboards.get(uid)
        version = there["dashboard"]["version"] if there else 0
        if there and there.get("provisioned"):
            raise Refused(400, "Cannot save provisioned dashboard")
        if there and not body.get("overwrite") and dashboard.get("version") != version:
            raise Refused(412, "The dashboard has been changed by someone else", status="version-mismatch")
        number = there["dashboard"]["id"] if there else next(self._ids)
        saved = {**dashboard, "id": number, "uid": uid, "version": version + 1}
        self.dashboards[uid] = {"dashboard": saved, "folder": folder}
        return {"id": number, "uid": uid, "status": "success", "version": version + 1, "slug": uid}

    def _put_group(self, folder: str, name: str, body: Any) -> dict[str, Any]:
        if folder not in self.folders:
            raise Refused(404, "folder not found")
        if not isinstance(body.get("interval"), int) or body["interval"] <= 0 or body["interval"] % 10:
            raise Refused(400, "interval should be non-zero and divided exactly by scheduler interval: 10")
        rules = [self._rule(folder, name, rule) for rule in body["rules"]]
        elsewhere = [r for key, g in self.groups.items() if key != (folder, name) for r in g["rules"]]
        titles = [r["title"] for r in [*rules, *elsewhere] if r["folderUID"] == folder]
        uids = [r["uid"] for r in [*rules, *elsewhere]]
        if len(set(titles)) < len(titles) or len(set(uids)) < len(uids):
            raise Refused(400, "a conflicting alert rule is found: rule title under the same folder is taken")
        self.groups[folder, name] = {
            "title": name,
            "folderUid": folder,
            "interval": body["interval"],
            "rules": rules,
        }
        return body

    def _rule(self, folder: str, group: str, rule: Any) -> dict[str, Any]:
        """A rule as Grafana tells it afterwards."""
        _check_uid(_text(rule, "uid"))
        title, queries = _text(rule, "title"), rule.get("data") or []
        refs = [query["refId"] for query in queries]
        good = (
            1 <= len(title) <= 190
            and 1 <= len(group) <= 190
            and rule.get("condition") in refs
            and len(set(refs)) == len(refs)
            and rule.get("noDataState") in ("Alerting", "NoData", "OK", "KeepLast")
            and rule.get("execErrState") in ("Alerting", "Error", "OK", "KeepLast")
            and re.fullmatch(r"(\d+(ms|[smhdwy]))+", rule.get("for") or "")
            and all(isinstance(v, str) for key in ("annotations", "labels") for v in rule[key].values())
        )
        for query in queries:
            span = query.get("relativeTimeRange") or {}
            good = good and query["model"]["refId"] == query["refId"]
            if query["datasourceUid"] != "__expr__":
                good = (
                    good
                    and span.get("from", 0) > span.get("to", 0)
                    and query["datasourceUid"] in self.sources
                )
        if not good:
            raise Refused(400, f"invalid alert rule: '{title}'")
        limits = {"intervalMs": 1000, "maxDataPoints": 43200}
        kept = ("uid", "title", "condition", "noDataState", "execErrState", "for", "annotations", "labels")
        return {
            **{key: rule[key] for key in kept if rule[key] != {}},
            "data": [{**query, "model": {**limits, **query["model"]}} for query in queries],
            "id": next(self._ids),
            "orgID": 1,
            "folderUID": folder,
            "ruleGroup": group,
            "updated": "2026-11-29T12:00:00Z",
            "provenance": "api",
            "isPaused": rule.get("isPaused", False),
            "keep_firing_for": "0s",
            "notification_settings": rule.get("notification_settings"),
            "record": None,
        }


def reply(
    handler: BaseHTTPRequestHandler, status: int, text: str, type_: str = "application/json", **headers: str
) -> None:
    """Write an answer."""
    raw = text.encode()
    handler.send_response(status)
    handler.send_header("Content-Type", type_)
    handler.send_header("Content-Length", str(len(raw)))
    for name, value in headers.items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(raw)


@contextmanager
def serving(prefix: str = "") -> Iterator[GrafanaServer]:
    """A stand-in that answers on loopback; under the path `prefix` where one is given."""
    grafana = GrafanaServer(prefix)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = 1 << 16  # head and body in one packet

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def handle_any(self) -> None:
            try:
                grafana.answer(self)
            except OSError:  # the client went away
                self.close_connection = True

        do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = handle_any

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            """Clients that go away in the middle are what some tests are about."""

    server = Server(("127.0.0.1", 0), Handler)
    grafana.url = f"http://127.0.0.1:{server.server_port}{prefix}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield grafana
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _there(found: dict[Any, dict[str, Any]], key: Any, missing: str) -> dict[str, Any]:
    if key not in found:
        raise Refused(404, missing, status="not-found")
    return found[key]


def _text(body: Any, key: str) -> str:
    value = body.get(key) if isinstance(body, dict) else None
    if value is not None and not isinstance(value, str):
        raise Refused(400, "bad request data")
    return value or ""


def _check_uid(uid: str) -> None:
    if len(uid) > 40:
        raise Refused(400, "uid too long, max 40 characters")
    if not _UID.fullmatch(uid):
        raise Refused(400, "uid contains illegal characters")
