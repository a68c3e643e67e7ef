-- name: duplicates
-- description: samples that are live twice (damage), and different samples with the same tokens
-- params: limit=1000 min 0
with live as materialized (
    select sample_id, token_hash, segment_id, length from samples
), copies as (
    select 'same sample_id' as kind, sample_id as key, count(*) as copies,
        sum(length)::bigint as tokens, list(segment_id order by segment_id)[:10] as members
    from live
    -- lists are made of the few that occur twice, not of all
    where sample_id in (select sample_id from live group by sample_id having count(*) > 1)
    group by sample_id
    union all
    select 'same tokens' as kind, token_hash as key, count(distinct sample_id) as copies,
        sum(length)::bigint as tokens, list(distinct sample_id order by sample_id)[:10] as members
    from live
    where token_hash in (select token_hash from live group by token_hash having count(*) > 1)
    group by token_hash having count(distinct sample_id) > 1
)
select * from copies order by kind, copies desc, key limit $limit
