"""Take screenshots of the built site in Chromium, check that its pages fit, and compare them with earlier ones.

    bash tools/site.sh
    pip install playwright
    python tools/site_screenshots.py site NEW [--before OLD] [--chromium /usr/bin/chromium]

Each page is opened 390 and 1,280 pixels wide, in light and dark mode. The program fails if a page is wider than the
window, an image or another file is missing, or a script fails. With ``--before``, the program prints which pages have
changed, and how much. Even if the program succeeds, look at the screenshots.
"""

from __future__ import annotations

import functools
import http.server
import itertools
import threading
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from PIL import Image

WIDTHS = (390, 1280)
SCHEMES = ("light", "dark")

OVERFLOW = "() => document.documentElement.scrollWidth - window.innerWidth"
MISSING_IMAGES = "() => [...document.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src)"


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        pass


def take_screenshots(site: Path, url: str, browser: Any, out: Path) -> Iterator[str]:
    """Take screenshots of all pages, and yield what is wrong with them."""
    paths, found = sorted(path.relative_to(site) for path in site.rglob("*.html")), list[str]()
    for scheme, width in itertools.product(SCHEMES, WIDTHS):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page = context.new_page()
        page.on("pageerror", lambda error: found.append(f"a script failed: {error}"))
        page.on("requestfailed", lambda request: found.append(f"{request.url} failed"))
        page.on("response", lambda answer: found.extend([f"{answer.url}: {answer.status}"] * (answer.status >= 400)))
        for path in paths:
            page.goto(f"{url}/{path}", wait_until="load")
            if (overflow := page.evaluate(OVERFLOW)) > 0:
                found.append(f"{overflow} pixels wider than the window")
            found.extend(f"the image {source} is missing" for source in page.evaluate(MISSING_IMAGES))
            file = out / scheme / str(width) / path.with_suffix(".png")
            file.parent.mkdir(parents=True, exist_ok=True)
            page.screenshot(path=file, full_page=True)
            yield from (f"{path}, {width} pixels, {scheme}: {each}" for each in found)
            found.clear()
        context.close()


def compare(before: Path, after: Path) -> float:
    """Return the fraction of pixels that differ between two screenshots, or 1 if the sizes differ."""
    images = [np.asarray(Image.open(path).convert("RGB")) for path in (before, after)]
    if images[0].shape != images[1].shape:
        return 1.0
    return float((images[0] != images[1]).any(axis=2).mean())


def main(
    site: Annotated[Path, typer.Argument(help="The built site.", exists=True)],
    out: Annotated[Path, typer.Argument(help="Where to write the screenshots.")],
    before: Annotated[Path | None, typer.Option(help="Screenshots of an earlier build.")] = None,
    chromium: Annotated[Path, typer.Option(help="The browser.")] = Path("/usr/bin/chromium"),
) -> None:
    """Take screenshots of the site."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=site))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with import_module("playwright.sync_api").sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        faults = list(take_screenshots(site, f"http://127.0.0.1:{server.server_port}", browser, out))
        browser.close()
    paths = sorted(path.relative_to(out) for path in out.rglob("*.png"))
    print(f"{len(paths)} screenshots in {out}")
    for path in paths:
        if before is None or not (before / path).exists():
            continue
        if (share := compare(before / path, out / path)) > 0:
            print(f"{path}: {share:.1%} of the pixels differ")
    if faults:
        raise SystemExit("\n".join(faults))


if __name__ == "__main__":
    typer.run(main)
