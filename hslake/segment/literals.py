"""Zstd frames of literals only: what both codecs of 16-bit values code a byte plane with.

Looking for matches in such a plane costs both ratio and speed.
"""

import threading

import zstandard

# A hash table of 64 entries and the longest minimum match: next to no match is found, so that a
# zstd block is Huffman-coded literals. The window must hold a whole block of 128 KiB.
_PARAMETERS = zstandard.ZstdCompressionParameters(
    window_log=17,
    chain_log=6,
    hash_log=6,
    search_log=1,
    min_match=7,
    target_length=0,
    strategy=zstandard.STRATEGY_FAST,
    write_content_size=True,
)
_local = threading.local()  # zstandard's contexts are not thread-safe


def compressor() -> zstandard.ZstdCompressor:
    """This thread's own."""
    if not hasattr(_local, "compressor"):
        _local.compressor = zstandard.ZstdCompressor(compression_params=_PARAMETERS)
    return _local.compressor
