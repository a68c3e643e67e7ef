-- name: epoch
-- description: the order in which one epoch visits the samples
-- params: seed=0 min 0, epoch=0 min 0
-- md5 of (seed, epoch, sample_id): the same order on every machine and in every DuckDB version,
-- which hash() and random() do not promise. sample_id breaks ties, so the order is total.
select
    row_number() over (
        order by md5(concat(cast($seed as bigint), ':', cast($epoch as bigint), ':', sample_id)), sample_id
    ) - 1 as position,
    sample_id,
    source,
    length
from samples
order by position
