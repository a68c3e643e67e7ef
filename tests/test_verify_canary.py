"""`verify --level canary`: rows that are wrong in every way beside what the server said of them."""

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import hslake
from hslake import checksum
from hslake.cli import app
from hslake.errors import InvalidInput, Missing
from hslake.extract.canary import first_position
from hslake.ids import token_hash
from hslake.lake import Lake
from hslake.lmhead import Unsupported
from hslake.runlog import RunLog
from hslake.verify import VerifyReport, canary, verify
from hslake.verify.agreement import Tally, judge
from tests.lakes import VOCAB, MadeLake, damage_sample, make_lake, random_states
from tests.models import bf16, log_probs, write_model

HIDDEN, STREAMS, LENGTH = 32, 4, 90
SERVER = "http://a:30000"
HEAD = bf16(np.random.default_rng(4), VOCAB, HIDDEN) * np.float32(0.5)
Wrong = Callable[[np.ndarray], np.ndarray]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_head(tmp_path / "model", HEAD)


def write_head(folder: Path, head: np.ndarray) -> Path:
    return write_model(folder, {"lm_head.weight": head}, vocab_size=len(head))


class Served:
    """States as the server computes them; what is stored of the samples in `of` is `wrong`."""

    def __init__(self, dtype: str, wrong: Wrong | None = None, of: tuple[int, ...] = ()) -> None:
        self.make = random_states(STREAMS, HIDDEN, dtype)
        self.wrong, self.of = wrong, of
        self.true: list[np.ndarray] = []

    def __call__(self, rng: np.random.Generator, length: int) -> np.ndarray:
        true = self.make(np.random.default_rng(len(self.true) + 77), length)
        self.true.append(true)
        if self.wrong is None or (self.of and len(self.true) - 1 not in self.of):
            return true
        return self.wrong(true)


def made_lake(folder: Path, served: Served, dtype: str = "bfloat16", n: int = 6) -> MadeLake:
    return make_lake(
        folder, hidden=HIDDEN, streams=STREAMS, dtype=dtype, lengths=[LENGTH] * n, states=served
    )


def attempts(lake: Lake) -> dict[str, str]:
    return dict(lake.sql("select sample_id, attempt from samples").fetchall())


def tell(
    made: MadeLake,
    served: Served,
    dtype: str = "bfloat16",
    *,
    head: np.ndarray = HEAD,
    server: Callable[[int], str] = lambda i: SERVER,
    at: Callable[[int], datetime] | None = None,
    log: RunLog | None = None,
) -> None:
    """What the server says of each sample: logits rounded to its dtype, then a softmax."""
    log = log or RunLog(made.lake.store)
    live = attempts(made.lake)
    for i, (name, truth) in enumerate(made.samples.items()):
        final = checksum.to_float32(served.true[i][-1], dtype)
        first, ids = first_position(len(final)), truth.input_ids
        logits = final[first - 1 : -1].astype(np.float64) @ head.T.astype(np.float64)
        rounded = _rounded(logits.astype(np.float32), dtype).astype(np.float64)
        values = log_probs(rounded, ids[first:])
        log.canary(name, token_hash(ids), live[name], server(i), first, values.tolist())
        if at is not None:
            log._kept[-1]["told_at"] = at(i)
    log.flush()


def _rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "bfloat16":
        bits = values.view(np.uint32) + np.uint32(0x8000)
        return (bits & np.uint32(0xFFFF0000)).view(np.float32)
    return values.astype(np.float16).astype(np.float32) if dtype == "float16" else values


def look(made: MadeLake, model: Path, **more: Any) -> VerifyReport:
    return verify(made.url, "canary", model=model, **more)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_what_the_model_said_is_what_is_stored(tmp_path: Path, model: Path, dtype: str) -> None:
    served = Served(dtype)
    made = made_lake(tmp_path, served, dtype)
    tell(made, served, dtype)
    report = look(made, model)
    assert report.ok and not report.warnings and report.samples == 6 and report.tokens == 6 * 64
    found = report.agreement
    assert found is not None and found.figures.samples == 6 and found.figures.within == 6 * 64
    assert found.untelling == 0 and found.unlike == 0
    assert found.figures.mean_off is not None and found.figures.max_off is not None
    assert found.figures.mean_off <= found.figures.max_off < found.worst[0].allowed
    assert found.figures.correlation is not None and found.figures.correlation > 0.999
    assert max(one.off for one in found.worst) == found.figures.max_off


