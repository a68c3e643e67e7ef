-- name: sources
-- description: what each source holds: samples, tokens, lengths, supervised share, raw bytes
select
    source,
    count(*) as samples,
    sum(length)::bigint as tokens,
    min(length) as shortest,
    round(avg(length), 1) as mean,
    max(length) as longest,
    round(100.0 * sum(supervised_tokens)::double / sum(length)::double, 2) as supervised_percent,
    count(*) filter (split = 'train') as train,
    count(*) filter (split <> 'train') as held_out,
    (sum(length) * any_value(spec.bytes_per_token))::bigint as raw_bytes
from samples, spec
group by source
order by source
