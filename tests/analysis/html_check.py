"""Reads a report's HTML as a strict reader would: what is wrong with it, its tables, its text."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = ("meta", "link", "br", "img", "rect", "line", "path")
WORDS_OF_OTHERS = ("http:", "https:", "//", "javascript:", "url(http", "@import", "file:")


class Document(HTMLParser):
    """After `feed` and `close`: `wrong` is empty for a page as it should be."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.wrong: list[str] = []
        self.tables: dict[str, list[list[str]]] = {}
        """Caption to rows, the head first."""
        self.text = ""
        self.tags: dict[str, int] = {}
        self._open: list[str] = []
        self._ids: set[str] = set()
        self._references: set[str] = set()
        self._level = 0
        self._titled: list[bool] = []
        self._caption = ""
        self._rows: list[list[str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.tags[tag] = self.tags.get(tag, 0) + 1
        if len(given) < len(attrs):
            self.wrong.append(f"an attribute twice in {tag}")
        if tag in ("script", "iframe", "object", "embed", "form", "base", "img"):
            self.wrong.append(f"a {tag}")
        for name, value in given.items():
            if name.startswith("on") or name in ("src", "srcset", "action", "data", "poster"):
                self.wrong.append(f"{tag} {name}")
            if any(word in value for word in WORDS_OF_OTHERS):
                self.wrong.append(f"{tag} {name}={value}")
            if name == "href" and not value.startswith("#") and value != "data:,":
                self.wrong.append(f"{tag} leads to {value}")
        if name := given.get("id"):
            if name in self._ids or " " in name:
                self.wrong.append(f"id {name}")
            self._ids.add(name)
        for reference in ("aria-labelledby", "href"):
            self._references |= {
                one.lstrip("#") for one in given.get(reference, "").split() if one != "data:,"
            }
        if tag in ("h1", "h2", "h3", "h4", "h5", "h6"):
            level = int(tag[1])
            if level > self._level + 1 or (level == 1 and self._level):
                self.wrong.append(f"{tag} after h{self._level}")
            self._level = level
        if tag == "svg":
            self._titled.append(False)
            if given.get("role") != "img" and given.get("aria-hidden") != "true":
                self.wrong.append("an svg that is neither an image nor hidden")
        if tag == "title" and self._titled:
            self._titled[-1] = True
        if tag == "table":
            self._caption, self._rows = "", []
        if tag == "tr":
            self._rows.append([])
        if tag in ("td", "th"):
            self._rows[-1].append("")
            if tag == "th" and given.get("scope") not in ("row", "col"):
                self.wrong.append("a th without scope")
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self._open or self._open[-1] != tag:
            self.wrong.append(f"</{tag}> where {self._open[-3:]} is open")
            return
        self._open.pop()
        if tag == "svg" and not self._titled.pop():
            self.wrong.append("an svg without title")
        if tag == "table":
            if not self._caption or self._caption in self.tables:
                self.wrong.append(f"caption {self._caption!r}")
            self.tables[self._caption] = self._rows

    def handle_data(self, data: str) -> None:
        inside = self._open[-1] if self._open else ""
        if inside == "caption":
            self._caption += data
        elif inside in ("td", "th"):
            self._rows[-1][-1] += data
        if inside not in ("style", "title"):
            self.text += data

    def close(self) -> None:
        super().close()
        self.wrong += [f"{tag} is never closed" for tag in self._open]
        self.wrong += [f"nothing has the id {name}" for name in self._references - self._ids]


def read(text: str) -> Document:
    document = Document()
    document.feed(text)
    document.close()
    return document
