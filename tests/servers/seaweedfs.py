"""SeaweedFS: a real object store with S3's interface, which verifies signatures."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from tests.servers.server import BUCKET, HOST, INSTALLED, Server, find_free_port, request, run_server

PROGRAM = INSTALLED / "bin" / "weed"

ACCESS_KEY_ID, SECRET_ACCESS_KEY = "shardio-tests", "a-secret-of-the-tests"

IDENTITIES = [
    {
        "name": "tests",
        "credentials": [{"accessKey": ACCESS_KEY_ID, "secretKey": SECRET_ACCESS_KEY}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    },
    {"name": "anonymous", "actions": [f"Read:{BUCKET}"]},
]
"""Requests without a signature may read objects, as in a public bucket, but neither list nor write them."""

PORTS = ("s3", "master", "volume", "filer", "admin")
PORT_OPTIONS = [f"{name}.port{kind}" for name in PORTS for kind in ("", ".grpc")]

SOCKETS = Path("/tmp")  # The program has this folder built in.


def is_installed() -> bool:
    return PROGRAM.exists()


@contextlib.contextmanager
def run_seaweedfs(folder: Path) -> Iterator[Server]:
    data = folder / "data"
    data.mkdir(parents=True)
    identities = folder / "identities.json"
    identities.write_text(json.dumps({"identities": IDENTITIES}))
    ports = {option: find_free_port() for option in PORT_OPTIONS}
    url = f"http://{HOST}:{ports['s3.port']}"
    command: list[str | Path] = [
        PROGRAM,
        "-logtostderr=true",
        "mini",
        f"-dir={data}",
        f"-ip={HOST}",
        f"-ip.bind={HOST}",
        f"-bucket={BUCKET}",
        f"-s3.config={identities}",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        "-admin.ui=false",
        "-webdav=false",
        "-master.telemetry=false",
        *(f"-{option}={port}" for option, port in ports.items()),
    ]
    options = {
        "endpoint": url,
        "access_key_id": ACCESS_KEY_ID,
        "secret_access_key": SECRET_ACCESS_KEY,
        "region": "us-east-1",
        "virtual_hosted_style_request": "false",
        "allow_http": "true",
    }

    def has_bucket() -> bool:
        return b"<Code>NoSuchKey</Code>" in request("GET", f"{url}/{BUCKET}/missing")[1]

    try:
        with run_server(command, folder, has_bucket):
            yield Server(url=f"s3://{BUCKET}", options=options, port=ports["s3.port"])
    finally:
        for port in ports.values():
            for socket in SOCKETS.glob(f"seaweedfs-*-{port}.sock"):
                socket.unlink(missing_ok=True)
