"""Pages as the standard library's parser reads them."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = {"meta", "img", "br", "link"}


class Page(HTMLParser):
    """The elements and the text of a page.

    Attributes:
        elements: The name and the attributes of each element, in order.
        text: The visible text.
    """

    def __init__(self, content: bytes) -> None:
        super().__init__()
        self.elements = list[tuple[str, dict[str, str | None]]]()
        self.text = ""
        self._open = list[str]()
        self.feed(content.decode("utf-8"))
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] not in ("script", "style"):
            self.text += data + "\n"

    def find(self, name: str) -> list[dict[str, str | None]]:
        """Return the attributes of all elements with a name."""
        return [attributes for found, attributes in self.elements if found == name]

    def addresses(self) -> set[str]:
        """Return the schemes of everything that a browser would load."""
        values = [attributes.get(name) for _, attributes in self.elements for name in ("src", "href", "srcset", "data")]
        return {value.partition(":")[0] for value in values if value}
