-- name: forecast
-- description: bytes the whole plan will take on disk at the ratio measured so far (or `ratio`)
-- params: ratio=0.0 min 0
-- stored bytes count all segments ever committed, also hidden samples: they are on disk until a
-- vacuum. ratio (stored / raw) is used while nothing is committed yet, or when it is not 0.
with planned as (
    select coalesce(sum(planned_tokens), 0)::bigint as tokens,
        coalesce(sum(missing_tokens), 0)::bigint as missing
    from coverage
), stored as (
    select coalesce(sum(stored_bytes), 0)::bigint as bytes,
        coalesce(sum(raw_bytes), 0)::bigint as raw_bytes,
        coalesce(sum(tokens), 0)::bigint as tokens
    from segments
), whole as (
    -- uncompressed, the padding of a sample's last chunk takes its room too
    select sum(ceil(length / spec.chunk_tokens) * spec.chunk_tokens) / sum(length) as ratio
    from plan, spec
), rate as (
    -- before the first commit: what the codec reaches on real bfloat16 states
    select case
        when $ratio > 0 then $ratio::double
        when s.raw_bytes > 0 then s.bytes / s.raw_bytes
        when spec.codec = 'none' then coalesce(w.ratio, 1.0)
        when spec.dtype <> 'bfloat16' then 1.0
        when spec.codec = 'bf16plane' then 0.675
        else 0.689 end as ratio,
        case when $ratio > 0 then 'given' when s.raw_bytes > 0 then 'measured' else 'typical' end
            as basis
    from stored s, whole w, spec
)
select
    p.tokens as planned_tokens,
    p.tokens - p.missing as committed_tokens,
    p.missing as missing_tokens,
    s.bytes as stored_bytes,
    s.raw_bytes,
    r.ratio,
    r.basis,
    (p.tokens * spec.bytes_per_token)::bigint as forecast_raw_bytes,
    (s.bytes + p.missing * spec.bytes_per_token * r.ratio)::bigint as forecast_stored_bytes,
    spec.estimate_tokens,
    spec.estimate_bytes,
    (s.bytes + p.missing * spec.bytes_per_token * r.ratio) / spec.estimate_bytes as of_estimate
from planned p, stored s, rate r, spec
