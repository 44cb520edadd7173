"""Requests to the interface of the Hugging Face Hub, with the sessions, headers and errors of huggingface_hub.

Its HfApi.list_repo_tree is not used, because it has no time-out, and repeats requests by itself.
https://huggingface.co/docs/hub/api
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qsl, urlsplit

from shardio.errors import LocationError
from shardio.storage.remote.failures import FailedRequestError, RequestFailure, redact
from shardio.storage.remote.options import RemoteOptions

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError

Result = TypeVar("Result")

OPTIONS = {"endpoint", "token"}
"""The options of a repository."""

_TOKEN = re.compile(r"Bearer [!-~]+")

FLAGS = {"true": None, "false": False}
"""What the token can be instead of a text, as for huggingface_hub: the user's own, or none."""


class HubAnswer:
    """The Hub's answer to a request.

    Args:
        response: As the HTTP library that huggingface_hub uses returns it: requests, httpx or httpx2, which agree here.
    """

    def __init__(self, response: Any) -> None:
        self._response = response

    def read(self, read: Callable[[Any], Result]) -> Result:
        """Return what a function finds in the JSON of the answer.

        Raises:
            FailedRequestError: If it does not find what it expects.
        """
        try:
            return read(self._response.json())
        except (ValueError, KeyError, TypeError) as error:  # It was damaged on the way, or comes from another server.
            cause = f"the Hub's answer has an unexpected form ({type(error).__name__}). Check the endpoint"
            raise FailedRequestError(RequestFailure(kind="transient", cause=cause)) from None

    @property
    def next_page(self) -> Mapping[str, str] | None:
        """The parameters of the request for the next page; None after the last one."""
        # Only the parameters are used, because the token must not be sent to another server.
        following = self._response.links.get("next", {}).get("url")
        return dict(parse_qsl(urlsplit(following).query)) if following else None


class HubRequests:
    """Requests about one dataset repository. Threads share it.

    Args:
        root: The root of the store, for messages.
        repository: The repository: ``user/repository``.
        options: The settings.

    Raises:
        LocationError: If huggingface_hub is not installed, or an option is invalid.
    """

    def __init__(self, root: str, repository: str, options: RemoteOptions) -> None:
        try:
            from huggingface_hub import constants
        except ImportError as error:
            raise LocationError(
                f"{root} is read by the package huggingface_hub ({error}): pip install 'shardio-loader[hf]'"
            ) from error
        config = dict(options.config)
        self.root = root
        self.endpoint = _check_endpoint(config.get("endpoint") or constants.ENDPOINT)
        self._repository = repository
        token = config.get("token", "true")
        self._token = token.lower() if token.lower() in FLAGS else token
        self._timeout_s = options.timeout_s

    @property
    def headers(self) -> dict[str, str]:
        """The headers of requests, with the token, which is read again each time because it may be renewed.

        Raises:
            LocationError: If the token is invalid.
        """
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # It is public.

        headers = build_hf_headers(token=FLAGS.get(self._token, self._token), library_name="shardio")
        if not _TOKEN.fullmatch(headers.get("authorization", "Bearer none")):
            # Libraries would show it in their errors.
            raise LocationError(
                "the token of the Hugging Face Hub (HF_TOKEN, the file of `hf auth login` or storage_options['token']) "
                "is invalid: it is empty, or has spaces, line ends or other characters than those of ASCII"
            )
        return headers

    def get(self, path: str, parameters: Mapping[str, str]) -> HubAnswer:
        """Request something about the repository.

        Raises:
            EntryNotFoundError: If the commit has no such folder.
            LocationError: If the repository or the revision does not exist.
            FailedRequestError: If the request fails otherwise.
        """
        from huggingface_hub import errors
        from huggingface_hub.utils import (  # type: ignore[attr-defined]  # They are public.
            get_session,
            hf_raise_for_status,
        )

        url = f"{self.endpoint}/api/datasets/{self._repository}/{path}"
        try:
            response = get_session().get(url, params=dict(parameters), headers=self.headers, timeout=self._timeout_s)
            hf_raise_for_status(response)
        except errors.EntryNotFoundError:
            raise
        except errors.OfflineModeIsEnabled:
            cause = "huggingface_hub is in offline mode (HF_HUB_OFFLINE)"
            raise FailedRequestError(RequestFailure(kind="permanent", cause=cause)) from None
        except errors.HfHubHTTPError as error:
            raise FailedRequestError(self._explain(error)) from None
        # The errors of the HTTP library, which depends on huggingface_hub's version.
        except (errors.HTTPError, OSError) as error:  # type: ignore[attr-defined]  # It is imported there.
            cause = redact(str(error).partition("\n")[0]) or type(error).__name__
            is_reached = "Connect" not in type(error).__name__
            raise FailedRequestError(RequestFailure(kind="transient", cause=cause, reached=is_reached)) from None
        return HubAnswer(response)

    def explain_refusal(self, answer: str) -> str:
        """Return why the Hub may have given an answer such as 401, 403 or 404."""
        return (
            f"{answer}. The repository {self._repository} does not exist, or it is private or gated and "
            f"the token, if there is one, gives no access. See {self.endpoint}/datasets/{self._repository}, and run "
            "`hf auth login` or set HF_TOKEN"
        )

    def _explain(self, error: HfHubHTTPError) -> RequestFailure:
        """Return what an answer means that is an error.

        Raises:
            LocationError: If the repository or the revision does not exist.
        """
        from huggingface_hub.errors import RevisionNotFoundError

        status = int(error.response.status_code)
        answer = f"the Hub answered {status}" + (f" ({error.server_message})" if error.server_message else "")
        if isinstance(error, RevisionNotFoundError):
            raise LocationError(
                f"{self.root}: the repository has no such revision. Name a branch, a tag or a commit"
            ) from None
        if status == 404:
            # Not as a missing file, which may be optional.
            raise LocationError(f"cannot read {self.root}: {self.explain_refusal(answer)}") from None
        if status in (401, 403):
            return RequestFailure(kind="denied", cause=self.explain_refusal(answer))
        is_transient = status >= 500 or status in (408, 425, 429)
        return RequestFailure(kind="transient" if is_transient else "permanent", cause=answer)


def _check_endpoint(endpoint: str) -> str:
    if not endpoint.startswith(("https://", "http://")) or set("?#@") & set(endpoint):
        raise LocationError(
            "the endpoint of the Hugging Face Hub (HF_ENDPOINT or storage_options['endpoint']) must be a URL such as "
            "https://huggingface.co, without a query, a user name or a password"
        )
    return endpoint.rstrip("/")
