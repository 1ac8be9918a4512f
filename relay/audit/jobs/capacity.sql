-- Growth a day, when the disk is full, what the tiers save
--
-- below_floor: error | the disk is too full: the relay accepts nothing
--   The relay accepts nothing any more. Free space, or lower `disk.floor_mib`.
--
-- full_soon: warning | the disk will be full within 30 days
--   `relay prune` and shorter retention free space; see also docs/runbook.md.

-- findings: below_floor
SELECT free_bytes, floor_bytes, disk_bytes, home_bytes
FROM capacity_forecast WHERE free_bytes < floor_bytes

-- findings: full_soon
SELECT full_in_days_kept, free_bytes, floor_bytes, bytes_per_day
FROM capacity_forecast WHERE free_bytes >= floor_bytes AND full_in_days_kept <= 30
