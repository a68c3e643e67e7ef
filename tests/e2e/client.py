"""The few HTTP calls that the tests make themselves, next to what `hslake extract` sends."""

import json
import urllib.error
import urllib.request
from typing import Any


def get(url: str, timeout: float = 180.0) -> Any:
    """Parsed JSON of a GET."""
    with urllib.request.urlopen(url, timeout=timeout) as answer:
        return json.loads(answer.read() or b"null")


def text(url: str, timeout: float = 180.0) -> str:
    """Body of a GET."""
    with urllib.request.urlopen(url, timeout=timeout) as answer:
        body: bytes = answer.read()
        return body.decode()


def code(url: str, body: dict[str, Any] | None = None, timeout: float = 180.0) -> int:
    """Status code of a GET, or of a POST of `body`."""
    try:
        with urllib.request.urlopen(_call(url, body), timeout=timeout) as answer:
            answer.read()
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def post(url: str, body: dict[str, Any], timeout: float = 180.0) -> Any:
    """Parsed JSON answer of a POST."""
    with urllib.request.urlopen(_call(url, body), timeout=timeout) as answer:
        return json.loads(answer.read() or b"null")


def _call(url: str, body: dict[str, Any] | None) -> urllib.request.Request:
    data = None if body is None else json.dumps(body).encode()
    return urllib.request.Request(url, data, {"content-type": "application/json"})


def request(ids: list[int], new_tokens: int = 1, **more: Any) -> dict[str, Any]:
    """Body of a greedy /generate request for `new_tokens`; `more` are further fields of it, such
    as rid."""
    sampling = {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
    return {"input_ids": ids, "sampling_params": sampling, **more}


def generate(url: str, ids: list[int], new_tokens: int = 1, **more: Any) -> dict[str, Any]:
    """One greedy answer of /generate."""
    return post(url + "/generate", request(ids, new_tokens, **more))


def answers(url: str, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Output tokens and log-probs of prompt and output, one request at a time: the batches are
    the same on every server, so equal servers give equal bits."""
    found = []
    for ids in prompts:
        out = generate(url, ids, 8, return_logprob=True, logprob_start_len=0)
        info = out["meta_info"]
        found.append(
            {
                "tokens": out["output_ids"],
                "prompt": [x[0] for x in info["input_token_logprobs"]],
                "output": [x[0] for x in info["output_token_logprobs"]],
            }
        )
    return found
