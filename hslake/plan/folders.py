"""Folders to plan from: what Hugging Face's `save_to_disk` writes, and folders of plan files.

Read without `datasets`: its state names the Arrow files, which hold the rows. Local, or on any URL.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from hslake.errors import HslakeError, InvalidInput, Missing
from hslake.store import Store, check_no_password, open_store

SUFFIXES = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".ipc": "arrow",
    ".feather": "arrow",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
}
PACKED = (".gz", ".zst", ".bz2", ".xz")
_STATE, _DICT = "state.json", "dataset_dict.json"


@dataclass(frozen=True)
class PlanFile:
    """One file of rows. `split`: of its rows that name none, as a DatasetDict says; `indices`: URL
    of the Arrow file that says which rows, in which order."""

    url: str
    split: str | None = None
    indices: str | None = None


def kind_of(url: str) -> str | None:
    """Format of a file by its name: parquet, arrow or jsonl; None when the name does not say."""
    path = PurePosixPath(url.split("?", 1)[0])
    packed = path.suffix in PACKED
    kind = SUFFIXES.get(PurePosixPath(path.stem).suffix if packed else path.suffix.lower())
    return None if packed and kind != "jsonl" else kind


def plan_files_in(url: str) -> list[PlanFile]:
    """The files to read for what was named: itself, or those in the folder. Raises InvalidInput
    for a folder of which it is not clear what to read."""
    check_no_password(url)
    path = url.removeprefix("file://")
    if "://" not in path:
        return _folder(url, path) if Path(path).is_dir() else [PlanFile(url)]
    if kind_of(url) is not None:
        return [PlanFile(url)]
    try:
        return _folder(url, url)
    except HslakeError:
        raise
    except Exception:  # a store that cannot be looked into: the file itself says what is wrong
        return [PlanFile(url)]


def _folder(url: str, root: str) -> list[PlanFile]:
    store, base = open_store(root), url.rstrip("/")
    splits = _document(store, _DICT, base)
    if splits is not None:
        names = splits.get("splits")
        if not isinstance(names, list) or not all(_is_name(n) for n in names) or not names:
            raise InvalidInput(f'{base}/{_DICT}: expected {{"splits": [names]}}')
        found = []
        for name in names:
            state = _document(store, f"{name}/{_STATE}", base)
            if state is None:
                raise Missing(f"{base}/{name}/{_STATE} is not there, {_DICT} names the split")
            # A lone "train" is what every dataset is loaded as: it says nothing.
            split = None if names == ["train"] else name
            found += _dataset(state, f"{base}/{name}", split)
        return found
    state = _document(store, _STATE, base)
    return _plain(store, base) if state is None else _dataset(state, base, None)


def _document(store: Store, path: str, base: str) -> dict[str, Any] | None:
    try:
        data = store.read(path)
    except Missing:
        return None
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{base}/{path} is not JSON ({error}): damaged, or cut off") from None
    if not isinstance(found, dict):
        raise InvalidInput(f"{base}/{path}: expected a JSON object")
    return found


def _dataset(state: Mapping[str, Any], base: str, split: str | None) -> list[PlanFile]:
    """The shards that a state names, in its order."""
    files = _names(state.get("_data_files"), f"{base}/{_STATE}: _data_files")
    indices = [
        name
        for key in ("_indices_files", "_indices_data_files")
        for name in _names(state.get(key) or [], f"{base}/{_STATE}: {key}")
    ]
    if len(indices) > 1 or (indices and len(files) != 1):
        raise InvalidInput(
            f"{base}: its rows are chosen by an indices mapping over {len(files)} files, which is "
            "not read: call flatten_indices() on the dataset and save it again"
        )
    mapping = f"{base}/{indices[0]}" if indices else None
    return [PlanFile(f"{base}/{name}", split, mapping) for name in files]


def _names(entries: Any, where: str) -> list[str]:
    if not isinstance(entries, list):
        raise InvalidInput(f"{where}: expected a list of files, as save_to_disk writes it")
    names = [e.get("filename") if isinstance(e, dict) else None for e in entries]
    for name in names:
        if not _is_name(name):
            raise InvalidInput(f"{where}: found {name!r}, expected the name of a file beside it")
    return [str(n) for n in names]


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and bool(name) and "/" not in name and not name.startswith(".")


def _plain(store: Store, base: str) -> list[PlanFile]:
    """The files of a folder, by name, which must be all of one format."""
    names = [n for n in store.list() if not any(p[0] in "._" for p in n.split("/"))]
    kinds = {n: kind_of(n) for n in names}
    odd = [n for n in names if kinds[n] is None or "/" in n]
    if odd or len(set(kinds.values())) != 1:
        what = f"it holds {odd[0]}" if odd else f"it holds {', '.join(sorted(names)[:3])}"
        raise InvalidInput(
            f"{base}: is a directory, and {what if names else 'it is empty'}: expected files of "
            "one format and nothing else (Parquet, Arrow or JSONL), or what save_to_disk writes; "
            "or name the files"
        )
    return [PlanFile(f"{base}/{name}") for name in names]
