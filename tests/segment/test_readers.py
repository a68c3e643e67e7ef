"""Other people's readers return the bits that went in.

zarr-python runs with hslake installed but not imported by hand; TensorStore and zarrs run in an
interpreter that has no hslake. Each reads all combinations of dtype and codec in one process.
"""

import hashlib
import importlib.util
import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from tests.segments import COMBINATIONS, make_segment, spec_of

LENGTHS = [300, 700, 5]
# Only hslake has this codec: it needs no reader without hslake.
STANDARD = [c for c in COMBINATIONS if c[1] != "bf16plane"]
# Chunks of several Blosc blocks, the last one shorter than the others; and of less than one.
WIDE = {("bfloat16", "5000 wide"): 5000, ("float16", "2048 wide"): 2048, ("bfloat16", "1 wide"): 1}

_HEAD = """
import hashlib, json, sys
import numpy as np

def without_hslake():
    import importlib.metadata, importlib.util
    assert importlib.util.find_spec("hslake") is None
    assert "hslake" not in {d.name for d in importlib.metadata.distributions()}

def digest(a):
    return hashlib.sha256(np.ascontiguousarray(a).tobytes()).hexdigest()

def samples(array, name, places):
    at = (slice(None),) if name == "hidden_states" else ()
    return [digest(array[(*at, slice(start, start + n))]) for start, n in places]
"""

_ZARR = """
import zarr

def read(folder, places):
    group = zarr.open_group(folder, mode="r")
    return {n: samples(group[n], n, places) for n in ("hidden_states", "input_ids", "loss_mask")}
"""

_TENSORSTORE = """
without_hslake()
import tensorstore as ts

def read(folder, places):
    found = {}
    for n in ("hidden_states", "input_ids", "loss_mask"):
        store = {"driver": "file", "path": f"{folder}/{n}"}
        array = ts.open({"driver": "zarr3", "kvstore": store}, open=True).result()
        found[n] = samples(array.read().result(), n, places)
    return found
"""

# zarrs itself decodes, also bfloat16, which zarr-python in front of it must know by name.
_ZARRS = (
    _ZARR
    + """
without_hslake()
import zarrs
from zarr.dtype import UInt16, data_type_registry

class BFloat16(UInt16):
    _zarr_v3_name = "bfloat16"
    @classmethod
    def from_native_dtype(cls, dtype):
        raise refused(dtype)
    @classmethod
    def _from_json_v3(cls, data):
        if data == "bfloat16":
            return cls()
        raise refused(data)
    def to_json(self, zarr_format):
        return "bfloat16"

def refused(what):
    try:
        from zarr.errors import DataTypeValidationError
    except ImportError:
        from zarr.dtype import DataTypeValidationError
    return DataTypeValidationError(what)

data_type_registry.register("bfloat16", BFloat16)
# Strict: an error instead of zarr-python's own codecs where zarrs cannot read.
zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline", "codec_pipeline.strict": True})
read_with_zarr = read

def read(folder, places):
    array = zarr.open_group(folder, mode="r")["hidden_states"]
    assert "Zarrs" in type(array.async_array.codec_pipeline).__name__
    return read_with_zarr(folder, places)
"""
)

_RUN = """
print(json.dumps([read(folder, places) for folder, places in json.load(sys.stdin)]))
"""

Segments = dict[tuple[str, str], tuple[Path, list[tuple[int, int]], dict[str, list[str]]]]


def digest(a: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(a).tobytes()).hexdigest()


@pytest.fixture(scope="module")
def segments(tmp_path_factory: pytest.TempPathFactory) -> Segments:
    """(dtype, codec) -> (folder, places of the samples, digests of what went in)."""
    found: Segments = {}
    for dtype, codec in [*COMBINATIONS, *WIDE]:
        root = tmp_path_factory.mktemp("segment")
        wide = WIDE.get((dtype, codec))
        spec = spec_of(dtype, "standard", wide) if wide else spec_of(dtype, codec)
        _, info, samples = make_segment(root, spec, LENGTHS)
        places = [(start, n) for (_, start), n in zip(info.placements, LENGTHS, strict=True)]
        truth = {
            "hidden_states": [digest(np.stack(s.hidden)) for s in samples],
            "input_ids": [digest(np.asarray(s.input_ids, np.int32)) for s in samples],
            "loss_mask": [digest(np.asarray(s.loss_mask, np.uint8)) for s in samples],
        }
        found[dtype, codec] = (root / "segments" / info.segment_id, places, truth)
    return found


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages of this interpreter as links, without hslake and what makes it importable."""
    folder = tmp_path_factory.mktemp("bare")
    for site in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for entry in Path(site).iterdir():
            if "hslake" not in entry.name and entry.suffix != ".pth":
                (folder / entry.name).symlink_to(entry)
    return folder


def read_all(
    script: str, segments: Segments, which: list[tuple[str, str]], bare: Path | None = None
) -> dict[tuple[str, str], dict[str, list[str]]]:
    """What a reader finds, by combination: the digest of each sample in each array."""
    # -I and -S: nothing but the standard library and `bare` can be imported.
    start = [sys.executable, "-I", "-S", "-c"] if bare else [sys.executable, "-c"]
    path = f"import sys; sys.path.append({str(bare)!r})\n" if bare else ""
    work = json.dumps([(str(segments[c][0]), segments[c][1]) for c in which])
    done = subprocess.run(
        [*start, path + _HEAD + script + _RUN],
        input=work,
        capture_output=True,
        text=True,
        cwd=next(iter(segments.values()))[0],
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(which, json.loads(done.stdout), strict=True))


def compare(found: dict[tuple[str, str], dict[str, list[str]]], segments: Segments) -> None:
    assert {c: v for c, v in found.items() if v != segments[c][2]} == {}


def test_zarr_opens_it_with_hslake_installed(segments: Segments) -> None:
    script = _ZARR + "assert not any(m.startswith('hslake') for m in sys.modules)\n"
    compare(read_all(script, segments, [*COMBINATIONS, *WIDE]), segments)


def test_zarr_does_not_know_bfloat16_without_hslake(segments: Segments, bare: Path) -> None:
    """Or the test above would prove nothing."""
    with pytest.raises(AssertionError, match="bfloat16"):
        read_all(_ZARR, segments, [("bfloat16", "standard")], bare)


@pytest.mark.parametrize(("package", "script"), [("tensorstore", _TENSORSTORE), ("zarrs", _ZARRS)])
def test_reads_without_hslake(segments: Segments, bare: Path, package: str, script: str) -> None:
    assert importlib.util.find_spec(package), f"{package} is in the extra `dev`"
    compare(read_all(script, segments, [*STANDARD, *WIDE], bare), segments)
