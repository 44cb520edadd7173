"""Slots: reused batch buffers in anonymous shared memory."""
