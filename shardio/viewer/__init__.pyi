from .duplicates import (
    DEFAULT_THRESHOLD as DEFAULT_THRESHOLD,
    MAX_THRESHOLD as MAX_THRESHOLD,
    Copy as Copy,
    DuplicateGroup as DuplicateGroup,
    DuplicateReport as DuplicateReport,
    find_duplicates as find_duplicates,
)
from .overview import Overview as Overview, Thumbnail as Thumbnail, look_at as look_at
from .pages import (
    describe_labels as describe_labels,
    make_duplicates_page as make_duplicates_page,
    make_overview_page as make_overview_page,
)
from .sources import ImageSource as ImageSource, holds_shards as holds_shards, open_source as open_source