def _other(true: np.ndarray) -> np.ndarray:
    return random_states(STREAMS, HIDDEN, "bfloat16")(np.random.default_rng(5), true.shape[1])


def _final(change: Wrong) -> Wrong:
    def made(true: np.ndarray) -> np.ndarray:
        wrong = true.copy()
        wrong[-1] = change(true[-1])
        return wrong

    return made


def _zeroed(true: np.ndarray) -> np.ndarray:
    wrong = true.copy()
    wrong[-10] = 0
    return wrong


def _neighbour(true: np.ndarray) -> np.ndarray:
    wrong = true.copy()
    wrong[-10] = true[-11]
    return wrong


def _pre_norm(true: np.ndarray) -> np.ndarray:
    """The same direction, in another length and with other weights a channel."""
    weight = np.linspace(0.5, 2.0, HIDDEN, dtype=np.float32)
    values = checksum.to_float32(true, "bfloat16") * 3 * weight
    return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)


WRONG: dict[str, Wrong] = {
    "shifted by one": lambda true: np.roll(true, 1, axis=1),
    "shifted the other way": lambda true: np.roll(true, -1, axis=1),
    "of another sample": _other,
    "another boundary": lambda true: true[[3, 1, 2, 0]],
    "boundaries the other way round": lambda true: true[::-1].copy(),
    "before the norm": _final(_pre_norm),
    "one row zero": _final(_zeroed),
    "one row its neighbour's": _final(_neighbour),
    "not a number": _final(lambda true: np.full_like(true, 0x7FC0)),
}


@pytest.mark.parametrize("how", list(WRONG))
def test_one_wrong_sample_is_found(tmp_path: Path, model: Path, how: str) -> None:
    served = Served("bfloat16", WRONG[how], of=(2,))
    made = made_lake(tmp_path, served)
    tell(made, served)
    name = list(made.samples)[2]
    report = look(made, model)
    assert list(report.by_sample()) == [name], how
    (damage,) = report.damage
    assert damage.segment_id and damage.sure and "positions are off by more than" in damage.what
    assert report.agreement is not None and report.agreement.worst[0].sample_id == name
    assert report.agreement.figures.disagreeing == 1 and not report.agreement.most_disagree
    if how.startswith("one row"):
        assert f"1 of 64 positions are off by more than allowed, position {LENGTH - 9} " in (
            damage.what
        )
    # Nothing else finds it: its checksum is that of the wrong rows.
    assert verify(made.url, "full").ok


def test_a_server_that_told_nan_disagrees(tmp_path: Path, model: Path) -> None:
    served = Served("bfloat16")
    made = made_lake(tmp_path, served)
    tell(made, served)
    log, (name, truth) = RunLog(made.lake.store), next(iter(made.samples.items()))
    log.canary(name, token_hash(truth.input_ids), attempts(made.lake)[name], SERVER, 26, [0.0] * 64)
    log._kept[-1] |= {
        "log_probs": [float("nan")] * 64,
        "told_at": datetime.now(UTC) - timedelta(days=1),
    }
    log.flush()  # told before the other one of the same attempt, so it counts
    report = look(made, model)
    assert list(report.by_sample()) == [name] and report.samples == 6


# -- which canaries are compared ------------------------------------------------------------------


def test_only_the_live_attempt_is_compared(tmp_path: Path, model: Path) -> None:
    served = Served("bfloat16", WRONG["of another sample"], of=(0,))
    made = made_lake(tmp_path, served)
    tell(made, served)
    assert not look(made, model).ok
    name = next(iter(made.samples))
    report = look(made, model, quarantine=True)
    assert report.quarantined == 1
    made.stage([name])  # captured again, as wrong as before, under another attempt
    hslake.compact.compact(made.url, [made.staging])
    assert name in attempts(made.lake)
    report = look(made, model)
    assert report.ok and report.samples == 5
    assert report.agreement is not None and report.agreement.unlike == 1


