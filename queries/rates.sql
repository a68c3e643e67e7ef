-- name: rates
-- description: tokens a second in each interval of `seconds`: captured by runs, and committed
-- params: seconds=600.0 min 1.0, run=%, limit=1000 min 0
-- Captured: from the figures that a run tells, spread evenly over the time between two of them, by
-- the clock of the run that never goes back. Committed: by the time of the commits, of all that was
-- ever added.
with told as (
    select
        run_id, seq, captured_tokens as total, retried, dropped,
        first_value(epoch(told_at) - elapsed_ms / 1000) over (partition by run_id order by seq)
            + elapsed_ms / 1000 as second
    from run_log where captured_tokens is not null and run_id like $run
), steps as (
    select
        run_id, second as upto, lag(second) over w as since, total - lag(total) over w as tokens,
        retried - lag(retried) over w as retried, dropped - lag(dropped) over w as dropped
    from told window w as (partition by run_id order by seq)
), spread as (
    select
        unnest(range(floor(since / $seconds)::bigint, ceil(upto / $seconds)::bigint)) as bucket,
        since, upto, tokens, retried, dropped
    from steps where upto > since
), captured as (
    select
        bucket,
        sum(tokens * part) as tokens, sum(retried * part) as retried, sum(dropped * part) as dropped
    from (
        select *, greatest(0.0, least(upto, (bucket + 1) * $seconds)
            - greatest(since, bucket * $seconds)) / (upto - since) as part
        from spread
    ) group by bucket
), committed as (
    select floor(epoch(committed_at) / $seconds)::bigint as bucket, sum(length)::bigint as tokens,
        count(*) as samples
    from manifest where op = 'add' group by bucket
)
select
    to_timestamp(bucket * $seconds) as since,
    round(c.tokens / $seconds, 2) as captured_tokens_per_second,
    round(coalesce(m.tokens, 0) / $seconds, 2) as committed_tokens_per_second,
    round(c.retried, 1) as retried,
    round(c.dropped, 1) as dropped,
    coalesce(m.samples, 0) as committed_samples
from captured c full join committed m using (bucket)
order by bucket desc limit $limit
