"""Whose lake a writer in staging captures for: asked before a compactor touches anything of it."""

import json
from pathlib import Path

from hslake.compactreport import CompactReport, tell
from hslake.errors import Corrupt, InvalidInput
from hslake.spec import LakeSpec
from hslake.staging.check import check_part
from hslake.staging.folder import STATUS
from hslake.staging.reader import WriterDir, part_attributes


def is_ours(found: WriterDir, spec: LakeSpec, report: CompactReport) -> bool:
    """Whether this writer's parts are of this lake and model; told when they are not, once for each
    writer. Only reads."""
    refused, damaged = None, []
    for path in sorted(found.path.glob("part-*")):
        try:
            check_part(path, part_attributes(path), spec)
            return True
        except InvalidInput as error:
            refused = refused or f"{error}; refused and left alone"
        except Corrupt as error:  # also one that is half made, or being recycled
            if path in found.parts and path.exists():
                damaged.append(f"{error}; left alone")
    if refused is not None:
        if not any(found.writer_id in message for message in report.refused):
            tell(report.refused, refused)
        return False
    lake_id = _lake_of(found.path)
    if lake_id is None and found.alive:  # just born, or its metadata is gone: nobody can tell
        for message in damaged:
            tell(report.damage, message)
        return False
    return lake_id in (None, spec.lake_id)


def _lake_of(folder: Path) -> str | None:
    """The lake that a writer's own summary names, for when no part of it tells."""
    try:
        found = json.loads((folder / STATUS).read_bytes())["lake_id"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return str(found)
