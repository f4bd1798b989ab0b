"""Grafana's HTTP API as `apply` needs it: bounded, and with errors that say what to do.

By httpx: grafana-client brings urllib3-future, which takes the place of urllib3 in the whole environment,
vLLM's included.

Answers are untrusted: their size and time are limited, redirects are not followed (credentials would go with
them), and what is shown of them is made printable and rid of secrets.
"""

from __future__ import annotations

import base64
import contextlib
import ipaddress
import json
import re
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, urlsplit

import httpx

from kvscope import __version__
from kvscope.errors import KvscopeError, UsageError
from kvscope.text import printable, shortened

MAX_ANSWER_BYTES = 16 << 20
SHOWN = 200
"""Characters of an answer in an error."""


class NoGrafana(KvscopeError):
    """Nothing answers there, or it is no Grafana."""

    exit_code = 3


class GrafanaRefused(KvscopeError):
    """Grafana's own complaint; `status` is that of HTTP."""

    def __init__(self, line: str, status: int) -> None:
        super().__init__(line)
        self.status = status


class Credential:
    """Who asks: a token, or a user and a password, or nobody. Shows neither."""

    def __init__(self, token: str = "", user: str = "", password: str = "") -> None:
        if any(not (32 < ord(c) < 127) for c in token):
            raise UsageError("the token has characters that no Grafana token has; give it alone, on one line")
        if "\n" in user + password or "\r" in user + password:
            raise UsageError("GRAFANA_USER and GRAFANA_PASSWORD are one line each")
        self.token, self.user, self.password = token, user, password

    @property
    def given(self) -> bool:
        return bool(self.token or self.user)

    def scrubbed(self, text: str) -> str:
        """`text` without the secrets, in whatever form a server may have sent them back."""
        basic = base64.b64encode(f"{self.user}:{self.password}".encode()).decode()
        plain = {self.token, self.password, *([basic] if self.user else [])} - {""}
        written = {form for s in plain for form in (s, quote(s, safe=""), json.dumps(s)[1:-1])}
        for secret in sorted(written, key=len, reverse=True):
            text = text.replace(secret, "***")
        return text


class _TooMuch(Exception):
    pass


class _Redirected(Exception):
    pass


class _Status(Exception):
    """Another answer than 2xx, with what it says."""

    def __init__(self, status: int, message: object) -> None:
        super().__init__(status)
        self.status = status
        self.message = message


