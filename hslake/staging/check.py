"""Whose staging is it? One model's states must never reach another model's lake, nor the files of
staging lie among a lake's."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hslake.errors import Corrupt, InvalidInput, Unavailable
from hslake.spec import SPEC_FILE, LakeSpec, check_fingerprint
from hslake.staging.part import DONE
from hslake.staging.reader import part_attributes, scan
from hslake.store import open_store


def check_part(path: Path, attributes: dict[str, Any], spec: LakeSpec) -> None:
    """Raise InvalidInput unless the part at `path` was written for this lake and model."""
    expected: dict[str, Any] = {
        "lake_id": spec.lake_id,
        "streams": list(spec.streams),
        "dtype": spec.dtype,
        "hidden_size": spec.hidden_size,
    }
    for name, want in expected.items():
        if attributes[name] != want:
            raise InvalidInput(
                f"staging part {path}: {name} is {attributes[name]!r}, the lake's is {want!r}: "
                "it belongs to another lake; compact that one, or name another --staging"
            )
    check_fingerprint(spec.model.fingerprint, attributes["fingerprint"], f"staging part {path}")


def check_no_lake(root: str | Path) -> None:
    """Raise InvalidInput for a lake that was named as a staging folder: there is never a writer in
    it, and "nothing was waiting" would be the answer for ever."""
    if (Path(root) / SPEC_FILE).is_file():
        raise InvalidInput(
            f"--staging {root} is a lake ({SPEC_FILE} lies in it), expected the folder that "
            "`hslake serve` or `capture-hf` got as --staging"
        )


def check_roots(roots: Iterable[str | Path], spec: LakeSpec) -> None:
    """Raise Missing for a staging folder that is not there, InvalidInput for a lake, or when one
    holds parts that wait for another lake or model."""
    for root in roots:
        check_no_lake(root)
        for writer in scan(Path(root)):
            for path in writer.parts:
                if (path / DONE).exists():
                    continue
                try:
                    attributes = part_attributes(path)
                except (Corrupt, Unavailable):
                    continue  # recycled meanwhile, or damaged: the compactor reports that
                check_part(path, attributes, spec)


def check_apart(lake_url: str, staging: Path) -> None:
    """Raise InvalidInput when the staging folder and the lake's are in each other."""
    store = open_store(lake_url)
    if not store.is_local:
        return
    lake, folder = Path(store.root).resolve(), staging.resolve()
    if lake == folder or lake in folder.parents or folder in lake.parents:
        raise InvalidInput(
            f"--staging {staging} and the lake {lake} are in each other: the hook's files would "
            "lie among the lake's; name a folder of its own, on /dev/shm"
        )
