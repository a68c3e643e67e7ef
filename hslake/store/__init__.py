"""Objects of a lake, on a local folder or an object store.

`core` is what everybody uses; `local`, `s3` and `anyfs` are the three kinds of places, `aws` the
settings of S3 for data and manifest alike, `trouble` what their errors mean to a caller.
"""

from hslake.store.core import Store, check_no_password, open_file, open_store
from hslake.store.local import sync_dir, sync_file
from hslake.store.trouble import NoBucket, is_client_error, refusal, remote_failure
from hslake.store.written import Piece, Written

__all__ = [
    "NoBucket",
    "Piece",
    "Store",
    "Written",
    "check_no_password",
    "is_client_error",
    "open_file",
    "open_store",
    "refusal",
    "remote_failure",
    "sync_dir",
    "sync_file",
]
