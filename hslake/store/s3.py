"""A lake in a bucket, through obstore (Rust's object_store): benchmarks/s3_clients.py says why.

The client retries 5xx, slow-downs, resets and timeouts with jitter. What it cannot know is done
here: whether a write whose answer was lost, or which was refused because of an earlier try of its
own, is ours; and whether the store holds what was sent.
"""

import contextlib
import hashlib
import random
import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, TypeVar

from hslake.errors import HslakeError, InvalidInput, Unavailable
from hslake.store import aws, trouble
from hslake.store.written import Piece, Written

_T = TypeVar("_T")
_PART = 16 << 20  # bytes; smaller objects are sent whole
_PARTS = 9_000  # of at most 10,000 that S3 takes
_AT_ONCE = 4  # parts on their way, so 64 MB an object
_TRIES = 4  # of a write whose fate is unknown, each with all of the client's retries
_OUTSIDE = re.compile(r"status code: 416|non-partial response|Requested range .* is not satisfi")
# What the client does not repeat: a POST, and an answer that breaks off in a listing.
_CUT = re.compile(r"error sending request|response body error")
_MARK = "hslake-write"  # metadata: which call wrote an object


# Looser than any store: what no client can put into an address.
_BUCKET = re.compile(r"[A-Za-z0-9_.:-]+")


