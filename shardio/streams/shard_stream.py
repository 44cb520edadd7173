"""The samples of one stream, which is opened again if it fails."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from types import TracebackType

from tenacity import Retrying, retry_if_exception, stop_after_attempt
from tenacity.wait import wait_random_exponential

from shardio.errors import FormatError, StateError, StoreError
from shardio.shards.streamed import IncompleteTarError, StreamedSample, StreamedTar
from shardio.storage import ReplacedError
from shardio.streams.opening import ByteStream, StreamFailureError, open_stream
from shardio.streams.sources import StreamSource

FIRST_WAIT_S = 0.1
"""The upper bound of the first wait before a stream is opened again. It doubles each time."""

MAX_WAIT_S = 20.0
"""The longest wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPlace:
    """A place in a stream: that after a number of samples.

    Attributes:
        num_samples: The number of samples.
        digest: The digest of the last one: see :class:`StreamedSample`.
    """

    num_samples: int = 0
    digest: int = 0


_BEGINNING = StreamPlace()


class ShardStream:
    """Reads the samples of a stream. A context manager closes it.

    If the stream fails, it is opened again, and the samples that were already returned are skipped. Each sample is thus
    returned exactly once. Streams of stored tars are not opened again, because stores repeat their requests themselves.

    Args:
        source: Where the stream comes from.
        fields: The fields whose contents are needed.
        start: Where to begin.
        retries: How often in a row the stream is opened again without yielding a further sample.
        timeout_s: How long to wait for bytes of a command, in seconds.

    Attributes:
        place: The place after the last sample that was returned.
    """

    def __init__(
        self,
        source: StreamSource,
        fields: Collection[str],
        start: StreamPlace = _BEGINNING,
        *,
        retries: int,
        timeout_s: float,
    ) -> None:
        self.place = start
        self._source, self._fields, self._start = source, fields, start
        self._retries, self._timeout_s = retries, timeout_s
        self._last_key: str | None = None
        self._stream: ByteStream | None = None
        self._tar: StreamedTar | None = None
        self._samples: Iterator[StreamedSample] = iter(())

    def next(self) -> StreamedSample | None:
        """Return the next sample, or None after the last one.

        Raises:
            StoreError: If the stream keeps failing.
            FormatError: If it is not a tar of samples, or keeps ending too early.
            ReplacedError: If it has other samples when it is opened again.
            StateError: If it has other samples than before the start.
            OSError: If a stored tar cannot be read.
        """
        try:
            return self._next()
        except (StreamFailureError, IncompleteTarError) as error:
            if not self._retries or not self._may_end(error):
                raise self._give_up(error, 1) from error
        retrying = Retrying(
            stop=stop_after_attempt(self._retries),
            wait=wait_random_exponential(multiplier=FIRST_WAIT_S, max=MAX_WAIT_S),
            retry=retry_if_exception(self._may_end),
            reraise=True,
        )
        try:
            sample: StreamedSample | None = retrying(self._next)
        except (StreamFailureError, IncompleteTarError) as error:
            raise self._give_up(error, 1 + int(retrying.statistics["attempt_number"])) from error
        return sample

    def _may_end(self, error: BaseException) -> bool:
        """Return whether opening the stream again may help."""
        if self._source.location is not None:
            return False
        return isinstance(error, IncompleteTarError) or (
            isinstance(error, StreamFailureError) and not error.is_permanent
        )

    def _next(self) -> StreamedSample | None:
        """Return the next sample. After an error, the next call opens the stream again."""
        try:
            if self._stream is None:
                self._open()
            sample = next(self._samples, None)
        except BaseException:  # Ctrl-C must not leave a command running either.
            self.close()
            raise
        if sample is None:
            self.close()
        else:
            self.place = StreamPlace(num_samples=self.place.num_samples + 1, digest=sample.digest)
            self._last_key = sample.key
        return sample

    def _open(self) -> None:
        """Open the stream at the place that was reached."""
        stream = self._stream = open_stream(self._source.name, self._source.location, self._timeout_s)
        self._tar = StreamedTar(self._source.shown, stream.read, self._fields)
        self._samples = self._tar.samples()
        num_samples, last = self.place.num_samples, None
        for last in itertools.islice(self._samples, num_samples):  # noqa: B007  # the last one
            num_samples -= 1
        if num_samples or (last is not None and last.digest != self.place.digest):
            raise self._other_samples()

    def _other_samples(self) -> FormatError | StateError:
        num_samples = self.place.num_samples
        if self.place == self._start:
            return StateError(
                f"{self._source} does not begin with the same {num_samples} samples as when the state was saved: "
                "restore the tar, or start a new run"
            )
        return ReplacedError(
            f"{self._source} failed and was opened again, but does not begin with the same {num_samples} samples as "
            "before: the tar was replaced, or the command's output varies. Make sure that it does not change during a "
            "run, and start the epoch again"
        )

    def _give_up(self, error: Exception, num_attempts: int) -> StoreError | FormatError:
        num_samples, num_bytes = self.place.num_samples, 0 if self._tar is None else self._tar.num_bytes
        after = f"after its first {num_samples} samples" if num_samples else "from its beginning"
        if self._last_key is not None:
            after += f", the last of them {self._last_key}"
        attempts = "" if self._source.location is not None else f", at attempt {num_attempts}"
        where = f"cannot read {self._source} {after} (near byte {num_bytes}{attempts}): {error}"
        if isinstance(error, IncompleteTarError):
            return FormatError(f"{where}. Download or create it again")
        return StoreError(f"{where}. Check the command, the network and the server, then resume from the last state")

    def close(self) -> None:
        """Close the stream, and end its command."""
        stream, self._stream = self._stream, None
        self._samples = iter(())
        if stream is not None:
            stream.close()

    def __enter__(self) -> ShardStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
