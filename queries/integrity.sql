-- name: integrity
-- description: checks that need only the manifest; `failures` should be 0 everywhere
with live as materialized (
    select sample_id, source, split, length, token_hash, segment_id, token_start, segment_tokens,
        list_sum(nonfinite) as nonfinite, list_min(absmax) as least, len(checksum) as checksums,
        len(rms) as statistics, coalesce(generation, 1) as generation
    from samples
), planned as materialized (
    select sample_id, source, split, length, token_hash, coalesce(generation, 1) as generation
    from plan
), twice as (
    select sample_id from live group by sample_id having count(*) > 1
), checks as (
    select 1 as n, 'sample live twice' as "check", count(*) as failures, min(sample_id) as example
    from twice
    union all
    select 2, 'not in the plan', count(*), min(s.sample_id)
    from live s anti join planned p on p.sample_id = s.sample_id
    union all
    select 3, 'tokens, length or split other than planned', count(*), min(s.sample_id)
    from live s join planned p on p.sample_id = s.sample_id
    -- of a former generation, other tokens are as they should be (the view `invalidated`)
    where p.source <> s.source or p.split <> s.split or p.generation <= s.generation
        and (p.token_hash <> s.token_hash or p.length <> s.length)
    union all
    select 4, 'non-finite values', count(*), min(sample_id) from live where nonfinite > 0
    union all
    select 5, 'all-zero stream', count(*), min(sample_id) from live where least = 0
    union all
    select 6, 'wrong number of streams', count(*), min(sample_id)
    from live, spec
    where checksums <> len(spec.streams) or statistics <> len(spec.streams)
    union all
    select 7, 'rows outside the segment or off a chunk boundary', count(*), min(sample_id)
    from live
    where length < 1 or token_start < 0 or token_start + length > segment_tokens
        or token_start % 256 <> 0
    union all
    select 8, 'samples of one segment overlap', count(*), min(sample_id)
    from (
        select sample_id, segment_id, token_start,
            lag(token_start + length) over (partition by segment_id order by token_start) as ends
        from live
    ) where ends > token_start
    union all
    select 9, 'segment described in two ways', count(*), min(segment_id)
    from (
        select segment_id from manifest where op = 'add' group by segment_id
        having min(inventory_digest) <> max(inventory_digest)
            or min(segment_stored_bytes) <> max(segment_stored_bytes)
            or min(segment_tokens) <> max(segment_tokens)
    )
    union all
    select 10, 'hide of a sample that was never added', count(*), min(h.sample_id)
    from hides h anti join manifest m
        on m.sample_id = h.sample_id and m.segment_id = h.segment_id and m.op = 'add'
    union all
    select 11, 'sample in a condemned segment', count(*), min(s.sample_id)
    from live s semi join manifest c on c.segment_id = s.segment_id and c.op = 'condemn'
)
select "check", failures, example from checks order by n
