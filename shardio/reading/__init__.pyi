from .read_ahead import (
    SHARE_OF_CACHE as SHARE_OF_CACHE,
    SOURCE_FIELD as SOURCE_FIELD,
    FileReader as FileReader,
    JoinedReader as JoinedReader,
    LabeledFile as LabeledFile,
    LocatedSample as LocatedSample,
    Reader as Reader,
    RemoteFiles as RemoteFiles,
    RemoteParts as RemoteParts,
    RemoteSamples as RemoteSamples,
    SourceReader as SourceReader,
    estimate_traffic as estimate_traffic,
    find_remote_shards as find_remote_shards,
    read_batches_ahead as read_batches_ahead,
    read_epoch_ahead as read_epoch_ahead,
    read_nothing_ahead as read_nothing_ahead,
)
from .reader import (
    KeyedShards as KeyedShards,
    SampleReader as SampleReader,
    StoredSamples as StoredSamples,
    Verify as Verify,
    open as open,  # noqa: A004  # As in tarfile and PIL.Image.
)
