"""Azurite: Microsoft's emulator of Azure Blob Storage, which verifies signatures."""

from __future__ import annotations

import base64
import contextlib
import hmac
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path

from tests.servers.server import BUCKET, HOST, INSTALLED, Server, answers, create, find_free_port, run_server

PROGRAM = INSTALLED / "node" / "node_modules" / ".bin" / "azurite-blob"

ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The emulator's account, whose key Microsoft has published:
https://learn.microsoft.com/azure/storage/common/storage-use-azurite."""


def is_installed() -> bool:
    return PROGRAM.exists()


@contextlib.contextmanager
def run_azurite(folder: Path) -> Iterator[Server]:
    """Run Azurite with its data below a folder. Requests without a signature may read objects."""
    port = find_free_port()
    url = f"http://{HOST}:{port}/{ACCOUNT}"
    command: list[str | Path] = [PROGRAM, "--blobHost", HOST, "--blobPort", str(port), "--location", "data"]
    command += ["--disableTelemetry", "--silent", "--skipApiVersionCheck"]
    options = {"endpoint": url, "account_name": ACCOUNT, "account_key": KEY, "allow_http": "true"}
    with run_server(command, folder, lambda: answers(url)):
        create("PUT", f"{url}/{BUCKET}?restype=container", sign_creation())
        yield Server(url=f"az://{BUCKET}", options=options, port=port)


def sign_creation() -> dict[str, str]:
    """Return the headers of a request that creates the container.

    https://learn.microsoft.com/rest/api/storageservices/authorize-with-shared-key
    """
    headers = {
        "x-ms-blob-public-access": "blob",
        "x-ms-date": formatdate(usegmt=True),
        "x-ms-version": "2021-08-06",
    }
    text = "PUT" + 12 * "\n"  # Standard headers, all empty.
    text += "".join(f"{name}:{value}\n" for name, value in headers.items())
    text += f"/{ACCOUNT}/{ACCOUNT}/{BUCKET}\nrestype:container"
    signature = base64.b64encode(hmac.digest(base64.b64decode(KEY), text.encode(), "sha256")).decode()
    return {**headers, "Authorization": f"SharedKey {ACCOUNT}:{signature}", "Content-Length": "0"}
