"""GPU memory that the capture takes, and how SGLang is kept from taking it first."""

from hslake.spec import LakeSpec

TAKEN = "HSLAKE_GPU_MEMORY_TAKEN"  # set: serve has lowered --mem-fraction-static already
_SCRATCH = 64 << 20  # digests, token ids, rounding of the allocator


def capture_bytes(spec: LakeSpec, chunk_tokens: int) -> int:
    """Most bytes of GPU memory that capture takes beyond serving, with forwards of `chunk_tokens`.

    All streams of two forwards (one computed, one copied), and one stream laid out before its copy.
    """
    states = 2 * chunk_tokens * spec.bytes_per_token
    return states + chunk_tokens * spec.hidden_size * spec.itemsize + _SCRATCH
