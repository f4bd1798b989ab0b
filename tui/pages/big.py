"""Figures three rows high, to be read from across the room, of half blocks: every font has those."""

from __future__ import annotations

ROWS = 3

_GLYPHS = {
    "0": ("###", "# #", "# #", "# #", "###"),
    "1": (" # ", "## ", " # ", " # ", "###"),
    "2": ("###", "  #", "###", "#  ", "###"),
    "3": ("###", "  #", "###", "  #", "###"),
    "4": ("# #", "# #", "###", "  #", "  #"),
    "5": ("###", "#  ", "###", "  #", "###"),
    "6": ("###", "#  ", "###", "# #", "###"),
    "7": ("###", "  #", "  #", "  #", "  #"),
    "8": ("###", "# #", "###", "# #", "###"),
    "9": ("###", "# #", "###", "  #", "###"),
    "%": ("# #", "  #", " # ", "#  ", "# #"),
    "-": ("   ", "   ", "###", "   ", "   "),
    "<": ("  #", " # ", "#  ", " # ", "  #"),
    ".": (" ", " ", " ", " ", "#"),
    "?": ("###", "  #", " ##", "   ", " # "),
}
_BLOCK = {(" ", " "): " ", ("#", " "): "▀", (" ", "#"): "▄", ("#", "#"): "█"}


def big(text: str) -> list[str]:
    """`text` (digits and . % - < ?) in `ROWS` rows of equal length; other characters are drawn as ?."""
    glyphs = [_GLYPHS.get(character, _GLYPHS["?"]) for character in text]
    pixels = [" ".join(glyph[row] for glyph in glyphs) for row in range(5)]
    pixels.append(" " * len(pixels[0]))
    return [
        "".join(_BLOCK[pair] for pair in zip(pixels[row], pixels[row + 1], strict=True)) for row in (0, 2, 4)
    ]
