"""The Huffman table that needs the fewest bits for given counts of symbols."""

from __future__ import annotations

from shardio.images.jpeg.standard import MAX_CODE_LENGTH
from shardio.images.kernel.compiled.memory import kernel_function

_SYMBOL_BITS = 9
"""An element of the heap is a tree: the sum of its symbols' counts, and in its low bits 256 minus a symbol of it, so
that of equally frequent trees that of the last symbol is the least. The symbol is the one the tree is named after."""

_UNUSED = 256
"""A symbol for the code of all ones, which no other symbol may get."""


@kernel_function
def make_best_table(work):
    """Follow figures K.1 to K.4: find code sizes, count codes by size, limit them to 16 bits, sort symbols by size."""
    work.code_sizes[:] = 0
    work.others[:] = -1
    _find_code_sizes(work)
    work.num_codes[:] = 0
    for i in range(_UNUSED + 1):
        work.num_codes[work.code_sizes[i]] += 1
    work.num_codes[0] = 0
    _sort_symbols(work)
    _limit_lengths(work.num_codes)


@kernel_function
def _find_code_sizes(work):
    """Join the two least frequent trees until one is left, and count for each symbol how often its tree was joined."""
    heap, code_sizes, others = work.heap, work.code_sizes, work.others
    heap[0] = 1 << _SYMBOL_BITS  # That of the unused symbol, which counts as if it occurred once.
    num_trees = 1
    for i in range(_UNUSED):
        if work.counts[i] > 0:
            heap[num_trees] = work.counts[i] << _SYMBOL_BITS | (_UNUSED - i)
            num_trees += 1
    for place in range(num_trees // 2 - 1, -1, -1):
        _sift_down(heap, num_trees, place)
    while num_trees > 1:
        least = heap[0]
        num_trees -= 1
        heap[0] = heap[num_trees]
        _sift_down(heap, num_trees, 0)
        first = _UNUSED - (least & ((1 << _SYMBOL_BITS) - 1))
        second = _UNUSED - (heap[0] & ((1 << _SYMBOL_BITS) - 1))
        heap[0] = least + (heap[0] >> _SYMBOL_BITS << _SYMBOL_BITS)
        _sift_down(heap, num_trees, 0)
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
def _sift_down(heap, num_trees, place):
    """Move a tree down in the heap until none below it is less frequent."""
    tree = heap[place]
    while True:
        below = 2 * place + 1
        if below >= num_trees:
            break
        if below + 1 < num_trees and heap[below + 1] < heap[below]:
            below += 1
        if tree <= heap[below]:
            break
        heap[place] = heap[below]
        place = below
    heap[place] = tree


@kernel_function
def _sort_symbols(work):
    """Sort the symbols by the sizes of their codes, before these are limited."""
    place = 0
    for length in range(1, len(work.num_codes)):
        work.places[length] = place
        place += work.num_codes[length] - (length == work.code_sizes[_UNUSED])
    for i in range(_UNUSED):
        length = work.code_sizes[i]
        if length:
            work.symbols[work.places[length]] = i
            work.places[length] += 1
    work.num_symbols = place


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
