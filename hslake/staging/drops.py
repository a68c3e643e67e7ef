"""Why attempts are dropped: a reason is `<kind>` or `<kind>: <detail>`, and kinds are counted."""

KINDS = (
    "no space",  # no rows could be reserved in time
    "copies late",  # those of earlier forwards did not end in time
    "refused",  # of another lake, or longer than a part
    "wrong length",  # the prompt is not as long as its request id says
    "not its tokens",  # media, an adapter or embeddings: not the states of the tokens alone
    "out of order",  # rows that do not continue those before
    "aged",  # nothing came any more
    "stopped",  # the capture ended
)
OTHER = "other"


def kind_of(reason: str) -> str:
    """The kind of a reason, one of KINDS; OTHER for any other text."""
    kind = reason.partition(":")[0]
    return kind if kind in KINDS else OTHER
