"""The Huffman table that needs the fewest bits for given counts of symbols."""

from __future__ import annotations

from shardio.images.jpeg.standard import MAX_CODE_LENGTH
from shardio.images.kernel.compiled.memory import kernel_function


@kernel_function
def make_best_table(work):
    """Follow figures K.1 to K.4: find code sizes, count codes by size, limit them to 16 bits, sort symbols by size."""
    work.frequencies[:256] = work.counts
    work.frequencies[256] = 1  # Then no symbol gets the code of all ones.
    work.code_sizes[:] = 0
    work.others[:] = -1
    _find_code_sizes(work.frequencies, work.code_sizes, work.others)
    work.num_codes[:] = 0
    for i in range(257):
        if work.code_sizes[i]:
            work.num_codes[work.code_sizes[i]] += 1
    _limit_lengths(work.num_codes)
    work.num_symbols = 0
    for length in range(1, 258):
        for i in range(256):
            if work.code_sizes[i] == length:
                work.symbols[work.num_symbols] = i
                work.num_symbols += 1


@kernel_function
def _find_code_sizes(frequencies, code_sizes, others):
    """Join the two least frequent trees until one is left, and count for each symbol how often its tree was joined."""
    while True:
        # Of equally frequent trees, take that of the last symbol.
        first = second = -1
        for i in range(257):
            if frequencies[i] > 0:
                if first < 0 or frequencies[i] <= frequencies[first]:
                    second = first
                    first = i
                elif second < 0 or frequencies[i] <= frequencies[second]:
                    second = i
        if second < 0:
            return
        frequencies[first] += frequencies[second]
        frequencies[second] = 0
        code_sizes[first] += 1
        while others[first] >= 0:
            first = others[first]
            code_sizes[first] += 1
        others[first] = second
        code_sizes[second] += 1
        while others[second] >= 0:
            second = others[second]
            code_sizes[second] += 1


@kernel_function
def _limit_lengths(num_codes):
    """Shorten codes of more than 16 bits, and remove the code that must stay unused."""
    for length in range(257, MAX_CODE_LENGTH, -1):
        while num_codes[length] > 0:
            shorter = length - 2
            while num_codes[shorter] == 0:
                shorter -= 1
            num_codes[length] -= 2
            num_codes[length - 1] += 1
            num_codes[shorter + 1] += 2
            num_codes[shorter] -= 1
    longest = MAX_CODE_LENGTH
    while num_codes[longest] == 0:
        longest -= 1
    num_codes[longest] -= 1
