"""An emulation of Google Cloud Storage's XML interface, which obstore uses.

The interface resembles that of S3, so moto serves it: :mod:`tests.servers.fake_gcs_program` translates headers. The
emulators of Google Cloud Storage that can be installed emulate its JSON interface: gcp-storage-emulator does not list
through the XML interface, and fake-gcs-server does not write.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from tests.servers import fake_gcs_program, moto
from tests.servers.server import BUCKET, HOST, Server, answers, create, find_free_port, run_server


def is_installed() -> bool:
    return moto.is_installed()


@contextlib.contextmanager
def run_fake_gcs(folder: Path) -> Iterator[Server]:
    """Run the emulation, which keeps its data in memory, with its log in a folder."""
    port = find_free_port()
    url = f"http://{HOST}:{port}"
    account = {
        "gcs_base_url": url,
        "disable_oauth": True,
        "client_email": "",
        "private_key": "",
        "private_key_id": "",
    }
    options = {"service_account_key": json.dumps(account), "allow_http": "true"}
    command: list[str | Path] = [moto.PYTHON, "-I", fake_gcs_program.__file__, HOST, str(port)]
    with run_server(command, folder, lambda: answers(f"{url}/moto-api/")):
        create("PUT", f"{url}/{BUCKET}")
        yield Server(url=f"gs://{BUCKET}", options=options, port=port)
