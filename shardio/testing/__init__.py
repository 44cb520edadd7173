"""Conformance tests of shardio's interfaces.

Users pass their own transforms as ``transform=``, and their own decoders of fields as ``decoders=``. An implementation
of another interface also needs a line in a table in shardio's source code; the interface's documentation names the
table.

Each module holds one class of pytest tests. Subclass it in your own tests and override its fixtures:

- ``executor``: the part of a loader that makes its batches.
- ``pack_source``: a kind of dataset that can be packed.
- ``store``: a storage backend.
- ``field_codec``: a decoder of a field.
- ``image_format``: a format of images.
- ``remainder_policy``: the treatment of an epoch's last samples.
- ``transform``: a transform of images.
"""
