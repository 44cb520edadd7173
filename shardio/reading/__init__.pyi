from .read_ahead import (
    RemoteFiles as RemoteFiles,
    RemoteParts as RemoteParts,
    RemoteSamples as RemoteSamples,
    find_remote_shards as find_remote_shards,
    read_batches_ahead as read_batches_ahead,
    read_nothing_ahead as read_nothing_ahead,
    read_windows_ahead as read_windows_ahead,
)
from .reader import (
    FileReader as FileReader,
    JoinedReader as JoinedReader,
    LabelledFile as LabelledFile,
    LocatedSample as LocatedSample,
    Reader as Reader,
    SampleReader as SampleReader,
    StoredSamples as StoredSamples,
    Verify as Verify,
)
