-- The beginning of each script that counts by days or months of UTC; see SOURCES in redis_scripts.py.
-- period returns the day as '2026-11-23' or the month as '2026-11', and the seconds until it ends. Hinnant 2013,
-- "chrono-compatible low-level date algorithms": days since 1970 -> civil date.
local function civil(days)
  local shifted = days + 719468
  local era = math.floor(shifted / 146097)
  local of_era = shifted - era * 146097
  local years = math.floor((of_era - math.floor(of_era / 1460) + math.floor(of_era / 36524)
    - math.floor(of_era / 146096)) / 365)
  local of_year = of_era - (365 * years + math.floor(years / 4) - math.floor(years / 100))
  local shifted_month = math.floor((5 * of_year + 2) / 153)
  local day = of_year - math.floor((153 * shifted_month + 2) / 5) + 1
  local month = shifted_month < 10 and shifted_month + 3 or shifted_month - 9
  return years + era * 400 + (month <= 2 and 1 or 0), month, day
end

local function period(seconds, kind)
  local today = math.floor(seconds / 86400)
  local year, month, day = civil(today)
  if kind == 'd' then return string.format('%04d-%02d-%02d', year, month, day), (today + 1) * 86400 - seconds end
  local first = today
  repeat first = first + 1 until select(2, civil(first)) ~= month
  return string.format('%04d-%02d', year, month), first * 86400 - seconds
end
