-- name: retries
-- description: attempts beyond the first, and captures that the hook dropped, of each run
-- params: limit=100 min 0
-- Of those captured, each needed one attempt: what goes beyond is work done twice.
select
    run_id,
    started_at,
    captured,
    retried,
    dropped,
    refused,
    round(100.0 * retried / nullif(captured + retried, 0), 3) as retried_percent,
    round(100.0 * dropped / nullif(captured + dropped, 0), 3) as dropped_percent
from runs
where captured is not null
order by last_seen_at desc, run_id limit $limit
