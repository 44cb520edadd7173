"""HTML pages, parsed with the standard library, and the laws that all pages obey."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

VOID = {"meta", "img", "br", "link", "wbr"}

MAX_WIDTH = 390
"""The width of a phone's screen in CSS pixels."""


class Page(HTMLParser):
    """The elements and the text of a page. Parsing a page checks that it obeys the laws.

    Attributes:
        elements: The name and the attributes of each element, in order.
        text: The visible text.
        texts: For each element name, the text directly inside each element with this name.
        rows: The cells of each row of each table.
        plots: The plots by title.
    """

    def __init__(self, content: bytes) -> None:
        super().__init__()
        self.elements = list[tuple[str, dict[str, str | None]]]()
        self.text = ""
        self.texts: dict[str, list[str]] = {}
        self.rows = list[list[str]]()
        self._open = list[tuple[str, int]]()
        source = content.decode("utf-8")
        self.feed(source)
        self.close()
        assert not self._open
        self._check_style()
        self.plots = {
            plot.findtext("title"): plot for plot in map(ET.fromstring, re.findall("<svg.*?</svg>", source, re.DOTALL))
        }
        self._check_plots()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag in VOID:
            return
        texts = self.texts.setdefault(tag, [])
        self._open.append((tag, len(texts)))
        texts.append("")
        if tag == "tr":
            self.rows.append([])

    def handle_endtag(self, tag: str) -> None:
        opened, place = self._open.pop()
        assert opened == tag
        if tag in ("td", "th"):
            self.rows[-1].append(self.texts[tag][place])

    def handle_data(self, data: str) -> None:
        if not self._open:
            return
        tag, place = self._open[-1]
        self.texts[tag][place] += data
        if tag not in ("script", "style"):
            self.text += data + "\n"

    def find(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for found, attributes in self.elements if found == name]

    def addresses(self) -> set[str]:
        """Return the schemes of all addresses that a browser would load."""
        values = [attributes.get(name) for _, attributes in self.elements for name in ("src", "href", "srcset", "data")]
        return {value.partition(":")[0] for value in values if value}

    def _check_style(self) -> None:
        """Check that the page fits narrow screens and loads no other files, and that text and plots use its colors."""
        assert self.texts["h1"] == self.texts["title"][:1]
        assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in self.find("meta")
        assert self.addresses() <= {"data"}
        (style,) = self.texts["style"]
        palettes = re.findall(r":root \{(.*?)\}", style)
        light, dark = (dict(re.findall(r"(--\w+): (#\w+);", palette)) for palette in palettes)
        assert light.keys() == dark.keys() == set(re.findall(r"var\((--\w+)\)", style))
        assert all(light[name] != dark[name] for name in light)
        assert not re.search(r"#[0-9a-f]{3}|rgb|hsl", re.sub(r":root \{.*?\}", "", style))
        widths = re.findall(r"(?<!max-)width: ?([\d.]+)(px|r?em)", style)
        assert all(float(number) * (1 if unit == "px" else 16) <= MAX_WIDTH for number, unit in widths)
        allowed = r"(width|height):[\d.]+%"
        styles = [attributes["style"] or "" for _, attributes in self.elements if "style" in attributes]
        assert all(re.fullmatch(allowed, each) for each in styles)
        assert not any(
            {"width", "height", "fill", "stroke", "color"} & attributes.keys() for _, attributes in self.elements
        )

    def _check_plots(self) -> None:
        """Check that each plot has a title and a description, and that all of its elements are inside it."""
        assert len(self.plots) == len(self.find("svg"))
        for title, plot in self.plots.items():
            assert (bool(title), bool(plot.findtext("desc")), plot.get("role")) == (True, True, "img")
            *_, width, height = map(float, plot.attrib["viewBox"].split())
            for name, largest in (("x", width), ("cx", width), ("x1", width), ("y", height), ("cy", height)):
                places = [float(each.attrib[name]) for each in plot.iter() if name in each.attrib]
                assert all(0 <= place <= largest for place in places)
