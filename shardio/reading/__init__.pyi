from .read_ahead import (
    FileReader as FileReader,
    JoinedReader as JoinedReader,
    LabeledFile as LabeledFile,
    LocatedSample as LocatedSample,
    Reader as Reader,
    RemoteFiles as RemoteFiles,
    RemoteParts as RemoteParts,
    RemoteSamples as RemoteSamples,
    find_remote_shards as find_remote_shards,
    read_batches_ahead as read_batches_ahead,
    read_nothing_ahead as read_nothing_ahead,
    read_windows_ahead as read_windows_ahead,
)
from .reader import (
    KeyedShards as KeyedShards,
    SampleReader as SampleReader,
    StoredSamples as StoredSamples,
    Verify as Verify,
    open as open,  # noqa: A004  # As in tarfile and PIL.Image.
)
