"""Names that no score may have, because metrics under `reward/` and `holdout/` have them: reward/total and so on."""

RESERVED_NAMES = (
    "total",
    "std",
    "group_std",
    "advantage_size",
    "failed",
    "starved_groups",
    "flat_groups",
    "error",
    "diverged",
)
