-- name: lengths
-- description: histogram of sample lengths, planned and committed, in buckets of `width` tokens
-- params: width=512 min 1, source=%
with lengths as (
    select length // $width as bucket, 1 as planned, 0 as committed, length as planned_tokens,
        0 as committed_tokens
    from plan where source like $source
    union all
    select length // $width, 0, 1, 0, length from samples where source like $source
)
select
    (bucket * $width)::bigint as from_tokens,
    ((bucket + 1) * $width - 1)::bigint as to_tokens,
    sum(planned)::bigint as planned,
    sum(committed)::bigint as committed,
    sum(planned_tokens)::bigint as planned_tokens,
    sum(committed_tokens)::bigint as committed_tokens
from lengths
group by bucket
order by bucket
