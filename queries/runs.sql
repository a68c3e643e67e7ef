-- name: runs
-- description: how each run of extract went, newest first; no outcome: it is live, or was cut off
-- params: command=%, limit=100 min 0
select
    started_at,
    ended_at,
    coalesce(outcome, 'none said') as outcome,
    command,
    host,
    planned,
    committed,
    missing,
    captured,
    captured_tokens,
    retried,
    dropped,
    refused,
    canaries,
    round(seconds, 1) as seconds,
    round(tokens_per_second, 1) as tokens_per_second,
    last_seen_at,
    reason,
    run_id
from runs
where coalesce(command, '') like $command
order by last_seen_at desc, run_id limit $limit
