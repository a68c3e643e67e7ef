-- name: rms_outliers
-- description: streams of samples whose rms is far from the others' of their stream
-- params: deviations=12.0 min 0, least=0.05 min 0, source=%, limit=1000 min 0
-- Robust: the distance from the median, in units of 1.4826 times the median absolute deviation
-- (a standard deviation, were the values normal), of the logarithm of the rms. `least` is the
-- smallest deviation that is taken for one, as a factor: where most samples agree to the last digit
-- nothing is an outlier for differing in it. A zero rms is of the query constant_streams.
with streams as materialized (
    select sample_id, source, segment_id, length, rms, ln(rms) as level, n
    from (
        select sample_id, source, segment_id, length, unnest(rms) as rms,
            generate_subscripts(rms, 1) as n
        from samples where source like $source
    ) where rms > 0
), middle as (
    select n, median(level) as middle from streams group by n
), spread as (
    select n, any_value(middle) as middle,
        greatest(1.4826 * median(abs(level - middle)), ln(1 + $least)) as deviation
    from streams join middle using (n) group by n
)
select sample_id, source, spec.streams[n] as stream, rms, exp(middle) as median_rms,
    round((level - middle) / deviation, 1) as deviations, length, segment_id
from streams join spread using (n), spec
where abs(level - middle) > $deviations * deviation
order by abs(level - middle) / deviation desc, sample_id, n limit $limit
