-- name: constant_streams
-- description: streams of samples that are all zero, or in which all values have one magnitude
-- params: spread=0.001 min 0, source=%, limit=1000 min 0
-- absmax equals rms only where every value has the same magnitude; of real states the largest is
-- many times the rms. `spread`: absmax / rms - 1 up to which a stream counts as constant.
with streams as (
    select sample_id, source, segment_id, length, unnest(rms) as rms, unnest(absmax) as absmax,
        generate_subscripts(rms, 1) as n
    from samples where source like $source
)
select sample_id, source, spec.streams[n] as stream,
    case when absmax = 0 then 'zero' else 'constant' end as kind, rms, absmax, length, segment_id
from streams, spec where absmax <= rms * (1 + $spread)
order by kind desc, sample_id, n limit $limit
