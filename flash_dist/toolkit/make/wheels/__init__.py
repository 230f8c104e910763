"""A wheel that is built: repaired, tagged, judged, read and compared."""
