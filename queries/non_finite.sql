-- name: non_finite
-- description: streams of samples with NaN or infinite values, most first
-- params: source=%, limit=1000 min 0
with streams as (
    select sample_id, source, segment_id, length,
        unnest(nonfinite) as values, generate_subscripts(nonfinite, 1) as n
    from samples where source like $source and list_sum(nonfinite) > 0
)
select sample_id, source, spec.streams[n] as stream, values,
    values / (length::double * spec.hidden_size) as fraction, segment_id
from streams, spec where values > 0
order by values desc, sample_id, n limit $limit
