"""Conformance tests of shardio's interfaces.

Users pass their own transforms as ``transform=``, and their own decoders of fields as ``decoders=``. An implementation
of any other interface also needs a line in a table in shardio's source code; the interface's documentation names the
table.

Each class holds the pytest tests of one interface. Subclass it in your own tests and override its fixtures:

- ``executor.ExecutorTests``: the part of a loader that makes its batches.
- ``pack_source.PackSourceTests``: a kind of dataset that can be packed.
- ``store.StoreTests``: a storage backend.
- ``image_format.ImageFormatTests``: a format of images.
- ``samples.FieldCodecTests``: a decoder of a field.
- ``samples.TransformTests``: a transform of images.
- ``samples.RemainderPolicyTests``: the treatment of an epoch's last samples.
"""