class S3Objects:
    """The objects below one `s3://bucket/prefix`. Safe from several threads."""

    def __init__(self, root: str) -> None:
        self.root = root
        bucket, _, prefix = root.partition("://")[2].partition("/")
        self.bucket, self.prefix = bucket, prefix.strip("/")
        if not _BUCKET.fullmatch(bucket):
            raise InvalidInput(
                f"{root if bucket else 's3://'}: found {bucket!r} for a bucket, expected "
                "a URL such as s3://bucket/lake"
            )

    @cached_property
    def settings(self) -> aws.Settings:
        """Found on first use: not when a lake is only named."""
        try:
            return aws.find_settings()
        except HslakeError as error:
            raise type(error)(f"{self.root}: {error}") from None

    @cached_property
    def _store(self) -> Any:
        try:
            from obstore.store import S3Store
        except ImportError as error:
            raise InvalidInput(f"{error}: S3 needs pip install 'hslake[s3]'") from None
        return S3Store(self.bucket, **aws.obstore_options(self.settings, self.bucket))

    @cached_property
    def filesystem(self) -> Any:
        """The same client with fsspec's face, for DuckDB and for single files."""
        from obstore.fsspec import FsspecStore

        options = aws.obstore_options(self.settings, self.bucket)
        face: Any = FsspecStore
        return face("s3", skip_instance_cache=True, **options)

    def delta_options(self) -> dict[str, str]:
        """Storage options of deltalake, with the keys that are valid now."""
        return aws.delta_options(self.settings, self.bucket)

    def _key(self, path: str) -> str:
        return f"{self.prefix}/{path}".strip("/")

    # Writing

    def put(self, path: str, pieces: Sequence[Piece]) -> Written:
        """Write an object, whole or in parts of which four are under way at a time."""
        size = sum(map(len, pieces))
        part, end = _part_size(size), time.monotonic() + self.settings.retry_s
        for left in reversed(range(_TRIES)):
            tags = _Tags(part)
            try:
                if size <= _PART:
                    self._put(path, tags.of(b"".join(pieces)))
                else:
                    self._put(path, tags.through(pieces), chunk_size=part, use_multipart=True)
                return tags.written()
            except Exception as error:
                # The upload may have ended with its answer lost: then it is not there any more.
                if self._holds(path, tags.of_all(pieces)):
                    return tags.written()
                ended = isinstance(error, FileNotFoundError) and "NoSuchUpload" in str(error)
                if not left or not (ended or self._cut(error, end)):
                    raise
                _pause(_TRIES - left)
        raise AssertionError("unreachable")

    def _put(self, path: str, data: bytes | Iterable[Any], **more: Any) -> None:
        import obstore

        more = {"use_multipart": False, "max_concurrency": _AT_ONCE, **more}
        obstore.put(self._store, self._key(path), data, **more)

    def _holds(self, path: str, written: Written) -> bool:
        """Whether the store surely holds what was sent; False when it cannot be asked."""
        with contextlib.suppress(Exception):
            return self.stat(path) == written
        return False

    def put_new(self, path: str, data: bytes) -> None:
        """Write an object unless there is one. Raises FileExistsError when there is.

        Each call marks its object, so that one of an earlier try, of which the answer was lost, is
        known as our own.
        """
        from obstore.exceptions import AlreadyExistsError, GenericError

        mark = uuid.uuid4().hex
        for left in reversed(range(_TRIES)):
            try:
                self._put(path, data, mode="create", attributes={_MARK: mark})
                return
            except (AlreadyExistsError, GenericError) as error:
                # The client does not repeat a conditional put that may have been carried out.
                found = self._mark(path)
                if found == mark:
                    return
                if found is not None:
                    raise FileExistsError(path) from None
                if not left:
                    raise
                # Not there: refused beside a rival that then failed, or lost on its way.
                del error
                _pause(_TRIES - left)

    def _mark(self, path: str) -> str | None:
        """Who wrote an object ("": not hslake); None when there is none."""
        import obstore

        try:
            found = obstore.get(self._store, self._key(path), options={"head": True})
        except FileNotFoundError:
            return None
        return str(found.attributes.get(_MARK, ""))

    def delete(self, path: str) -> None:
        """Delete an object."""
        import obstore

        with contextlib.suppress(FileNotFoundError):
            self._again(lambda: obstore.delete(self._store, self._key(path)))

    def _again(self, call: Callable[[], _T]) -> _T:
        """Repeat what may be done twice and what the client gives up at once when it is cut off."""
        end = time.monotonic() + self.settings.retry_s
        for left in reversed(range(_TRIES)):
            try:
                return call()
            except Exception as error:
                if not left or not self._cut(error, end):
                    raise
                _pause(_TRIES - left)
        raise AssertionError("unreachable")

    def _cut(self, error: Exception, end: float) -> bool:
        """Whether `error` is worth another try: not when one is all that the user wants, and not
        after `end` (monotonic)."""
        more = self.settings.retries > 0 and time.monotonic() < end
        return more and bool(_CUT.search(str(error)))

    # Reading

    def read(self, path: str) -> bytes:
        """A whole object. Raises Unavailable when answers are shorter than it is."""
        import obstore

        for left in reversed(range(_TRIES)):
            answer = obstore.get(self._store, self._key(path))
            data = answer.bytes().to_bytes()
            tag = (answer.meta["e_tag"] or "").strip('"')
            if hashlib.md5(data, usedforsecurity=False).hexdigest() == tag:
                return data
            # Sent in parts, or a tag that is no MD5; or not the whole of it.
            size = self.stat(path).size
            if len(data) == size:
                return data
            if left:
                _pause(_TRIES - left)
        raise self._short(path, len(data), size)

    def read_range(self, path: str, start: int, end: int | None, suffix: int | None) -> memoryview:
        """Bytes [start, end) of an object, or its last `suffix`; fewer where it ends earlier.

        Raises Unavailable when the answer is short of what the object has: such an answer was cut
        on its way, and must not be taken for damage.
        """
        import obstore

        found = self._range(path, start, end, suffix)
        if found is not None:
            return found
        # It is shorter than that, or the answer is: only its size can tell.
        for left in reversed(range(_TRIES)):
            size = self.stat(path).size
            first = max(0, size - suffix) if suffix is not None else min(start, size)
            last = size if end is None or suffix is not None else min(end, size)
            if first >= last:
                return memoryview(b"")
            data = memoryview(
                obstore.get_range(self._store, self._key(path), start=first, end=last)
            )
            if len(data) == last - first:
                return data
            if left:
                _pause(_TRIES - left)
        raise self._short(path, len(data), last - first)

    def _short(self, path: str, found: int, wanted: int) -> Unavailable:
        return Unavailable(
            f"{self.root}/{path}: the store answered {found} bytes of {wanted}, {_TRIES} times: "
            "look at it and what lies between, then try again"
        )

    def _range(
        self, path: str, start: int, end: int | None, suffix: int | None
    ) -> memoryview | None:
        """The range in one request; None when the answer is not as long as that."""
        import obstore
        from obstore.exceptions import GenericError

        try:
            if suffix:
                options: Any = {"range": {"suffix": suffix}}
                data = memoryview(
                    obstore.get(self._store, self._key(path), options=options).bytes()
                )
                return data if len(data) == suffix else None
            if end is not None and suffix is None and start < end:
                data = memoryview(
                    obstore.get_range(self._store, self._key(path), start=start, end=end)
                )
                return data if len(data) == end - start else None
        except GenericError as error:
            if not _OUTSIDE.search(str(error)):
                raise
        return None

    def stat(self, path: str) -> Written:
        """Size and tag of an object."""
        import obstore

        meta = obstore.head(self._store, self._key(path))
        return Written(meta["size"], (meta["e_tag"] or "").strip('"') or None)

    def sizes(self, path: str) -> dict[str, int]:
        """Bytes of the objects below `path`, by path."""
        import obstore

        cut = len(self.prefix) + 1 if self.prefix else 0
        prefix = self._key(path) or None
        pages = self._again(lambda: [*obstore.list(self._store, prefix)])
        return {meta["path"][cut:]: int(meta["size"]) for page in pages for meta in page}

    def tag_of(self, path: str, written: Written) -> str:
        """The tag that the object's content has, read back, sent as `written` was."""
        tags = _Tags(_part_size(written.size))
        at, step = 0, 4 * _PART
        while at < written.size:
            tags.add(self.read_range(path, at, at + step, None))
            at += step
        return tags.written().tag or ""

    # Uploads that nobody ended

    def uploads(self, before: float) -> Sequence[tuple[str, str]]:
        """(key, id) of multipart uploads below the lake begun at `before` (Unix time) or earlier.

        The client cannot list them, so botocore does.
        """
        pages = self._boto.get_paginator("list_multipart_uploads").paginate(
            Bucket=self.bucket, Prefix=f"{self.prefix}/" if self.prefix else ""
        )
        limit = datetime.fromtimestamp(before, UTC)
        return [
            (u["Key"], u["UploadId"])
            for page in pages
            for u in page.get("Uploads", ())
            if u["Initiated"] <= limit
        ]

    def abort(self, key: str, upload_id: str) -> None:
        """End an upload and free its parts; nothing happens when it has ended."""
        with contextlib.suppress(self._boto.exceptions.NoSuchUpload):
            self._boto.abort_multipart_upload(Bucket=self.bucket, Key=key, UploadId=upload_id)

    @cached_property
    def _boto(self) -> Any:
        import botocore.config
        import botocore.session

        s = self.settings
        return botocore.session.Session().create_client(
            "s3",
            region_name=s.region,
            endpoint_url=s.endpoint,
            config=botocore.config.Config(
                connect_timeout=s.timeout_s,
                read_timeout=s.timeout_s,
                retries={"total_max_attempts": s.retries + 1, "mode": "standard"},
                s3={"addressing_style": "virtual" if s.virtual_host else "path"},
            ),
        )


