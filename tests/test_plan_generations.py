"""Another template over the same text: one commit that ends the old rows and adds the new ones,
told before and after, undone by the old template."""

import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from hslake import query
from hslake.errors import HslakeError, InvalidInput
from hslake.plan import PlanReport, plan_files, run, tokens
from hslake.store import open_store
from hslake.tables import catalog
from hslake.verify import verify
from tests.planlakes import entry_files, new_lake, planned, write
from tests.test_plantext import CHAT, PLAIN, save

ARGS = "{% if shout %}how {% endif %}" + PLAIN


@pytest.fixture
def url(tmp_path: Path) -> str:
    return new_lake(tmp_path)


@pytest.fixture
def model(tmp_path: Path) -> str:
    return save(tmp_path / "model", ARGS)


def chats(folder: Path, count: int = 3) -> Path:
    rows: list[dict[str, Any]] = [
        {"sample_id": f"s{i}", "messages": [*CHAT, {"role": "user", "content": "you " * i},
                                           {"role": "assistant", "content": "fine"}]}
        for i in range(count)
    ]  # fmt: skip
    return write(folder / "chats.jsonl", *rows)


def plan(url: str, file: Path, model: str, **options: Any) -> PlanReport:
    return plan_files(url, [file], "A1", tokenizer=model, **options)


def test_a_new_template_replaces_what_is_planned(url: str, model: str, tmp_path: Path) -> None:
    file = chats(tmp_path)
    first = plan(url, file, model)
    assert (first.added, first.replaced) == (3, 0) and first.tokenizer_hash and first.template_hash
    before = planned(url)
    assert {
        (r["generation"], r["tokenizer_hash"], r["template_hash"]) for r in before.values()
    } == {(1, first.tokenizer_hash, first.template_hash)}
    shout = {"template_args": {"shout": True}}
    told = plan(url, file, model, dry_run=True, **shout)
    assert (told.added, told.replaced, told.invalidated_committed) == (0, 3, 0)
    assert planned(url) == before
    done = plan(url, file, model, **shout)
    assert (done.replaced, done.unchanged, done.plan_samples) == (3, 0, 3)
    after = planned(url)
    for name, row in after.items():
        assert row["input_ids"] == [6, *before[name]["input_ids"]]
        assert row["generation"] == 2 and row["template_hash"] == done.template_hash
        assert row["split"] == before[name]["split"]
    # One commit, one file for what ends, so that others need not be opened to find it.
    state = catalog.open_table(open_store(url), "plan")
    assert state.version == 2 and len(entry_files(url, 2)) == 2 and len(state.change_files()) == 1
    log = query.run(url, "select op, count(*) n from plan_log group by op order by op").to_pylist()
    assert log == [{"op": "add", "n": 6}, {"op": "tombstone", "n": 3}]
    assert plan(url, file, model, **shout).unchanged == 3
    back = plan(url, file, model)
    assert back.replaced == 3
    undone = planned(url)
    assert {r["generation"] for r in undone.values()} == {3}
    assert [undone[n]["input_ids"] for n in before] == [before[n]["input_ids"] for n in before]
    assert verify(url).ok


def test_a_template_that_changes_nothing_replaces_nothing(
    url: str, model: str, tmp_path: Path
) -> None:
    file = chats(tmp_path)
    plan(url, file, model)
    report = plan(url, file, model, template_args={"unused": 1})
    assert (report.unchanged, report.replaced) == (3, 0)
    assert catalog.open_table(open_store(url), "plan").version == 1


def test_another_mask_is_another_generation(url: str, model: str, tmp_path: Path) -> None:
    file = chats(tmp_path)
    plan(url, file, model)
    before = planned(url)
    assert plan(url, file, model, last_turn_only=True).replaced == 3
    after = planned(url)
    assert [r["token_hash"] for r in after.values()] == [r["token_hash"] for r in before.values()]
    assert all(after[n]["mask_hash"] != before[n]["mask_hash"] for n in before)


def test_rows_without_ids_are_the_same_sample(url: str, tmp_path: Path) -> None:
    one = save(tmp_path / "one", PLAIN)
    two = save(tmp_path / "two", "how " + PLAIN)
    file = write(tmp_path / "a.jsonl", {"messages": CHAT}, {"text": "hello you"})
    assert plan(url, file, one).added == 2
    report = plan(url, file, two)
    # Plain text knows no template.
    assert (report.added, report.replaced, report.unchanged) == (0, 1, 1)
    assert len(planned(url)) == 2