def test_sample_and_where(tmp_path: Path, model: Path) -> None:
    served = Served("bfloat16")
    made = made_lake(tmp_path, served)
    tell(made, served)
    assert look(made, model, sample=2).samples == 2
    assert look(made, model, where="source = 'B3' -- of one source").samples == 2
    with pytest.raises(InvalidInput, match="--where 'nonsense = 1'"):
        look(made, model, where="nonsense = 1")
    with pytest.raises(Missing, match="--where 'length > 1000' selects"):
        look(made, model, where="length > 1000")


def test_what_has_not_one_value_a_position_is_told(tmp_path: Path, model: Path) -> None:
    served = Served("bfloat16")
    made = made_lake(tmp_path, served, n=3)
    tell(made, served)
    made.add([LENGTH])
    *_, (name, truth) = made.samples.items()
    log = RunLog(made.lake.store)
    log.canary(name, token_hash(truth.input_ids), attempts(made.lake)[name], SERVER, 26, [-1.0] * 3)
    log.flush()
    report = look(made, model)
    assert report.ok and report.samples == 3
    (warning,) = report.warnings
    assert f"(the first: {name})" in warning


def test_more_samples_than_go_through_the_head_at_once(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = Served("bfloat16", WRONG["shifted by one"], of=(1, 4))
    made = made_lake(tmp_path, served)
    tell(made, served)
    monkeypatch.setattr(canary, "_ROW_BYTES", 64 * HIDDEN * 4 * 2 + 5)  # two at a time
    assert set(look(made, model).by_sample()) == {list(made.samples)[i] for i in (1, 4)}
    monkeypatch.setattr(canary, "_ROW_BYTES", 1)
    assert len(look(made, model).by_sample()) == 2


# -- servers and hours -----------------------------------------------------------------------------


def test_a_server_that_went_bad_shows_by_the_hour(tmp_path: Path, model: Path) -> None:
    served = Served("bfloat16", WRONG["another boundary"], of=(3, 5))
    made = made_lake(tmp_path, served)
    begun = datetime(2026, 11, 1, 10, 30, tzinfo=UTC)
    tell(
        made,
        served,
        server=lambda i: f"http://{'ab'[i % 2]}:30000",
        at=lambda i: begun + timedelta(hours=i // 2),
    )
    found = look(made, model).agreement
    assert found is not None
    seen = {(g.server[7], g.hour.hour): g.figures.disagreeing for g in found.groups}
    bad = {("b", 11): 1, ("b", 12): 1}
    assert seen == {(s, h): bad.get((s, h), 0) for s in "ab" for h in (10, 11, 12)}
    result = CliRunner().invoke(
        app, ["verify", made.url, "--level", "canary", "--model", str(model)]
    )
    assert result.exit_code == 1
    assert "2026-11-01 11h" in result.output and "http://b:30000" in result.output
    table = result.output[result.output.index("server  ") :]
    assert "http://a:30000" not in table.split("segment ")[0]


# -- the wrong folder, and heads that cannot be applied --------------------------------------------


def test_another_models_head_hides_nothing(tmp_path: Path) -> None:
    served = Served("bfloat16")
    made = made_lake(tmp_path, served)
    tell(made, served)
    other = write_head(tmp_path / "other", bf16(np.random.default_rng(9), VOCAB, HIDDEN))
    report = look(made, other, quarantine=True)
    assert len(report.by_sample()) == 6 and report.quarantined == 0
    assert report.agreement is not None and report.agreement.most_disagree
    assert len(made.lake.sql("select sample_id from samples").fetchall()) == 6
    result = CliRunner().invoke(
        app, ["verify", made.url, "--level", "canary", "--model", str(other), "--quarantine"]
    )
    assert result.exit_code == 1 and f"is {other} the folder that the servers ran" in result.output


@pytest.mark.parametrize(
    ("head", "error", "text"),
    [
        (HEAD[:, :16], InvalidInput, "hidden size 16, the lake's is 32"),
        (HEAD[: VOCAB // 2], Unsupported, "cannot be checked: token .* outside the head's vocab"),
        (np.ones((VOCAB, HIDDEN), "i1"), Unsupported, "cannot be checked: .* stored as I8"),
    ],
)
def test_heads_that_do_not_fit_are_no_verdict(
    tmp_path: Path, head: np.ndarray, error: type[Exception], text: str
) -> None:
    served = Served("bfloat16")
    made = made_lake(tmp_path, served)
    tell(made, served)
    with pytest.raises(error, match=text):
        look(made, write_head(tmp_path / "other", np.ascontiguousarray(head)))


def test_nothing_to_compare(tmp_path: Path, model: Path) -> None:
    served = Served("bfloat16")
    made = made_lake(tmp_path, served, n=2)
    with pytest.raises(Missing, match="no canary of a live sample"):
        look(made, model)
    tell(made, served)
    with pytest.raises(InvalidInput, match="--model DIR"):
        verify(made.url, "canary")
    with pytest.raises(InvalidInput, match="--model is of --level canary"):
        verify(made.url, "full", model=model)
    with pytest.raises(Missing, match="no such folder"):
        look(made, tmp_path / "nowhere")
    bare = hslake.create(tmp_path / "bare", streams=[1], hidden_size=8, num_layers=2)
    with pytest.raises(InvalidInput, match="no `final` stream"):
        verify(bare.url, "canary", model=model)


def test_the_lakes_model_is_told_by_its_fingerprint(tmp_path: Path) -> None:
    config = {"num_hidden_layers": 8, "hidden_size": HIDDEN, "vocab_size": VOCAB}
    mine = write_model(tmp_path / "mine", {"lm_head.weight": HEAD}, **config)
    lake = hslake.create(
        tmp_path / "lake2", streams=[2, "final"], model_config=mine / "config.json"
    )
    other = write_model(tmp_path / "other", {"lm_head.weight": HEAD * 2}, **config)
    with pytest.raises(InvalidInput, match="not the model of this lake"):
        verify(lake.url, "canary", model=other)
    with pytest.raises(Missing, match="no canary"):
        verify(lake.url, "canary", model=mine)


def test_rows_of_which_all_are_alike_say_nothing(tmp_path: Path) -> None:
    """A head of zeros takes all tokens for equally likely, whatever the rows."""
    served = Served("bfloat16")
    made = made_lake(tmp_path, served)
    flat = np.zeros_like(HEAD)
    tell(made, served, head=flat)
    with pytest.raises(Unsupported, match="all 6 canaries agree, and with rows shifted by one"):
        look(made, write_head(tmp_path / "flat", flat))


def test_damage_is_told_as_damage(tmp_path: Path, model: Path) -> None:
    served = Served("bfloat16")
    made = make_lake(
        tmp_path, hidden=HIDDEN, streams=1, lengths=[60] * 3, states=lambda r, n: served(r, n)[-1:]
    )
    tell(made, served)
    name = list(made.samples)[1]
    damage_sample(made.lake, name)
    report = look(made, model)
    assert list(report.by_sample()) == [name] and report.agreement is not None
    assert report.agreement.figures.samples == 2 and report.agreement.figures.disagreeing == 0


def test_json_has_it_all(tmp_path: Path, model: Path) -> None:
    served = Served("bfloat16", WRONG["shifted by one"], of=(2,))
    made = made_lake(tmp_path, served)
    tell(made, served)
    result = CliRunner().invoke(
        app, ["verify", made.url, "--level", "canary", "--model", str(model), "--json"]
    )
    found = json.loads(result.stdout)
    assert result.exit_code == 1 and found["ok"] is False
    assert found["agreement"]["figures"]["samples"] == 6
    assert found["agreement"]["figures"]["disagreeing"] == 1
    assert found["agreement"]["worst"][0]["sample_id"] == list(made.samples)[2]
    assert list(found["damaged_samples"]) == [list(made.samples)[2]]
    assert found["agreement"]["groups"][0]["server"] == SERVER


def test_figures_of_many_are_those_of_all(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    told, made = rng.normal(size=(2, 5, 40)) - 3
    tally = Tally()
    for a, b in zip(told, made, strict=True):
        one = canary.Canary("s", "g", 0, 41, SERVER, "r", datetime.now(UTC), 1, a.astype("f4"))
        tally.add(judge(one, b, b, np.full(40, 0.5)), a, b)
    total = tally.total()
    off = np.abs(told - made)
    assert total.positions == 200 and total.within == int((off <= 0.5).sum())
    assert total.mean_off == pytest.approx(off.mean())
    assert total.max_off == pytest.approx(off.max(), rel=1e-6)
    assert total.correlation == pytest.approx(np.corrcoef(told.ravel(), made.ravel())[0, 1])