def errors(root: str, path: str, error: Exception) -> Exception:
    """hslake's error for what the client or botocore raised."""
    if trouble.names_no_bucket(error):
        return trouble.no_bucket(root)
    return trouble.remote(f"{root}/{path}", error)


def _part_size(size: int) -> int:
    """Bytes of a part: as many as `put` chooses for an object of `size`."""
    return max(_PART, -(-size // _PARTS // _PART) * _PART)


def _pause(tried: int) -> None:
    time.sleep(random.uniform(0.05, 0.2 * 2**tried))


class _Tags:
    """Computes what a store's ETag of an object must be: the MD5 of its content, or of its parts'
    MD5s and their number when it was sent in parts. For checking, not for security."""

    def __init__(self, part: int) -> None:
        self._part, self._size = part, 0
        self._ended: list[bytes] = []
        self._now = hashlib.md5(usedforsecurity=False)

    def add(self, data: bytes | memoryview) -> None:
        """The next bytes."""
        rest = memoryview(data)
        while len(rest):
            # A part ends only when more comes: an object of just one is sent whole.
            in_part = self._size - len(self._ended) * self._part
            if in_part == self._part:
                self._ended.append(self._now.digest())
                self._now, in_part = hashlib.md5(usedforsecurity=False), 0
            taken = rest[: self._part - in_part]
            self._now.update(taken)
            self._size += len(taken)
            rest = rest[len(taken) :]

    def of(self, data: bytes) -> bytes:
        """`data`, taken in."""
        self.add(data)
        return data

    def through(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        """`pieces`, each taken in on its way to the client, which uploads meanwhile."""
        for piece in pieces:
            self.add(piece)
            yield piece

    def of_all(self, pieces: Sequence[Piece]) -> Written:
        """What is to be found in the store, however far the client came with `pieces`."""
        at = 0
        for piece in pieces:
            if at + len(piece) > self._size:
                self.add(memoryview(piece)[max(0, self._size - at) :])
            at += len(piece)
        return self.written()

    def written(self) -> Written:
        """Size and tag of what was taken in."""
        if not self._ended:
            return Written(self._size, self._now.hexdigest())
        parts = [*self._ended, self._now.digest()]
        whole = hashlib.md5(b"".join(parts), usedforsecurity=False).hexdigest()
        return Written(self._size, f"{whole}-{len(parts)}")
