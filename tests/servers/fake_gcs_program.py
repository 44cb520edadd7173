"""Serve Google Cloud Storage's XML interface with moto's S3. Run this program in the environment of the servers.

https://cloud.google.com/storage/docs/xml-api/overview
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

AUTHORIZATION = "AWS4-HMAC-SHA256 Credential=any/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=any"
"""A signature that moto accepts, because moto rejects only requests without a signature."""


def translate(environ: dict[str, Any]) -> dict[str, Any]:
    """Translate a request from Google's interface to the S3 interface."""
    found: dict[str, Any] = {}
    for name, value in environ.items():
        if name == "HTTP_X_GOOG_IF_GENERATION_MATCH":
            if value == "0":  # This condition means that the object must not exist.
                found["HTTP_IF_NONE_MATCH"] = "*"
        else:
            found[name.replace("HTTP_X_GOOG_", "HTTP_X_AMZ_")] = value
    return {**found, "HTTP_AUTHORIZATION": AUTHORIZATION}


def main(host: str, port: int) -> None:
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import run_simple

    by_s3 = DomainDispatcherApplication(create_backend_app)

    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        answer: Iterable[bytes] = by_s3(translate(environ), start_response)
        return answer

    run_simple(host, port, application, threaded=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
