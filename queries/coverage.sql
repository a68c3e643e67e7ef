-- name: coverage
-- description: planned, committed and missing samples and tokens, by source and split, with a total
select
    case when grouping(source) = 1 then '(total)' else source end as source,
    case when grouping(source) = 1 then '' else split end as split,
    sum(planned)::bigint as planned,
    sum(committed)::bigint as committed,
    sum(missing)::bigint as missing,
    sum(planned_tokens)::bigint as planned_tokens,
    sum(committed_tokens)::bigint as committed_tokens,
    round(100.0 * sum(committed_tokens)::double / sum(planned_tokens)::double, 3) as percent
from coverage
group by grouping sets ((source, split), ())
-- without a plan there is no row to sum: no total either
having sum(planned) is not null
order by grouping(source), 1, 2