def test_other_content_is_still_an_error(url: str, model: str, tmp_path: Path) -> None:
    plan(url, chats(tmp_path), model)
    before = planned(url)
    shout: dict[str, Any] = {"template_args": {"shout": True}}
    for row, what in (
        ({"sample_id": "s1", "messages": CHAT}, "input_ids: 's1' has other tokens"),
        ({"sample_id": "s1", "input_ids": [1, 2]}, "input_ids: 's1' has other tokens"),
    ):
        with pytest.raises(InvalidInput, match=f"row 1: {what}"):
            plan(url, write(tmp_path / "b.jsonl", row), model, **shout)
    with pytest.raises(InvalidInput, match="source: 's0' has 'B9'"):
        plan_files(url, [chats(tmp_path)], "B9", tokenizer=model, **shout)
    assert planned(url) == before


def test_a_template_that_prints_the_time(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same text and template, and other tokens: no generation, a template nobody can use."""
    file, folder = chats(tmp_path, 1), tmp_path / "m"
    plan(url, file, save(folder, PLAIN))
    known = planned(url)["s0"]["template_hash"]
    monkeypatch.setattr(tokens.Tokenizer, "_text", _later(tokens.Tokenizer._text))
    assert tokens.Tokenizer(tokens.TextOptions(str(folder))).template_hash == known
    with pytest.raises(InvalidInput, match=r"other tokens .* not deterministic"):
        plan(url, file, str(folder))


def _later(real: Any) -> Any:
    def text(self: Any, row: Any) -> Any:
        said, spans = real(self, row)
        return f"how {said}", [(a + 4, b + 4) for a, b in spans]

    return text


def test_text_planned_by_an_older_hslake(url: str, model: str, tmp_path: Path) -> None:
    """Rows without the new columns: named by their tokens, hashes and generation unknown."""
    file = write(tmp_path / "a.jsonl", {"messages": CHAT}, {"input_ids": [1, 2], "sample_id": "i"})
    plan(url, file, model, dry_run=True)
    import hashlib

    import numpy as np

    from hslake.plan.tokens import Text, TextOptions, Tokenizer

    (made,) = Tokenizer(TextOptions(model))([Text("messages", CHAT, None, "x")])
    assert not isinstance(made, InvalidInput)
    content = made.input_ids.astype("<i4").tobytes() + made.loss_mask.tobytes()
    old = f"A1-{hashlib.sha256(content).hexdigest()[:20]}"
    from hslake.ids import token_hash

    rows = pa.table(
        {
            "op": ["add", "add"],
            "sample_id": [old, "i"],
            "source": ["A1", "A1"],
            "split": ["train", "validation"],
            "length": [len(made.input_ids), 2],
            "supervised_tokens": [int(made.loss_mask.sum()), 2],
            "token_hash": [token_hash(made.input_ids), token_hash([1, 2])],
            "input_ids": [made.input_ids.tolist(), [1, 2]],
            "loss_mask": [made.loss_mask.astype(np.int32).tolist(), [1, 1]],
        }
    )
    catalog.commit(open_store(url), "plan", lambda _: rows, "old")
    report = plan(url, file, model)
    assert (report.added, report.unchanged) == (0, 2)
    with pytest.raises(InvalidInput, match="loss_mask: 'i' has another mask"):
        plan_files(url, [write(tmp_path / "b.jsonl", {"input_ids": [1, 2], "loss_mask": [0, 1],
                                                      "sample_id": "i"})], "A1")  # fmt: skip
    # What is not known of old rows is found from their tokens: the prompt keeps its split.
    again = plan_files(url, [write(tmp_path / "c.jsonl", {"input_ids": [1, 2], "sample_id": "j"})],
                       "A1")  # fmt: skip
    assert again.followed == 1 and planned(url)["j"]["split"] == "validation"


def test_pieces_that_a_new_template_cuts_in_another_way(
    url: str, model: str, tmp_path: Path
) -> None:
    file = chats(tmp_path, 2)
    (short,) = {
        len(r["input_ids"]) for n, r in _dry(url, file, model, tmp_path).items() if n == "s0"
    }
    first = plan(url, file, model, max_length=short, over_long="split")
    assert (first.cut, first.pieces, first.added) == (1, 2, 3)
    assert set(planned(url)) == {"s0", f"s1@0-{short}", f"s1@{short}-{short + 1}"}
    shout: dict[str, Any] = {"template_args": {"shout": True}, "max_length": short}
    done = plan(url, file, model, over_long="split", **shout)
    # s0 is too long now, and the rest of s1 has other bounds.
    assert (done.added, done.replaced, done.superseded) == (3, 1, 2)
    assert set(planned(url)) == {f"s0@0-{short}", f"s0@{short}-{short + 1}", f"s1@0-{short}",
                                 f"s1@{short}-{short + 2}"}  # fmt: skip
    back = plan(url, file, model, max_length=short, over_long="split")
    assert set(planned(url)) == {"s0", f"s1@0-{short}", f"s1@{short}-{short + 1}"}
    assert back.deleted == 0
    with pytest.raises(InvalidInput, match="planned already, whole or in other pieces"):
        plan(url, file, model, max_length=short - 1, over_long="truncate")


def _dry(url: str, file: Path, model: str, folder: Path) -> dict[str, dict[str, Any]]:
    other = new_lake(folder / "other")
    plan(other, file, model)
    return planned(other)


def test_two_generations_at_once(
    url: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = chats(tmp_path, 20)
    plan(url, file, model)
    gate = threading.Barrier(2)
    real = run._Commit.build

    def together(self: Any, state: Any) -> Any:
        if state.version == 1:
            gate.wait(60)
        return real(self, state)

    monkeypatch.setattr(run._Commit, "build", together)
    errors: list[HslakeError] = []

    def call(options: dict[str, Any]) -> None:
        try:
            plan(url, file, model, **options)
        except HslakeError as error:
            errors.append(error)

    threads = [
        threading.Thread(target=call, args=(o,))
        for o in ({"template_args": {"shout": True}}, {"last_turn_only": True})
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert errors == []
    rows = planned(url)
    assert len(rows) == 20 and {r["generation"] for r in rows.values()} == {3}
    assert len({r["template_hash"] for r in rows.values()}) == 1  # one after the other, each whole


def test_the_command_says_what_is_lost(url: str, model: str, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from hslake.cli import app

    file = chats(tmp_path)
    call = ["plan", url, str(file), "--source", "A1", "--tokenizer", model]
    runner = CliRunner()
    assert runner.invoke(app, call).exit_code == 0
    other = [*call, "--template-arg", "shout=true"]
    told = runner.invoke(app, [*other, "--dry-run"])
    assert "would begin a new generation: 3 planned samples are invalidated, 0 of" in told.stderr
    assert "3 would be planned anew" in told.stdout
    done = runner.invoke(app, [*other, "--json", "--report", str(tmp_path / "r.jsonl")])
    assert '"replaced": 3' in done.stdout and "began a new generation" in done.stderr
    assert (tmp_path / "r.jsonl").read_text().count('"new generation"') == 3
    for wrong in (
        ["--template-arg", "shout"],
        ["--column", "a=b"],
        ["--dedup", "x"],
        ["--over-long", "cut"],
        ["--bad-rows", "x"],
    ):
        assert runner.invoke(app, [*call, *wrong]).exit_code == 2


def _chat(name: str, answer: str, **more: Any) -> dict[str, Any]:
    told = [{"role": "user", "content": "you"}, {"role": "assistant", "content": answer}]
    return {"sample_id": name, "messages": told, **more}


def _splits(url: str) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for row in planned(url, "sample_id, prompt_hash, split").values():
        found.setdefault(row["prompt_hash"], set()).add(row["split"])
    return found


def test_a_new_sample_follows_the_prompt_of_a_new_generation(
    url: str, model: str, tmp_path: Path
) -> None:
    """Both come in one call: where the new prompt is, the plan does not say yet."""
    plan(url, write(tmp_path / "a.jsonl", _chat("a", "fine", split="validation")), model)
    both = write(tmp_path / "b.jsonl", _chat("c", "how"), _chat("a", "fine"))
    done = plan(url, both, model, template_args={"shout": True})
    assert (done.replaced, done.added) == (1, 1)
    assert list(_splits(url).values()) == [{"validation"}]


@pytest.mark.parametrize("size", [5, 100])
def test_new_pieces_stay_in_the_split_of_their_sample(
    url: str, model: str, tmp_path: Path, size: int
) -> None:
    row = _chat("a", "fine how you fine how you fine how")
    first = write(tmp_path / "a.jsonl", row | {"split": "validation"})
    plan(url, first, model, max_length=size, over_long="split")  # the larger one leaves it whole
    again: dict[str, Any] = {"max_length": 5, "over_long": "split", "check_splits": True}
    file = write(tmp_path / "b.jsonl", row)
    done = plan(url, file, model, template_args={"shout": True}, **again)
    assert done.added and len(planned(url)) > 1
    assert list(_splits(url).values()) == [{"validation"}]
