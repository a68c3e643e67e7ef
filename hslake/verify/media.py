"""A disk that fails under one object is not a machine that refuses everything."""

import errno

# What a filesystem says of blocks that it cannot give back: go on with the next object. Whatever
# else (no descriptors, no rights, no answer in time) is no word about the object: that aborts.
_BROKEN = (errno.EIO, errno.EBADMSG, errno.EUCLEAN)


def broken(error: BaseException) -> str | None:
    """What to tell of an object whose disk fails under it; None for any other error."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, OSError) and found.errno in _BROKEN:
            return (
                f"it cannot be read ({found.strerror}): its disk or the way there fails. Not "
                "hidden by --quarantine: copy what still reads and look at the disk"
            )
        found = found.__cause__
    return None
