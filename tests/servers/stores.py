"""Fixtures for object stores and web servers: real programs, or emulations of services that cannot be installed."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest

from tests.servers import fake_gcs_program, fake_hub_program
from tests.servers.server import BUCKET, HOST, INSTALLED, Server, answers, create, find_free_port, request, run_server

WEED = INSTALLED / "bin" / "weed"
ACCESS_KEY_ID, SECRET_ACCESS_KEY = "shardio-tests", "a-secret-of-the-tests"

IDENTITIES = [
    {
        "name": "tests",
        "credentials": [{"accessKey": ACCESS_KEY_ID, "secretKey": SECRET_ACCESS_KEY}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    },
    {"name": "anonymous", "actions": [f"Read:{BUCKET}"]},
]
"""Permissions like those of a public bucket: requests without a signature may read objects, but not list or write."""

PORTS = ("s3", "master", "volume", "filer", "admin")
PORT_OPTIONS = [f"{name}.port{kind}" for name in PORTS for kind in ("", ".grpc")]
WITHOUT_OTHERS = "-s3.port.iceberg=0 -s3.port.lance=0 -admin.ui=false -webdav=false -master.telemetry=false"
SOCKETS = Path("/tmp")  # SeaweedFS always uses this folder.


@contextlib.contextmanager
def run_seaweedfs(folder: Path) -> Iterator[Server]:
    data = folder / "data"
    data.mkdir(parents=True)
    identities = folder / "identities.json"
    identities.write_text(json.dumps({"identities": IDENTITIES}))
    ports = {option: find_free_port() for option in PORT_OPTIONS}
    url = f"http://{HOST}:{ports['s3.port']}"
    places = {"dir": data, "ip": HOST, "ip.bind": HOST, "bucket": BUCKET, "s3.config": identities, **ports}
    command: list[str | Path] = [WEED, "-logtostderr=true", "mini", *WITHOUT_OTHERS.split()]
    command += [f"-{option}={value}" for option, value in places.items()]
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


AZURITE = INSTALLED / "node" / "node_modules" / ".bin" / "azurite-blob"
MOTO = INSTALLED / "bin" / "moto_server"
NGINX = shutil.which("nginx", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"]))
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Azurite's account, whose key Microsoft has published:
https://learn.microsoft.com/azure/storage/common/storage-use-azurite."""


@contextlib.contextmanager
def run_azurite(folder: Path) -> Iterator[Server]:
    """Run Microsoft's emulator of Azure Blob Storage, which verifies signatures. It stores its data in ``folder``."""
    port = find_free_port()
    url = f"http://{HOST}:{port}/{ACCOUNT}"
    command: list[str | Path] = [AZURITE, "--blobHost", HOST, "--blobPort", str(port), "--location", "data"]
    command += ["--disableTelemetry", "--silent", "--skipApiVersionCheck"]
    options = {"endpoint": url, "account_name": ACCOUNT, "account_key": KEY, "allow_http": "true"}
    with run_server(command, folder, lambda: answers(url)):
        create("PUT", f"{url}/{BUCKET}?restype=container", sign_creation())
        yield Server(url=f"az://{BUCKET}", options=options, port=port)