class Grafana:
    """One Grafana.

    Raises (all methods):
        NoGrafana: nothing answers in time, or it is something else.
        GrafanaRefused: it complains.
    """

    def __init__(self, url: str, credential: Credential, timeout_s: float) -> None:
        parts = _parts(url)
        self._credential = credential
        self._timeout_s = timeout_s
        self.url = url.rstrip("/")
        headers = {"User-Agent": f"kvscope/{__version__}", "Accept-Encoding": "identity"}
        if credential.token:
            headers["Authorization"] = f"Bearer {credential.token}"
        self._client = httpx.Client(
            headers=headers,
            auth=(credential.user, credential.password) if credential.user else None,
            timeout=timeout_s,
            follow_redirects=False,
        )
        self.exposed = parts.scheme == "http" and credential.given and not _is_loopback(parts.hostname or "")
        """Whether the credentials can be read on their way."""

    def version(self) -> str:
        """Grafana's version; the first thing to ask."""
        with self._asking("ask for its version"):
            try:
                answer = self._ask("GET", "frontend/settings")
            except _Status as error:
                if error.status in (404, 405, 501):
                    raise self._other(f"it answers {error.status} to /api/frontend/settings") from None
                raise
            except (ValueError, RecursionError):
                raise self._other("its answer is not JSON") from None
        build = answer.get("buildInfo") if isinstance(answer, dict) else None
        version = build.get("version") if isinstance(build, dict) else None
        if not isinstance(version, str) or not re.match(r"\d+\.", version):
            raise self._other("its answer is not one of Grafana")
        return shortened(self.shown(version), 40)

    def folder(self, uid: str) -> dict[str, Any] | None:
        return self._found(f"read folder {uid}", f"folders/{uid}")

    def create_folder(self, uid: str, title: str) -> None:
        with self._asking(f"create folder {uid}"):
            self._ask("POST", "folders", {"uid": uid, "title": title})

    def data_source(self, uid: str) -> dict[str, Any] | None:
        return self._found(f"read data source {uid}", f"datasources/uid/{quote(uid, safe='')}")

    def create_data_source(self, body: dict[str, Any]) -> None:
        with self._asking(f"create data source {body['uid']}"):
            self._ask("POST", "datasources", body)

    def update_data_source(self, uid: str, body: dict[str, Any]) -> None:
        with self._asking(f"update data source {uid}"):
            self._ask("PUT", f"datasources/uid/{quote(uid, safe='')}", body)

    def dashboard(self, uid: str) -> dict[str, Any] | None:
        """`dashboard` and `meta`."""
        return self._found(f"read dashboard {uid}", f"dashboards/uid/{uid}")

    def save_dashboard(self, body: dict[str, Any]) -> None:
        with self._asking(f"save dashboard {body['dashboard']['uid']}"):
            self._ask("POST", "dashboards/db", body)

    def rule_group(self, folder_uid: str, name: str) -> dict[str, Any] | None:
        return self._found(f"read rule group {name}", _group_path(folder_uid, name))

    def put_rule_group(self, folder_uid: str, body: dict[str, Any]) -> None:
        name = body["title"]
        with self._asking(f"save rule group {name}"):
            self._ask("PUT", _group_path(folder_uid, name), body)

    def close(self) -> None:
        self._client.close()

    def _found(self, what: str, path: str) -> dict[str, Any] | None:
        with self._asking(what):
            try:
                answer = self._ask("GET", path)
            except _Status as error:
                if error.status == 404:
                    return None
                raise
        if not isinstance(answer, dict):
            raise GrafanaRefused(f"can't {what}: {self.url} answers something that is not Grafana's", 0)
        return answer

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> object:
        """One request; its answer is bounded in size and in time."""
        end = time.monotonic() + self._timeout_s
        with self._client.stream(method, f"{self.url}/api/{path}", json=body) as response:
            if response.is_redirect:
                raise _Redirected(response.headers.get("Location", ""))
            content = bytearray()
            for part in response.iter_bytes():
                content += part
                if len(content) > MAX_ANSWER_BYTES:
                    raise _TooMuch
                if time.monotonic() > end:
                    raise httpx.ReadTimeout("the answer goes on and on")
        if response.is_success:
            return json.loads(content) if content else None
        try:
            answer = json.loads(content)
        except (ValueError, RecursionError):
            answer = content.decode(errors="replace")
        raise _Status(response.status_code, answer)

    @contextlib.contextmanager
    def _asking(self, what: str) -> Iterator[None]:
        try:
            yield
        except _Status as error:
            raise self._complaint(what, error.status, error.message) from None
        except _Redirected as error:
            where = shortened(self.shown(str(error).partition("?")[0]), 120) or "elsewhere"
            raise GrafanaRefused(
                f"{self.url} redirects to {where}, a login page or a proxy; name Grafana's own address "
                "with --grafana-url, with the https:// and the path it has, and give a token",
                302,
            ) from None
        except _TooMuch:
            raise GrafanaRefused(
                f"can't {what}: {self.url} sends more than {MAX_ANSWER_BYTES >> 20} MiB; is it Grafana?", 0
            ) from None
        except (json.JSONDecodeError, RecursionError, UnicodeDecodeError):
            raise GrafanaRefused(
                f"can't {what}: what {self.url} answers is not JSON; is there a proxy before Grafana?", 0
            ) from None
        except httpx.TimeoutException:
            raise self._silent() from None
        except (httpx.InvalidURL, httpx.UnsupportedProtocol, UnicodeError):
            raise UsageError(
                f"{self.url} is no URL of a Grafana; write it like http://grafana:3000"
            ) from None
        except (httpx.HTTPError, OSError) as error:
            reason = shortened(self.shown(_cause(error)), SHOWN)
            if "SSL" in reason or "certificate" in reason.lower():
                raise NoGrafana(
                    f"{self.url}: TLS fails ({reason}); where its certificate is signed by your own "
                    "authority, name that authority's file in SSL_CERT_FILE"
                ) from None
            raise NoGrafana(
                f"no Grafana at {self.url} ({reason}); start it or correct --grafana-url"
            ) from None

    def _silent(self) -> NoGrafana:
        return NoGrafana(
            f"Grafana at {self.url} does not answer within {self._timeout_s:g} s; see its log, or give it "
            "more time with --timeout"
        )

    def _other(self, why: str) -> NoGrafana:
        return NoGrafana(
            f"what answers at {self.url} is no Grafana ({why}); correct --grafana-url, "
            "with the path that Grafana is served under"
        )

    def _complaint(self, what: str, status: int, response: object) -> GrafanaRefused:
        message = response.get("message") if isinstance(response, dict) else response
        said = self.shown(message) if isinstance(message, str) else ""
        said = "" if said.lstrip().startswith("<") else shortened(" ".join(said.split()), SHOWN)
        reason = f"{status}: {said}" if said else str(status)
        if status == 401:
            advice = (
                "the token or password is wrong or has expired; make a new service account token"
                if self._credential.given
                else "set GRAFANA_TOKEN, or GRAFANA_USER and GRAFANA_PASSWORD, or give --token-file"
            )
            return GrafanaRefused(f"{self.url} wants to know who asks ({reason}): {advice}", status)
        advice = {
            403: "its service account needs the role Admin, or Editor where the data sources exist already "
            "(--prometheus-uid, --jaeger-uid)",
            404: "it is not there any more, or this Grafana has it switched off; run this again",
            409: "something else has the same name or uid, or it is changed by other means; rename or remove "
            "that, then run this again",
            412: "it was changed by someone else meanwhile, or another has its name; run this again",
            429: "it is asked too often; run this again later",
        }.get(status, "see its log, then run this again" if status >= 500 else "")
        line = (
            f"Grafana refuses to {what} ({reason})" if status < 500 else f"Grafana fails to {what} ({reason})"
        )
        return GrafanaRefused(f"{line}: {advice}" if advice else line, status)

    def shown(self, text: object) -> str:
        """`text` of Grafana for a terminal: on one line, and without our secrets."""
        return printable(self._credential.scrubbed(str(text)))


def _parts(url: str) -> Any:
    """The parts of Grafana's address.

    Raises:
        UsageError: it is none, or carries what does not belong there.
    """
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good or not url.isascii() or not url.isprintable() or " " in url:
        # Not shown where it may hold a password.
        shown = "that" if "@" in url else repr(shortened(printable(url), 80))
        raise UsageError(f"{shown} is no URL of a Grafana; write it like http://grafana.example:3000")
    if parts.username is not None:
        raise UsageError(
            "leave user and password out of --grafana-url, where others can see them: set GRAFANA_USER and "
            "GRAFANA_PASSWORD, or GRAFANA_TOKEN"
        )
    if parts.query or parts.fragment:
        raise UsageError("--grafana-url is an address without ? and #")
    return parts


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _group_path(folder_uid: str, name: str) -> str:
    return f"v1/provisioning/folder/{folder_uid}/rule-groups/{quote(name, safe='')}"


def _cause(error: BaseException) -> str:
    """The reason, in the system's words."""
    text = str(error).removeprefix("[Errno ").partition("] ")[2] or str(error)
    if "getaddrinfo" in text or "name resolution" in text or "Name or service" in text:
        return "no such host"
    return text or "the connection ends without an answer"
