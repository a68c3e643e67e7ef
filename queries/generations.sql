-- name: generations
-- description: planned and committed samples by generation of the plan, and what it invalidated
-- A new generation begins when another tokenizer, chat template or argument made other tokens, or
-- another mask, of the same text. `committed` is as the plan asks now; `invalidated` is in the lake
-- as an older generation had it, until extract has captured it anew. generation null: samples that
-- a new generation cut in another way, and that are not planned any more.
with planned as materialized (
    select sample_id, source, length, token_hash, mask_hash, coalesce(generation, 1) as generation,
        tokenizer_hash, template_hash
    from plan
), live as materialized (
    select sample_id, length, token_hash, mask_hash from samples
), marked as (
    select p.*, s.sample_id is not null as is_live,
        s.token_hash = p.token_hash and coalesce(s.mask_hash = p.mask_hash, true) as is_same,
        s.length as live_length
    from planned p left join live s on s.sample_id = p.sample_id
)
select generation, tokenizer_hash, template_hash,
    count(*) as planned,
    sum(length)::bigint as planned_tokens,
    count(*) filter (is_same) as committed,
    count(*) filter (is_live and not is_same) as invalidated,
    coalesce(sum(live_length) filter (is_live and not is_same), 0)::bigint as invalidated_tokens
from marked group by all
union all
select null, null, null, 0, 0, 0, count(*), coalesce(sum(length), 0)::bigint
from invalidated where planned_generation is null having count(*) > 0
order by 1 nulls last, 2, 3
