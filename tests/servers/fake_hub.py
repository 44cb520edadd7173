"""An emulation of the Hugging Face Hub, whose server cannot be installed.

It implements only what reading datasets requires. Tests run huggingface_hub against it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.servers import fake_hub_program
from tests.servers.server import HOST, Server, answers, find_free_port, run_server


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeHub:
    """A running emulation, the folder of its repositories, and the port of its server for large files."""

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
        """Make the Hub redirect requests for large files to another address, such as that of a proxy."""
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
