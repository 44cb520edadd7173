from .duplicates import (
    Copy as Copy,
    DuplicateGroup as DuplicateGroup,
    DuplicateReport as DuplicateReport,
    describe_distance as describe_distance,
    describe_labels as describe_labels,
    find_duplicates as find_duplicates,
    make_duplicates_page as make_duplicates_page,
)
from .overview import (
    Overview as Overview,
    Thumbnail as Thumbnail,
    look_at as look_at,
    make_overview_page as make_overview_page,
)
from .sources import (
    ImageSource as ImageSource,
    choose_evenly as choose_evenly,
    holds_shards as holds_shards,
    open_source as open_source,
)

DEFAULT_THRESHOLD: int
MAX_THRESHOLD: int
