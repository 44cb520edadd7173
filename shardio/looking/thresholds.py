"""How many bits the perceptual hashes of images that look alike may differ in."""

DEFAULT_THRESHOLD = 4
"""The default. Of 285 photographs, at most 2 % are missed when resized or compressed again, and 8 % when 1 % is cut off
each side; different photographs differ in at least 14 bits."""

MAX_THRESHOLD = 16
"""The maximum. Different pictures have 32 differing bits on average."""