def sign_creation() -> dict[str, str]:
    """Return the headers of a request that creates the container.

    https://learn.microsoft.com/rest/api/storageservices/authorize-with-shared-key
    """
    headers = {"x-ms-blob-public-access": "blob", "x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    text = "PUT" + 12 * "\n"  # Standard headers, all empty.
    text += "".join(f"{name}:{value}\n" for name, value in headers.items())
    text += f"/{ACCOUNT}/{ACCOUNT}/{BUCKET}\nrestype:container"
    signature = base64.b64encode(hmac.digest(base64.b64decode(KEY), text.encode(), "sha256")).decode()
    return {**headers, "Authorization": f"SharedKey {ACCOUNT}:{signature}", "Content-Length": "0"}


@contextlib.contextmanager
def run_fake_gcs(folder: Path) -> Iterator[Server]:
    """Run an emulation of Google Cloud Storage's XML interface, which obstore uses. Its data is in memory.

    The interface resembles that of S3, so moto serves it: :mod:`tests.servers.fake_gcs_program` translates headers.
    The existing emulators of Google Cloud Storage emulate its JSON interface. Through the XML interface,
    gcp-storage-emulator cannot list objects, and fake-gcs-server cannot write them.
    """
    port = find_free_port()
    url = f"http://{HOST}:{port}"
    account = {"gcs_base_url": url, "disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}
    options = {"service_account_key": json.dumps(account), "allow_http": "true"}
    command: list[str | Path] = [MOTO.with_name("python"), "-I", fake_gcs_program.__file__, HOST, str(port)]
    with run_server(command, folder, lambda: answers(f"{url}/moto-api/")):
        create("PUT", f"{url}/{BUCKET}")
        yield Server(url=f"gs://{BUCKET}", options=options, port=port)


NGINX_CONFIGURATION = """
daemon off;
master_process off;
pid {folder}/nginx.pid;
error_log stderr warn;
events {{ worker_connections 1024; }}
http {{
    access_log off;
    client_body_temp_path {folder}/bodies;
    proxy_temp_path {folder}/proxied;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    default_type application/octet-stream;
    sendfile on;
    keepalive_requests 1000000;
    server {{
        listen {host}:{port} backlog=1024;
        root {files};
    }}
}}
"""


@contextlib.contextmanager
def run_nginx(folder: Path, files: Path) -> Iterator[Server]:
    """Run nginx with its log and its temporary files in ``folder``. nginx serves the files in ``files``, which the
    caller writes."""
    port = find_free_port()
    url = f"http://{HOST}:{port}"
    configuration = folder / "nginx.conf"
    configuration.write_text(NGINX_CONFIGURATION.format(folder=folder, files=files, host=HOST, port=port))
    command: list[str | Path] = [NGINX or "nginx", "-e", "stderr", "-p", folder, "-c", configuration]
    with run_server(command, folder, lambda: answers(url)):
        yield Server(url=url, options={"allow_http": "true"}, port=port)


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeHub:
    """A running emulation of the Hugging Face Hub, whose server cannot be installed.

    It implements only what reading datasets requires. Tests run huggingface_hub against it.

    Attributes:
        server: The server.
        folder: The folder of its repositories.
        storage_port: The port of its server for large files.
    """

    server: Server
    folder: Path
    storage_port: int

    def commit(
        self, name: str, files: Path, *, revision: str = "main", is_private: bool = False, is_gated: bool = False
    ) -> str:
        """Commit the files of a folder to a branch or a tag. Return the id of the commit.

        If ``is_private``, only certain users can see the repository. If ``is_gated``, only certain users can read the
        repository's files.
        """
        repository = self.folder / "org" / name
        refs = repository / "refs.json"
        digest = hashlib.sha1(usedforsecurity=False)
        for path in sorted(path for path in files.rglob("*") if path.is_file()):
            digest.update(f"{path.relative_to(files)}\0{path.stat().st_size}\0".encode() + path.read_bytes())
        commit = digest.hexdigest()
        shutil.copytree(files, repository / "commits" / commit, dirs_exist_ok=True)
        commits = json.loads(refs.read_text()) if refs.exists() else {}
        refs.write_text(json.dumps({**commits, revision: commit}))
        settings = {"is_private": is_private, "is_gated": is_gated}
        (repository / "settings.json").write_text(json.dumps(settings))
        return commit

    def redirect_to(self, host: str, port: int) -> None:
        """Make the Hub redirect requests for large files to a different address, such as that of a proxy."""
        (self.folder / "storage-address").write_text(f"http://{host}:{port}")


@contextlib.contextmanager
def run_fake_hub(folder: Path) -> Iterator[FakeHub]:
    hub_port, storage_port = find_free_port(), find_free_port()
    url = f"http://{HOST}:{hub_port}"
    repositories = folder / "repositories"
    repositories.mkdir(parents=True)
    command: list[str | Path] = [sys.executable, "-I", fake_hub_program.__file__, HOST, str(hub_port)]
    command += [str(storage_port), repositories]
    server = Server(url="hf://datasets/org", options={"endpoint": url}, port=hub_port)
    hub = FakeHub(server=server, folder=repositories, storage_port=storage_port)
    hub.redirect_to(HOST, storage_port)
    with run_server(command, folder, lambda: answers(f"{url}/api/datasets/org/none")):
        yield hub


MISSING = "{} is not installed: run bash tools/servers.sh"


@dataclass(frozen=True, slots=True, kw_only=True)
class WebServer:
    server: Server
    files: Path


def _fixture_of(program: Path, run: Callable[[Path], AbstractContextManager[Server]]) -> Any:
    """Return a fixture for a server with an empty bucket."""

    @pytest.fixture(scope="session")
    def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
        if not program.exists():
            pytest.skip(MISSING.format(program.name))
        with run(tmp_path_factory.mktemp("server")) as running:
            yield running

    return server


seaweedfs_server = _fixture_of(WEED, run_seaweedfs)
fake_gcs_server = _fixture_of(MOTO, run_fake_gcs)
azurite_server = _fixture_of(AZURITE, run_azurite)


@pytest.fixture(scope="session")
def nginx_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebServer]:
    if NGINX is None:
        pytest.skip(MISSING.format("nginx"))
    files = tmp_path_factory.mktemp("nginx-files")
    with run_nginx(tmp_path_factory.mktemp("nginx"), files) as server:
        yield WebServer(server=server, files=files)


@pytest.fixture(scope="session")
def fake_hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeHub]:
    with run_fake_hub(tmp_path_factory.mktemp("fake-hub")) as hub:
        yield hub
