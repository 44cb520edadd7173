from .epoch_order import (
    EpochOrder as EpochOrder,
    OrderSettings as OrderSettings,
    StreamOrder as StreamOrder,
    Words as Words,
    augment_rng_keys as augment_rng_keys,
    choose_settings as choose_settings,
    derive_rng_key as derive_rng_key,
    make_rng_key as make_rng_key,
    permute as permute,
    random_words as random_words,
    reverse_bits as reverse_bits,
    to_unit as to_unit,
)
from .mixture import (
    MixedOrder as MixedOrder,
    MixedSplit as MixedSplit,
    SourceOrder as SourceOrder,
    Stop as Stop,
    Weights as Weights,
    decode_picks as decode_picks,
    make_mixed_order as make_mixed_order,
    weigh_by_size as weigh_by_size,
)
from .quality import (
    IDEAL_DISTANCE as IDEAL_DISTANCE,
    OrderQuality as OrderQuality,
    divide_among_ranks as divide_among_ranks,
    measure_quality as measure_quality,
    shards_of as shards_of,
)
from .schedule import count_weights as count_weights
from .split import (
    DROP_LAST as DROP_LAST,
    POLICIES as POLICIES,
    Remainder as Remainder,
    RemainderPolicy as RemainderPolicy,
    Split as Split,
    iterate_steps as iterate_steps,
    split_whole as split_whole,
)
from .state import (
    Cursor as Cursor,
    EpochCounter as EpochCounter,
    Progress as Progress,
    check_epoch as check_epoch,
    dump_state as dump_state,
    find_differences as find_differences,
    read_state as read_state,
)
