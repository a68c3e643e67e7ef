-- name: equal_states
-- description: equal states under different tokens, and equal tokens with different states
-- params: limit=1000 min 0
-- A checksum of 64 bits a stream: two samples have the same by chance once in 2^64 pairs. Equal
-- tokens may give different states: batches of other sizes round differently, so that kind only
-- says where to look. All-zero states are of the query constant_streams.
with live as materialized (
    select sample_id, token_hash, checksum, list_max(absmax) > 0 as not_zero from samples
), states as (
    select checksum from live where not_zero group by checksum
    having count(distinct token_hash) > 1
), tokens as (
    select token_hash from live group by token_hash having count(distinct checksum) > 1
)
select * from (
    select 'equal states, other tokens' as kind, any_value(token_hash) as token_hash,
        count(*) as samples, list(sample_id order by sample_id)[:10] as members
    from live semi join states using (checksum) group by checksum
    union all
    select 'equal tokens, other states', token_hash, count(*),
        list(sample_id order by sample_id)[:10]
    from live semi join tokens using (token_hash) group by token_hash
) order by kind, samples desc, token_hash limit $limit
