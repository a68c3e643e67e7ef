"""GPU memory of the capture."""

import pytest
from hslake_sglang import memory

from tests.patch.toy import HIDDEN, make_spec

TABLE = "0, GPU-aaa1, 143771\n1, GPU-aab2, 81559\n2, GPU-bbb3, 40960\n"


def test_bytes_of_the_capture() -> None:
    spec = make_spec(("2", "final"), "bfloat16")
    rows = 100
    assert memory.capture_bytes(spec, rows) == (
        2 * rows * 2 * HIDDEN * 2 + rows * HIDDEN * 2 + (64 << 20)
    )
    wide = make_spec(("3", "31", "59", "final"), "bfloat16", num_layers=61, hidden_size=7168)
    assert memory.capture_bytes(wide, 8192) == 1_124_073_472  # 1.05 GiB


def test_the_fraction_is_lowered_by_what_is_needed() -> None:
    total = 100 << 30
    assert memory.lowered(0.9, 10 << 30, total) == 0.8
    assert memory.lowered(0.88, 1 << 30, total) == 0.87
    assert memory.lowered(0.88, 1 << 20, total) == 0.8799  # down, never up
    assert 0 < memory.lowered(0.05, 10 << 30, total) <= 0.001


@pytest.mark.parametrize(
    ("visible", "mib"),
    [
        (None, 40960),
        ("0", 143771),
        ("0,1", 81559),
        (" 1 , 0 ", 81559),
        ("GPU-aaa1,GPU-b", 40960),
        ("GPU-aab", 81559),
        ("0,7,2", 143771),  # CUDA stops at the first that is not there
        ("0,GPU-aa,2", 143771),  # which of the two is not clear
        ("", None),
        ("-1", None),
        ("NoDevFiles", None),
    ],
)
def test_the_smallest_gpu_that_the_server_sees(visible: str | None, mib: int | None) -> None:
    assert memory.smallest(TABLE, visible) == (None if mib is None else mib << 20)


def test_odd_answers_of_nvidia_smi() -> None:
    assert memory.smallest("", None) is None
    assert memory.smallest("No devices were found\n", None) is None
    assert memory.smallest("0, GPU-a, [N/A]\n1, GPU-b, 100\n", None) == 100 << 20


def test_a_machine_without_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert memory.smallest_gpu({}) is None
