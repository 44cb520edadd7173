"""Serve dataset repositories as the Hugging Face Hub does, and their large files as its storage servers do.

:mod:`tests.servers.stores` writes the repositories into a folder. The interface and the headers are those that
huggingface_hub expects. https://huggingface.co/docs/hub/api, https://huggingface.co/spaces/huggingface/openapi
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import sys
import threading
from collections.abc import Mapping
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs, quote, unquote, urlencode, urlsplit

PAGE = 5  # The number of entries in a page of a listing, which is 1000 on the Hub.
GIT_BYTES = 10 * 2**20  # Files of at least this size, and binary files, are stored with Git LFS.
READER = "hf_reader"  # The token of a user who may read all repositories.
STRANGER = "hf_stranger"  # The token of a user who may read public repositories.
_API = re.compile(r"/api/datasets/(?P<id>[^/]+/[^/]+)(?:/(?P<kind>revision|tree|paths-info)/(?P<rest>.*))?")
_RESOLVE = re.compile(r"/datasets/(?P<id>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)")
_CACHED = re.compile(r"/api/resolve-cache/datasets/(?P<id>[^/]+/[^/]+)/(?P<revision>[^/]+)/(?P<path>.+)")


class RefusedError(Exception):
    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


@lru_cache
def describe(path: Path, key: str) -> dict[str, Any]:
    if path.is_dir():
        return {"type": "directory", "oid": blob_id(key.encode()), "size": 0, "path": key}
    content = path.read_bytes()
    entry = {"type": "file", "oid": blob_id(content), "size": len(content), "path": key}
    if len(content) >= GIT_BYTES or b"\0" in content:
        digest = hashlib.sha256(content).hexdigest()
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{digest}\nsize {len(content)}\n".encode()
        entry["oid"] = blob_id(pointer)
        entry["lfs"] = {"oid": digest, "size": len(content), "pointerSize": len(pointer)}
    return entry


def blob_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = 2**16

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # http.server's name
        pass

    def send(self, status: int, headers: Mapping[str, str], body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_file(self, path: Path, e_tag: str, **others: str) -> None:
        content = path.read_bytes()
        headers = {"ETag": e_tag, "Last-Modified": "Mon, 01 Jan 2024 00:00:00 GMT", **others}
        if self.headers.get("If-Match") not in (None, e_tag):
            self.send(412, {})
        elif wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start, stop = int(wanted[1]), min(int(wanted[2] or len(content)) + 1, len(content))
            if start >= len(content):
                self.send(416, {"Content-Range": f"bytes */{len(content)}"})
            else:
                headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
                self.send(206, headers, content[start:stop])
        else:
            self.send(200, headers, content)


class StorageHandler(Handler):
    """The server for large files. It serves signed URLs, and its ETags differ from those of the Hub."""

    secret = b"secret"
    paths: ClassVar[dict[str, Path]] = {}

    @classmethod
    def sign(cls, digest: str, path: Path) -> str:
        cls.paths[digest] = path
        signature = hmac.digest(cls.secret, digest.encode(), "sha256").hex()
        return f"/xorbs/{digest}?" + urlencode({"X-Amz-Expires": "3600", "X-Amz-Signature": signature})

    def do_GET(self) -> None:
        digest = urlsplit(self.path).path.rpartition("/")[2]
        if "Authorization" in self.headers or self.path != self.sign(digest, self.paths[digest]):
            self.send(403, {}, b"<Error><Code>AccessDenied</Code></Error>")
        else:
            self.send_file(self.paths[digest], f'"storage-{digest[:8]}"')

    do_HEAD = do_GET  # noqa: N815


class HubHandler(Handler):
    folder: ClassVar[Path]

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        try:
            if found := _CACHED.fullmatch(parts.path):
                path, entry = self.find_file(found)
                self.send_file(path, f'"{entry["oid"]}"', **{"X-Repo-Commit": found["revision"]})
            elif found := _RESOLVE.fullmatch(parts.path):
                self.resolve(found)
            elif found := _API.fullmatch(parts.path):
                self.describe(found, {name: values[0] for name, values in parse_qs(parts.query).items()}, body)
            else:
                raise RefusedError(404, "", "Not Found")
        except RefusedError as error:
            headers = {"X-Error-Code": error.code, "X-Error-Message": error.message, "Content-Type": "application/json"}
            self.send(error.status, headers, json.dumps({"error": error.message}).encode())

    do_HEAD = do_POST = do_GET  # noqa: N815

    def describe(self, found: re.Match[str], query: dict[str, str], body: str) -> None:
        repository = self.enter(found["id"])
        revision, _, path = (found["rest"] or "main").partition("/")
        commit = self.find_commit(repository, unquote(revision))
        root, key = repository / "commits" / commit, unquote(path)
        headers = {"Content-Type": "application/json"}
        answer: object
        match found["kind"]:
            case "tree":
                answer, following = list_page(root, key, query)
                if following is not None:
                    url = f"http://{self.headers['Host']}{urlsplit(self.path).path}?{urlencode(following)}"
                    headers["Link"] = f'<{url}>; rel="next"'
            case "paths-info":
                keys = [name.rstrip("/") for name in parse_qs(body)["paths"]]
                answer = [describe(root / name, name) for name in keys if name and (root / name).exists()]
            case _:
                answer = {"id": found["id"], "sha": commit, "private": False}
        self.send(200, headers, json.dumps(answer).encode())

    def resolve(self, found: re.Match[str]) -> None:
        path, entry = self.find_file(found)
        commit = path.relative_to(self.folder / found["id"] / "commits").parts[0]
        if lfs := entry.get("lfs"):
            address = (self.folder / "storage-address").read_text()
            location = address + StorageHandler.sign(lfs["oid"], path)
            linked = {"X-Linked-Size": str(lfs["size"]), "X-Linked-ETag": f'"{lfs["oid"]}"'}
            self.send(302, {"Location": location, "X-Repo-Commit": commit, **linked})
        else:
            location = f"/api/resolve-cache/datasets/{found['id']}/{commit}/{found['path']}"
            self.send(307, {"Location": location, "X-Repo-Commit": commit, "ETag": f'"{entry["oid"]}"'})

    def find_file(self, found: re.Match[str]) -> tuple[Path, dict[str, Any]]:
        repository = self.enter(found["id"], needs_content=True)
        key = unquote(found["path"])
        path = repository / "commits" / self.find_commit(repository, unquote(found["revision"])) / key
        if not path.is_file():
            raise RefusedError(404, "EntryNotFound", "Entry not found")
        return path, describe(path, key)

    def enter(self, name: str, *, needs_content: bool = False) -> Path:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token not in ("", READER, STRANGER):
            raise RefusedError(401, "", "Invalid credentials in Authorization header")
        settings = self.folder / name / "settings.json"
        found = json.loads(settings.read_text()) if settings.exists() else {"is_private": True}
        if not settings.exists() or (found["is_private"] and token != READER):
            raise RefusedError(404 if token else 401, "RepoNotFound", "Repository not found")
        if found["is_gated"] and needs_content and token != READER:
            raise RefusedError(403 if token else 401, "GatedRepo", f"Access to dataset {name} is restricted")
        return settings.parent

    def find_commit(self, repository: Path, revision: str) -> str:
        commits = json.loads((repository / "refs.json").read_text())
        commit: str = commits.get(revision, revision)
        if not re.fullmatch(r"[0-9a-f]{40}", commit) or not (repository / "commits" / commit).is_dir():
            raise RefusedError(404, "RevisionNotFound", f"Invalid rev id: {quote(revision)}")
        return commit


def list_page(root: Path, key: str, query: dict[str, str]) -> tuple[list[dict[str, Any]], dict[str, str] | None]:
    folder = root / key
    if not folder.exists():
        raise RefusedError(404, "EntryNotFound", f"{quote(key)} does not exist")
    found = (
        [folder]
        if folder.is_file()
        else folder.rglob("*")
        if query["recursive"].lower() == "true"
        else folder.iterdir()
    )
    paths = sorted(found)
    start = int(query.get("cursor", "0"))
    page = [describe(path, path.relative_to(root).as_posix()) for path in paths[start : start + PAGE]]
    return page, {**query, "cursor": str(start + PAGE)} if start + PAGE < len(paths) else None


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


def main(host: str, hub_port: int, storage_port: int, folder: Path) -> None:
    HubHandler.folder = folder
    storage = Server((host, storage_port), StorageHandler)
    threading.Thread(target=storage.serve_forever, daemon=True).start()
    Server((host, hub_port), HubHandler).serve_forever()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
