-- name: refusals
-- description: samples that are not asked for again, with the reason; `still_missing`: planned so
-- params: reason=%, source=%, limit=1000 min 0
select
    r.sample_id,
    p.source,
    p.length,
    r.reason,
    r.server,
    r.refused_at,
    p.sample_id is not null and s.sample_id is null as still_missing,
    r.run_id
from refusals r
left join plan p on p.sample_id = r.sample_id and p.token_hash = r.token_hash
left join samples s on s.sample_id = r.sample_id and s.token_hash = r.token_hash
where r.reason like $reason and coalesce(p.source, '') like $source
order by r.refused_at desc, r.sample_id limit $limit
