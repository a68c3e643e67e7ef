-- name: gaps
-- description: planned samples that are not in the lake, longest first
-- params: source=%, split=%, limit=1000 min 0
-- source and split are LIKE patterns; all_missing counts every gap, also those past the limit
select p.sample_id, p.source, p.split, p.length, count(*) over () as all_missing
from plan p
anti join samples s on s.sample_id = p.sample_id and s.token_hash = p.token_hash
    and coalesce(s.mask_hash = p.mask_hash, true)
where p.source like $source and p.split like $split
order by p.length desc, p.sample_id
limit $limit
