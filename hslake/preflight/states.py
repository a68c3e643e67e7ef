"""The probe's states as they lie in staging: structure, values, and the server's own word."""

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from hslake.checks import Check, failed, passed, warned
from hslake.checksum import sample_checksum, to_float32
from hslake.errors import HslakeError
from hslake.extract.canary import prompt_log_probs
from hslake.lmhead import LmHead, next_log_probs, tolerance
from hslake.preflight.probe import Probe, Rows
from hslake.spec import LakeSpec
from hslake.streams import FINAL

_TELLING = 0.5  # least share of tokens that the model says more of than that all are alike
_REPORT = "do not extract: report this with the server's log and SGLang version"


def check_structure(rows: Rows, spec: LakeSpec, ids: Sequence[int]) -> Check:
    """Streams, dtype, shape and byte count."""
    name, attributes = "structure", rows.part.attributes
    want = {"streams": list(spec.streams), "dtype": spec.dtype, "hidden_size": spec.hidden_size}
    found = {key: attributes[key] for key in want}
    if found != want:
        return failed(name, f"{rows.part.path}: {found}, expected {want}", _REPORT)
    hidden = rows.hidden
    size = sum(h.nbytes for h in hidden)
    if len(hidden) != len(spec.streams) or size != len(ids) * spec.bytes_per_token:
        text = f"{len(hidden)} streams, {size} bytes for {len(ids)} tokens"
        return failed(name, text, _REPORT)
    shape = f"{len(hidden)} streams of {hidden[0].shape[0]} x {hidden[0].shape[1]} {spec.dtype}"
    return passed(name, f"{shape}, {size:,} bytes")


def check_states(rows: Rows, spec: LakeSpec, ids: Sequence[int]) -> Check:
    """Finite, not constant, not equal, and those that the hook checksummed."""
    name, wrong = "states", []
    if rows.input_ids.tolist() != list(ids):
        wrong.append("the token ids are not those sent")
    sums = [sample_checksum(np.ascontiguousarray(h)) for h in rows.hidden]
    if sums != list(rows.reserved.checksum):
        wrong.append("the rows are not those that the hook checksummed")
    values = [to_float32(h, spec.dtype) for h in rows.hidden]
    for stream, v in zip(spec.streams, values, strict=True):
        if not np.isfinite(v).all():
            wrong.append(f"stream {stream} has values that are not finite")
        elif not (v.std(axis=1) > 0).all():
            wrong.append(f"stream {stream} has constant rows")
        elif len(v) > 1 and (v == v[0]).all():
            wrong.append(f"stream {stream} is the same for every token")
    pairs = itertools.combinations(zip(spec.streams, rows.hidden, strict=True), 2)
    wrong += [f"streams {a} and {b} are equal" for (a, x), (b, y) in pairs if np.array_equal(x, y)]
    if wrong:
        return failed(name, "; ".join(wrong), _REPORT)
    rms = ", ".join(
        f"{s} {np.sqrt((v**2).mean()):.3g}" for s, v in zip(spec.streams, values, strict=True)
    )
    return passed(name, f"finite, varied, all different; rms {rms}")


# -- log-probs ----------------------------------------------------------------------------------


def check_log_probs(
    probes: Sequence[tuple[Probe, Rows]],
    spec: LakeSpec,
    head: LmHead,
    tell: Callable[[float], None] = lambda done: None,
) -> Check:
    """Whether `final` rows through the LM head give the server's own log-probs of the prompts.

    Rows of another boundary, of another position or of another request do not, unless the model
    takes all tokens for equally likely: then nothing is judged.
    """
    name = "log-probs"
    served, rows, targets = [], [], []
    for probe, found in probes:
        told = prompt_log_probs(probe.answer, probe.ids)
        if told is None:
            why = probe.refused or "its answer has none"
            todo = "look whether the server was started with something that forbids log-probs"
            return warned(
                name, f"not judged: the server gave no log-probs of the prompt: {why}", todo
            )
        served.append(told)
        rows.append(to_float32(found.hidden[spec.streams.index(FINAL)], spec.dtype)[:-1])
        targets.append(np.asarray(probe.ids[1:], np.int64))
    try:
        made = next_log_probs(head, np.concatenate(rows), np.concatenate(targets), spec.dtype, tell)
    except HslakeError as error:
        todo = "give --model the folder that the server runs"
        return warned(name, f"not judged: {error}", todo)
    off = np.abs(made.values - np.concatenate(served))
    allowed = tolerance(spec.dtype, made.peaks)
    over = ~(off <= allowed)  # a NaN is over too
    worst = int(np.argmax(np.where(np.isfinite(off), off / allowed, np.inf)))
    compared = f"{len(off):,} tokens through {head.weight.name}"
    if over.any():
        found_text = (
            f"`final` does not give the server's log-probs: {int(over.sum())} of {compared} are "
            f"off by more than allowed, the worst by {off[worst]:.3g} (allowed: "
            f"{allowed[worst]:.3g} in {spec.dtype})"
        )
        todo = "do not extract: --model is not what the server runs, or the rows are of another "
        return failed(name, found_text, todo + "boundary or position: report this with its log")
    telling = np.abs(made.values + np.log(head.vocab)) > allowed
    if telling.mean() < _TELLING:
        flat = (
            f"not judged: {compared} agree, but {int((~telling).sum())} are as good as uniform "
            "over the vocabulary, and other rows would agree as well"
        )
        todo = "look whether the server has the model's weights: random ones (--load-format dummy) "
        return warned(name, flat, todo + "look like this")
    text = f"{compared} agree with the server's: the worst is {off[worst]:.2g} off, where "
    return passed(
        name, f"{text}{allowed[worst]:.2g} is allowed in {spec.dtype}; mean {off.mean():.2g}"
    )
